# SPDX-License-Identifier: Apache-2.0
"""The launches of a call among peers: which kernel, on how many CTAs, with which arguments. Makes none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from prime_kernels.moe.cuda_buffers import Buffer
from prime_kernels.moe.cuda_launch import Recorder
from prime_kernels.moe.cuda_maps import halves, matrices, reduce_cols, row_halves, rows
from prime_kernels.moe.cuda_variants import (
    PLAN_PEERS,
    POOL_ALIGN,
    ROW_WORDS,
    STAGE_PEERS,
    PlanView,
    address,
    gemm_key,
    peer_plan_numel,
    pool_rows,
    split,
)

if TYPE_CHECKING:
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.cuda_launch import BufferOrPair
    from prime_kernels.peers.base import PeerMemory

_PLAN_CLUSTER = 8  # kCtas of kernels_src/moe/plan.cuh
_PAIR_ROWS, _GATE_UP_COLUMNS = 256, 128  # of a tile of two CTAs; kGateUpColumns of kernels_src/moe/forward.cuh
# H200, one virtual rank: with a lag of 1, 2, 6 experts 2.60, 2.29, 2.27 ms (30B: 0.36 rounds an expert); with 1, 2, 3
# experts 7.41, 7.6 to 7.8, 7.65 ms (235B: 0.73 rounds an expert).
_LAG_ROUNDS = 0.7


class Counters(NamedTuple):
    """Of one call: all of them, three sets with one per 64 pool rows, and the number of CTAs that are through."""

    all: Buffer
    first: Buffer
    second: Buffer
    third: Buffer
    finished: Buffer


class PeerRecorder(Recorder):
    """Writes down the launches of one call among peers.

    Attributes:
        chained: Both GEMMs of the forward in one launch: an ablation, slower so far (docs/design.md).
        only_moves: The chained forward multiplies nothing: what its transport alone takes.
    """

    chained = False
    only_moves = False

    def __init__(self, config: MegaMoEConfig, index: int, fault: int, tokens: int, peers: PeerMemory) -> None:
        plan = Buffer.of("plan")
        super().__init__(config, index, fault, tokens, plan, peers.size)
        self.peers = peers
        self.plan_numel = peer_plan_numel(config, tokens, peers.size)
        self._plan = PlanView.of(plan, self.experts, tokens * config.topk, align=ROW_WORDS)

    def region(self, offset: int, *shape: int, itemsize: int = 2) -> Buffer:
        """A part of this rank's arena."""
        return Buffer(self.peers.address + offset, shape, itemsize)

    def plan_peers(
        self,
        x: Buffer,
        topk_ids: Buffer,
        topk_weights: Buffer,
        counts: tuple[Buffer, Buffer],
        score: Buffer,
        counters: Buffer,
    ) -> None:
        """Place every slot on the rank of its expert; x is copied to the arena meanwhile."""
        at, config = self._plan, self.config
        plan = {
            "ids": topk_ids.data_ptr(),
            "weights": topk_weights.data_ptr(),
            "counts": at.counts,
            "starts": at.starts,
            "slot_row": at.slot_row,
            "row_src": 0,
            "tokens_per_expert": counts[0].data_ptr(),
            "recv_per_expert": counts[1].data_ptr(),
            "row_score": score.data_ptr(),
            "counters": counters.data_ptr(),
            "fault": self._fault,
            "tokens": self.tokens,
            "topk": config.topk,
            "num_experts": config.num_experts,
            "num_counters": counters.numel(),
            "pool_rows": pool_rows(config, self.tokens, self.ep_size),
            "wide_ids": int(topk_ids.itemsize == 8),
        }
        args = {f"plan.{name}": value for name, value in plan.items()}
        args |= {"list": at.row_src, "peers": self.peers.address, "tokens": x.data_ptr()}
        args |= {"row_bytes": config.hidden * 2, "reserved": 0}
        grid = max(_PLAN_CLUSTER, self._sms // _PLAN_CLUSTER * _PLAN_CLUSTER)
        self._run(PLAN_PEERS, grid, args)

    def forward(
        self,
        x_rows: Buffer,
        weights: BufferOrPair,
        h: Buffer,
        preact: Buffer | None,
        w_down: Buffer,
        score: Buffer,
        y_rows: Buffer,
        counters: Counters,
    ) -> None:
        """Pull rows of x, multiply with gate and up, then with down, send peers' rows to them."""
        config, grid = self.config, self._sms // 2 * 2
        gate, up = halves(*split(weights))
        args = {
            "counts": self._plan.counts,
            "starts": self._plan.starts,
            "list": self._plan.row_src,
            "peers": self.peers.address,
            "row_score": score.data_ptr(),
            "pool": x_rows.data_ptr(),
            "y_rows": y_rows.data_ptr(),
            "arrivals": counters.first.data_ptr(),
            "h_done": counters.second.data_ptr(),
            "y_done": counters.third.data_ptr(),
            "finished": counters.finished.data_ptr(),
            "fault": self._fault,
            "num_experts": self.experts,
            "hidden": config.hidden,
            "intermediate": config.intermediate,
            "lag": lag(config, self.ep_size, grid // 2),
            "keep_z": int(preact is not None),
            "only_moves": int(self.only_moves),
            "reserved": 0,
            **self._activation,
        }
        tensors = {
            "x": rows(x_rows),
            "gate": reduce_cols(gate),
            "up": reduce_cols(up),
            "h": rows(h),
            "z": row_halves((preact or h).data_ptr(), h.shape[0], config.intermediate),
            "down": reduce_cols(matrices(w_down)),
            "y": rows(y_rows),
        }
        self._run(gemm_key("forward", config), grid, args, tensors)

    def stage_peers(self, dy: Buffer, x: Buffer | None, score: Buffer, counters: Counters) -> None:
        """Copy dy, and x unless peers kept its rows, to the arena; scores per pool row, counters at zero."""
        args = {
            "grads": dy.data_ptr(),
            "tokens": address(x),
            "starts": self._plan.starts,
            "list": self._plan.row_src,
            "peers": self.peers.address,
            "row_score": score.data_ptr(),
            "counters": counters.all.data_ptr(),
            "num_tokens": self.tokens,
            "row_bytes": self.config.hidden * 2,
            "num_experts": self.experts,
            "num_counters": counters.all.numel(),
        }
        self._run(STAGE_PEERS, 2 * self._sms, args)

    def peer_counters(self, pool: int) -> Counters:
        """Three sets, of 64 pool rows a counter, and one that counts CTAs; the first launch of a call zeroes them."""
        blocks = pool // POOL_ALIGN
        every = self.work.take(3 * blocks + 1, itemsize=4)
        first, second, third = (Buffer(every.at + 4 * blocks * i, (blocks,), 4) for i in range(3))
        return Counters(every, first, second, third, Buffer(every.at + 12 * blocks, (1,), 4))

    def among_peers(self, copied: Buffer, **extra: int) -> dict[str, int]:
        """Arguments that a grouped GEMM has among peers; `copied` counts the rows that it pulls."""
        here = {"list": self._plan.row_src, "peers": self.peers.address, "copied": copied.data_ptr()}
        return here | extra

    def sending(self, counters: Counters, rows: Buffer) -> dict[str, int]:
        """The same for one that sends its result's rows home and ends the call; it may pull, too."""
        return self.among_peers(
            counters.second,
            out_rows=rows.data_ptr(),
            out_done=counters.third.data_ptr(),
            finished=counters.finished.data_ptr(),
        )

    def combine_peers(self, pool: Buffer, y: Buffer | None, dscore: Buffer | None = None) -> None:
        """Sum the rows that are here and those that peers sent."""
        layout, config = self.peers.layout, self.config
        slots = self.tokens * config.topk
        self.combine(
            pool,
            y,
            self.region(layout.dscore, slots, 1, itemsize=4),
            dscore,
            results=self.region(layout.results, slots, config.hidden),
            rank=self.peers.rank,
            parts_by_slot=True,
        )


def lag(config: MegaMoEConfig, ep_size: int, clusters: int) -> int:
    """Experts that the second GEMM stays behind the first: _LAG_ROUNDS rounds of all clusters over mean experts."""
    experts = config.num_experts // ep_size
    rows_of_mean = config.max_tokens_per_rank * config.topk / experts
    tasks = math.ceil(rows_of_mean / _PAIR_ROWS) * math.ceil(config.intermediate / _GATE_UP_COLUMNS)
    return max(1, min(experts, math.ceil(_LAG_ROUNDS * clusters / tasks)))
