# SPDX-License-Identifier: Apache-2.0
"""Forward of the cuda backend among the ranks of a group: plan_peers, forward, combine.

Beside its tensors a rank has an arena (prime_kernels/peers): peers write counts, entries of its row list and results
there and read its tokens from there. Nothing that the backward needs stays in it: the plan is a tensor,
[counts E_l | starts E_l + 1 | place of every slot T*K | to a multiple of 16 bytes | entries of the pool rows], and a
slot's place is rank << 28 | pool row there, -1 without expert. `preact` is as with one rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe.cuda_buffers import Buffer
from prime_kernels.moe.cuda_calls import Calls, ForwardAddresses, ForwardShape, PreparedCall, gate_up_of
from prime_kernels.moe.cuda_launch import Recorder
from prime_kernels.moe.cuda_maps import halves, matrices, reduce_cols, row_halves, rows
from prime_kernels.moe.cuda_variants import (
    PLAN_PEERS,
    POOL_ALIGN,
    ROW_WORDS,
    PlanView,
    arena_layout,
    gemm_key,
    kept_rows,
    peer_kernel_keys,
    peer_plan_numel,
    pool_rows,
    preact_shape,
    split,
)

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import RuntimeView
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.cuda_calls import BackwardShape
    from prime_kernels.moe.cuda_launch import BufferOrPair
    from prime_kernels.peers.base import PeerMemory

_PLAN_CLUSTER = 8  # kCtas of kernels_src/moe/plan.cuh
_PAIR_ROWS, _GATE_UP_COLUMNS = 256, 128  # of a tile of two CTAs; kGateUpColumns of kernels_src/moe/forward.cuh
_PLACE_BITS = 28  # kRankShift of kernels_src/moe/plan_peers.cuh: slots and pool rows


def unsupported_reason(config: MegaMoEConfig, ep_size: int) -> str | None:
    """Why slots or rows of this config cannot be numbered."""
    tokens = config.max_tokens_per_rank
    most = max(pool_rows(config, tokens, ep_size), tokens * config.topk)
    if most < 1 << _PLACE_BITS:
        return None
    return (
        f"max_tokens_per_rank={tokens} with topk={config.topk} and ep_size={ep_size} gives {most} pool rows; "
        f"need less than {1 << _PLACE_BITS}."
    )


def open_peers(runtime: RuntimeView, fault: Tensor) -> PeerMemory | None:
    """The arena of this rank, with every kernel of a call loaded; None where there are no peers. Collective."""
    peers = runtime.peers
    if peers is None and runtime.group is not None:
        from prime_kernels.peers.symmetric import create_peers

        layout, timeout_s = arena_layout(runtime.config, runtime.ep_size), runtime.config.peer_timeout_s
        peers = create_peers(layout, runtime.group, runtime.device, timeout_s=timeout_s)
    if peers is not None:
        warm_up(runtime.config, runtime.device, fault)
    return peers


def warm_up(config: MegaMoEConfig, device: torch.device, fault: Tensor) -> None:
    """Launch every kernel of a call once: a call of one rank that has no tokens, in an arena of its own.

    The driver may put off loading a kernel's code to its first launch, and then waits for kernels that are running,
    which among peers may be waiting for this very launch.
    """
    from prime_kernels.loader import load_kernel
    from prime_kernels.peers.loopback import create_peers

    for key in peer_kernel_keys(config):
        load_kernel(key, device=device.index)
    alone = config.replace(max_tokens_per_rank=1)
    layout = arena_layout(alone, 1)
    (peers,) = create_peers(layout, ranks=1, device=device, timeout_s=config.peer_timeout_s)
    call = PeerCalls(alone, device.index, fault.data_ptr(), peers).of(ForwardShape(0, "inputs", False, False))
    work = torch.empty(
        call.work_bytes + 4 * (call.plan_numel + 2 * config.num_experts), dtype=torch.uint8, device=device
    )
    plan = work.data_ptr() + call.work_bytes
    counts = plan + 4 * call.plan_numel
    # Without tokens nothing reads or writes tokens, weights and results.
    addresses = dict.fromkeys(ForwardAddresses._fields, work.data_ptr())
    addresses |= {"plan": plan, "sent": counts, "received": counts + 4 * config.num_experts}
    call.launch(device, ForwardAddresses(**addresses))
    torch.cuda.synchronize(device)


class PeerRecorder(Recorder):
    """Writes down the launches of one call among peers."""

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
        self, x: Buffer, topk_ids: Buffer, topk_weights: Buffer, counts: tuple[Buffer, Buffer], counters: Buffer
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
            "row_score": 0,
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
        counters: tuple[Buffer, Buffer, Buffer],
    ) -> None:
        """Pull rows of x, multiply with gate and up, then with down, push to the owners. `counters`: see gemm_args."""
        config, grid = self.config, self._sms // 2 * 2
        gate, up = halves(*split(weights))
        args = {
            "counts": self._plan.counts,
            "starts": self._plan.starts,
            "list": self._plan.row_src,
            "peers": self.peers.address,
            "pool": x_rows.data_ptr(),
            "arrivals": counters[0].data_ptr(),
            "h_done": counters[1].data_ptr(),
            "finished": counters[2].data_ptr(),
            "fault": self._fault,
            "num_experts": self.experts,
            "hidden": config.hidden,
            "intermediate": config.intermediate,
            "lag": lag(config, self.ep_size, grid // 2),
            "keep_z": int(preact is not None),
            "only_moves": 0,
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
        }
        self._run(gemm_key("forward", config), grid, args, tensors)


def lag(config: MegaMoEConfig, ep_size: int, clusters: int) -> int:
    """Experts that the second GEMM stays behind the first: two rounds of all clusters over a mean expert's tiles."""
    experts = config.num_experts // ep_size
    rows_of_mean = config.max_tokens_per_rank * config.topk / experts
    tasks = math.ceil(rows_of_mean / _PAIR_ROWS) * math.ceil(config.intermediate / _GATE_UP_COLUMNS)
    return max(1, min(experts, math.ceil(2 * clusters / tasks)))


class PeerCalls(Calls):
    """Prepared calls of a runtime with peers."""

    def __init__(self, config: MegaMoEConfig, index: int, fault: int, peers: PeerMemory) -> None:
        super().__init__(config, index, fault)
        self._peers = peers

    def _make(self, shape: ForwardShape | BackwardShape) -> PreparedCall:
        recorder = PeerRecorder(self._config, self._index, self._fault, shape.tokens, self._peers)
        if isinstance(shape, ForwardShape):
            record_forward(recorder, shape)
            return PreparedCall(recorder, ForwardAddresses._fields, shape.save)
        raise UnsupportedConfig(
            f"the backward among {self._peers.size} ranks has no fused kernel yet; need ep_size=1 to train.",
            facts={"ep_size": self._peers.size},
            remedy='Use backend="grouped" to train with this group.',
        )


def record_forward(call: PeerRecorder, shape: ForwardShape) -> None:
    """plan_peers (copies x to the arena), forward, combine."""
    config, tokens, take = call.config, shape.tokens, call.work.take
    hidden, inter, topk = config.hidden, config.intermediate, config.topk
    pool = pool_rows(config, tokens, call.ep_size)
    x, y = Buffer.of("x", tokens, hidden), Buffer.of("y", tokens, hidden)
    ids = Buffer.of("topk_ids", tokens, topk, itemsize=8 if shape.wide_ids else 4)
    weights = Buffer.of("topk_weights", tokens, topk, itemsize=4)
    sent = Buffer.of("sent", config.num_experts, itemsize=4)
    received = Buffer.of("received", call.experts, itemsize=4)
    preact = None
    if shape.save != "inputs":
        preact = Buffer.of("preact", *preact_shape(config, tokens, shape.save, call.ep_size))
    kept = kept_rows(preact, pool, config)
    blocks = pool // POOL_ALIGN
    counters = take(2 * blocks + 1, itemsize=4)
    arrivals, h_done, finished = (Buffer(counters.at + 4 * at, (1,), 4) for at in (0, blocks, 2 * blocks))
    x_rows = take(pool, hidden) if kept is None else kept
    h = take(pool, inter)
    call.plan_peers(x, ids, weights, (sent, received), counters)
    w_down = Buffer.of("w_down", call.experts, hidden, inter)
    call.forward(x_rows, gate_up_of(call, shape.pair, ""), h, preact, w_down, (arrivals, h_done, finished))
    call.combine(call.region(call.peers.layout.results, tokens * topk, hidden), y, by_slot=True)
