# SPDX-License-Identifier: Apache-2.0
"""The launches of a call: which kernel, on how many CTAs, with which arguments. Makes none."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from prime_kernels.loader import load_kernel
from prime_kernels.loader.prepared import Step
from prime_kernels.moe import cuda_maps as maps
from prime_kernels.moe.cuda_buffers import Workspace
from prime_kernels.moe.cuda_variants import (
    COMBINE,
    GATHER,
    PLAN,
    PREPARE,
    STAGE_K,
    TILE_N,
    PlanView,
    Pull,
    address,
    gemm_key,
    plan_numel,
    split,
)

if TYPE_CHECKING:
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.cuda_buffers import Buffer, Operand

    BufferOrPair = Buffer | tuple[Buffer, Buffer]

_PLAN_CTAS = 8  # one cluster
# Fields of GroupedArgs that only launches among peers use.
_NO_PEERS = dict.fromkeys(("list", "peers", "copied", "out_rows", "out_done", "finished", "pull_grads", "parts"), 0)
_COUNTER_ROWS = 64  # kArrivalRows of kernels_src/roles/pull.cuh
# Where gradients lie that are added to; the layer overwrites its gradients.
_SUMS = ("gate_sum", "up_sum", "down_sum", "gate_up_matrix", "down_matrix", "gate_up_pitch", "down_pitch")
_NO_SUMS = dict.fromkeys(_SUMS, 0)


@lru_cache(maxsize=64)
def sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class Recorder:
    """Writes down the launches of one forward or backward, for `Prepared`.

    Attributes:
        config: Of the runtime.
        tokens: T of the call.
        ep_size: Ranks of the group.
        experts: Of this rank.
        plan_numel: Length of the plan.
        work: Temporaries of the call.
        steps: The launches so far.
    """

    def __init__(
        self, config: MegaMoEConfig, index: int, fault: int, tokens: int, plan: Operand, ep_size: int = 1
    ) -> None:
        self.config, self.tokens, self.ep_size = config, tokens, ep_size
        self.experts = config.num_experts // ep_size
        self.plan_numel = plan_numel(config, tokens, ep_size)
        self.work = Workspace("work")
        self.steps: list[Step] = []
        self._index, self._fault = index, fault
        available = sm_count(index) - config.reserved_sms(ep_size)
        self._sms = max(2, min(config.num_sms or available, available))
        act = config.activation
        clamp = math.inf if act.clamp is None else act.clamp
        self._activation = {"alpha": act.alpha, "clamp": clamp, "up_offset": act.up_offset}
        self._plan = PlanView.of(plan, self.experts, tokens * config.topk)

    def counters(self, pool: int, sets: int) -> Buffer:
        """Counters of 64 pool rows each; the plan kernel or `prepare` zeroes them."""
        return self.work.take(sets, pool // _COUNTER_ROWS, itemsize=4)

    def _run(self, key: str, grid: int, args: dict[str, Any], tensors: dict[str, maps.Map] | None = None) -> None:
        self.steps.append(Step(load_kernel(key, device=self._index), grid, args, tensors))

    def make_plan(
        self, topk_ids: Buffer, topk_weights: Buffer, counts: tuple[Buffer, Buffer], score: Buffer, counters: Buffer
    ) -> None:
        at = self._plan
        args = {
            "ids": topk_ids.data_ptr(),
            "weights": topk_weights.data_ptr(),
            "counts": at.counts,
            "starts": at.starts,
            "slot_row": at.slot_row,
            "row_src": at.row_src,
            "tokens_per_expert": counts[0].data_ptr(),
            "recv_per_expert": counts[1].data_ptr(),
            "row_score": score.data_ptr(),
            "counters": counters.data_ptr(),
            "fault": self._fault,
            "tokens": self.tokens,
            "topk": self.config.topk,
            "num_experts": self.config.num_experts,
            "num_counters": counters.numel(),
            "pool_rows": score.shape[0],
            "wide_ids": int(topk_ids.itemsize == 8),
        }
        self._run(PLAN, _PLAN_CTAS, args)

    def prepare(self, topk_weights: Buffer, score: Buffer, counters: Buffer) -> None:
        args = {
            "slot_row": self._plan.slot_row,
            "counts": self._plan.counts,
            "starts": self._plan.starts,
            "weights": topk_weights.data_ptr(),
            "row_score": score.data_ptr(),
            "counters": counters.data_ptr(),
            "slots": self.tokens * self.config.topk,
            "num_experts": self.config.num_experts,
            "num_counters": counters.numel(),
            "reserved": 0,
        }
        self._run(PREPARE, self._sms, args)

    def gather(self, src: Buffer, dst: Buffer) -> None:
        args = {
            "x": src.data_ptr(),
            "row_src": self._plan.row_src,
            "pool": dst.data_ptr(),
            "rows": dst.shape[0],
            "row_bytes": dst.shape[1] * 2,
        }
        self._run(GATHER, 8 * self._sms, args)

    def combine(
        self,
        pool: Buffer | None,
        y: Buffer | None,
        parts: Buffer | None = None,
        dscore: Buffer | None = None,
        *,
        results: Buffer | None = None,
        rank: int = 0,
        parts_by_slot: bool = False,
    ) -> None:
        """y from the pool and `results` [T*K, H] of `rank`'s peers; scores' gradients from parts per row or slot."""
        wants = dscore is not None and parts is not None
        args = {
            "pool": address(pool),
            "results": address(results),
            "slot_row": self._plan.slot_row,
            "y": address(y),
            "score_parts": address(parts if wants else None),
            "dscore": address(dscore),
            "tokens": self.tokens,
            "topk": self.config.topk,
            "hidden": self.config.hidden,
            "parts": parts.shape[1] if wants and parts is not None else 0,
            "rank": rank,
            "parts_by_slot": int(parts_by_slot),
        }
        self._run(COMBINE, 8 * self._sms, args)

    def _blocks(
        self,
        op: str,
        tensors: dict[str, maps.Map],
        pull: Pull | None = None,
        *,
        k_steps: int,
        columns: int,
        tile_columns: int,
        **extra: int,
    ) -> None:
        """A GEMM with rows grouped by expert. Maps that a kernel does not read repeat one that it does."""
        args: dict[str, Any] = {
            "counts": self._plan.counts,
            "starts": self._plan.starts,
            "row_score": 0,
            "score_parts": 0,
            "pull_src": address(pull and pull.src),
            "pull_dst": address(pull and pull.dst),
            "row_src": self._plan.row_src,
            "arrivals": address(pull and pull.arrivals),
            "fault": self._fault,
            **_NO_PEERS,
            "num_experts": self.experts,
            "k_steps": k_steps,
            "split": k_steps,
            "columns": columns,
            "n_tiles": math.ceil(columns / tile_columns),
            "keep_z": 0,
            "pull_bytes": self.config.hidden * 2,
            **self._activation,
            **extra,
        }
        filler = tensors["a"]
        every = {name: tensors.get(name, filler) for name in ("a", "b0", "b1", "out0", "out1", "in1")}
        self._run(gemm_key(op, self.config), self._sms // 2 * 2, args, every)

    def gate_up(
        self, pull: Pull, weights: BufferOrPair, h: Buffer, preact: Buffer | None, op: str = "gate_up", **extra: int
    ) -> None:
        """h, and z where it is kept, from rows that this launch pulls."""
        config = self.config
        gate, up = maps.halves(*split(weights))
        tensors = {
            "a": maps.rows(pull.dst),
            "b0": maps.reduce_cols(gate),
            "b1": maps.reduce_cols(up),
            "out0": maps.rows(h),
        }
        if preact is not None:
            tensors["out1"] = maps.row_halves(preact.data_ptr(), h.shape[0], config.intermediate)
        sizes = {"k_steps": config.hidden // STAGE_K, "columns": config.intermediate, "tile_columns": TILE_N // 2}
        self._blocks(op, tensors, pull, **sizes, keep_z=int(preact is not None), **extra)

    def down(self, h: Buffer, w_down: Buffer, score: Buffer, y_rows: Buffer, op: str = "down", **extra: int) -> None:
        config = self.config
        tensors = {"a": maps.rows(h), "b0": maps.reduce_cols(maps.matrices(w_down)), "out0": maps.rows(y_rows)}
        sizes = {"k_steps": config.intermediate // STAGE_K, "columns": config.hidden, "tile_columns": TILE_N}
        self._blocks(op, tensors, None, **sizes, row_score=score.data_ptr(), **extra)

    def down_grad(
        self,
        pull: Pull,
        w_down: Buffer,
        preact: Buffer,
        score: Buffer,
        results: tuple[Buffer, Buffer, Buffer],
        op: str = "down_grad",
        **extra: int,
    ) -> None:
        """`results`: dz, score * h, parts of the scores' gradients."""
        dz, scaled, parts = results
        config = self.config
        pool = dz.shape[0]
        tensors = {
            "a": maps.rows(pull.dst),
            "b0": maps.reduce_rows(maps.matrices(w_down)),
            "out0": maps.rows(scaled),
            "out1": maps.row_halves(dz.data_ptr(), pool, config.intermediate),
            "in1": maps.row_halves(preact.data_ptr(), pool, config.intermediate),
        }
        sizes = {"k_steps": config.hidden // STAGE_K, "columns": config.intermediate, "tile_columns": TILE_N}
        addresses = {"row_score": score.data_ptr(), "score_parts": parts.data_ptr()}
        self._blocks(op, tensors, pull, **sizes, **addresses, **extra)

    def gate_up_grad(
        self,
        pull: Pull | None,
        dz: Buffer,
        weights: BufferOrPair,
        dx_rows: Buffer,
        op: str = "gate_up_grad",
        **extra: int,
    ) -> None:
        config = self.config
        gate, up = maps.halves(*split(weights))
        tensors = {
            "a": maps.rows(dz),
            "b0": maps.reduce_rows(gate),
            "b1": maps.reduce_rows(up),
            "out0": maps.rows(dx_rows),
        }
        half = config.intermediate // STAGE_K
        sizes = {"k_steps": 2 * half, "columns": config.hidden, "tile_columns": TILE_N}
        self._blocks(op, tensors, pull, **sizes, split=half, **extra)

    def wgrad(
        self,
        operands: tuple[Buffer, Buffer | None, Buffer, Buffer],
        dw_gate_up: BufferOrPair | None,
        dw_down: Buffer | None,
        *,
        fp32: bool,
    ) -> None:
        """`operands`: dz, x rows (None without dw_gate_up), dy rows, score * h."""
        config = self.config
        dz, x_rows, dy_rows, scaled = operands
        word = "f32" if fp32 else "bf16"
        tensors: dict[str, maps.Map] = {}
        if dw_gate_up is not None:
            assert x_rows is not None
            gate, up = maps.halves(*split(dw_gate_up))
            tensors |= {"a0": maps.reduce_rows(maps.matrices(dz)), "b0": maps.reduce_rows(maps.matrices(x_rows))}
            tensors |= {"gate": maps.gradient(gate, word), "up": maps.gradient(up, word)}
        if dw_down is not None:
            tensors |= {"a1": maps.reduce_rows(maps.matrices(dy_rows)), "b1": maps.reduce_rows(maps.matrices(scaled))}
            tensors["down"] = maps.gradient(maps.matrices(dw_down), word)
        filler = next(iter(tensors.values()))
        every = {name: tensors.get(name, filler) for name in ("a0", "b0", "a1", "b1", "gate", "up", "down")}
        args = {
            "counts": self._plan.counts,
            "starts": self._plan.starts,
            "fault": self._fault,
            "num_experts": self.experts,
            "hidden": config.hidden,
            "intermediate": config.intermediate,
            "do_gate_up": int(dw_gate_up is not None),
            "do_down": int(dw_down is not None),
            "reserved": 0,
        } | _NO_SUMS
        self._run(gemm_key(f"wgrad_{word}", config), self._sms // 2 * 2, args, every)
