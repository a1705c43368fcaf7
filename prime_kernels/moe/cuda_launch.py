# SPDX-License-Identifier: Apache-2.0
"""One call's kernel launches: which kernel, on how many CTAs, with which arguments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from prime_kernels.loader import load_kernel
from prime_kernels.moe import cuda_maps as maps

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.loader import Kernel
    from prime_kernels.moe.backend import RuntimeView, Weights

_TILE = "t128x256x64"
_STAGE_K = 64


class PlanView(NamedTuple):
    """Addresses inside a plan."""

    counts: int
    starts: int
    slot_row: int


def plan_view(plan: Tensor, experts: int) -> PlanView:
    base = plan.data_ptr()
    return PlanView(base, base + 4 * experts, base + 4 * (2 * experts + 1))


def kernel_keys(*, plain: bool) -> tuple[str, ...]:
    """Keys of every kernel that calls with this activation class may need; build_tools/variants.toml lists them."""
    act = "swiglu" if plain else "clamped"
    return (
        "dispatch|b16",
        "replay|b16",
        "combine|bf16",
        f"gate_up|bf16|{act}|{_TILE}|s4|c2",
        f"down|bf16|scored|{_TILE}|s4|c2",
        f"down_grad|bf16|{act}|{_TILE}|s3|c2",
        f"gate_up_grad|bf16|{_TILE}|s4|c2",
        f"wgrad|bf16|{_TILE}|s4|c2",
        f"wgrad|fp32|{_TILE}|s4|c2",
    )


class Call:
    """The launches of one forward or backward on the current stream."""

    def __init__(self, runtime: RuntimeView, x: Tensor, fault: Tensor) -> None:
        self.config = config = runtime.config
        self.x, self.fault = x, fault.data_ptr()
        self.tokens = x.shape[0]
        self.index = x.device.index
        self.stream = torch.cuda.current_stream(x.device).cuda_stream
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count - config.reserved_sms(1)
        self.sms = max(2, min(config.num_sms or sms, sms))
        act = config.activation
        self.plain = act.clamp is None and act.alpha == 1.0 and act.up_offset == 0.0
        self.activation = {
            "alpha": act.alpha,
            "clamp": math.inf if act.clamp is None else act.clamp,
            "up_offset": act.up_offset,
            "reserved": 0,
        }

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def kernel(self, key: str) -> Kernel:
        return load_kernel(key, device=self.index)

    def _run(self, kernel: Kernel, grid: int, args: dict[str, Any], tensors: dict[str, maps.Map] | None = None) -> None:
        kernel.launch(grid=grid, stream=self.stream, args=args, maps=tensors)

    def dispatch(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        plan: Tensor,
        counts: tuple[Tensor, Tensor],
        x_rows: Tensor,
        score: Tensor,
    ) -> None:
        config = self.config
        at = plan_view(plan, config.num_experts)
        args = {
            "ids": topk_ids.data_ptr(),
            "weights": topk_weights.data_ptr(),
            "x": x.data_ptr(),
            "pool": x_rows.data_ptr(),
            "counts": at.counts,
            "starts": at.starts,
            "slot_row": at.slot_row,
            "tokens_per_expert": counts[0].data_ptr(),
            "recv_per_expert": counts[1].data_ptr(),
            "row_score": score.data_ptr(),
            "fault": self.fault,
            "tokens": self.tokens,
            "topk": config.topk,
            "num_experts": config.num_experts,
            "row_bytes": config.hidden * 2,
            "wide_ids": int(topk_ids.dtype == torch.int64),
            "reserved": 0,
        }
        self._run(self.kernel("dispatch|b16"), self.sms, args)

    def replay(
        self,
        plan: Tensor,
        dy: Tensor,
        x: Tensor | None,
        topk_weights: Tensor,
        dy_rows: Tensor,
        x_rows: Tensor | None,
        score: Tensor,
    ) -> None:
        config = self.config
        at = plan_view(plan, config.num_experts)
        args = {
            "dy": dy.data_ptr(),
            "x": 0 if x is None else x.data_ptr(),
            "dy_pool": dy_rows.data_ptr(),
            "x_pool": 0 if x_rows is None else x_rows.data_ptr(),
            "slot_row": at.slot_row,
            "counts": at.counts,
            "starts": at.starts,
            "weights": topk_weights.data_ptr(),
            "row_score": score.data_ptr(),
            "tokens": self.tokens,
            "topk": config.topk,
            "num_experts": config.num_experts,
            "row_bytes": config.hidden * 2,
        }
        self._run(self.kernel("replay|b16"), 2 * self.sms, args)

    def combine(
        self,
        plan: Tensor,
        pool: Tensor | None,
        y: Tensor | None,
        parts: Tensor | None = None,
        dscore: Tensor | None = None,
    ) -> None:
        config = self.config
        if dscore is None:
            parts = None
        args = {
            "pool": 0 if pool is None else pool.data_ptr(),
            "slot_row": plan_view(plan, config.num_experts).slot_row,
            "y": 0 if y is None else y.data_ptr(),
            "score_parts": 0 if parts is None else parts.data_ptr(),
            "dscore": 0 if dscore is None else dscore.data_ptr(),
            "tokens": self.tokens,
            "topk": config.topk,
            "hidden": config.hidden,
            "parts": 0 if parts is None else parts.shape[1],
        }
        self._run(self.kernel("combine|bf16"), 8 * self.sms, args)

    def _blocks(
        self,
        key: str,
        plan: Tensor,
        tensors: dict[str, maps.Map],
        *,
        k_steps: int,
        columns: int,
        tile_columns: int,
        **extra: int,
    ) -> None:
        """A GEMM with rows grouped by expert. Maps that a kernel does not read repeat one that it does."""
        at = plan_view(plan, self.config.num_experts)
        args: dict[str, Any] = {
            "counts": at.counts,
            "starts": at.starts,
            "row_score": 0,
            "score_parts": 0,
            "fault": self.fault,
            "num_experts": self.config.num_experts,
            "k_steps": k_steps,
            "split": k_steps,
            "columns": columns,
            "n_tiles": math.ceil(columns / tile_columns),
            "store_preact": 0,
            **self.activation,
            **extra,
        }
        filler = tensors["a"]
        every = {name: tensors.get(name, filler) for name in ("a", "b0", "b1", "out0", "out1", "in1")}
        self._run(self.kernel(key), self.sms // 2 * 2, args, every)

    def gate_up(self, plan: Tensor, x_rows: Tensor, weights: Weights, h: Tensor, preact: Tensor | None) -> None:
        config = self.config
        gate, up = maps.halves(*_split(weights))
        tensors = {
            "a": maps.rows(x_rows),
            "b0": maps.reduce_cols(gate),
            "b1": maps.reduce_cols(up),
            "out0": maps.rows(h),
        }
        if preact is not None:
            tensors["out1"] = maps.row_halves(preact.data_ptr(), h.shape[0], config.intermediate)
        self._blocks(
            f"gate_up|bf16|{'swiglu' if self.plain else 'clamped'}|{_TILE}|s4|c2",
            plan,
            tensors,
            k_steps=config.hidden // _STAGE_K,
            columns=config.intermediate,
            tile_columns=128,
            store_preact=int(preact is not None),
        )

    def down(self, plan: Tensor, h: Tensor, w_down: Tensor, score: Tensor, y_rows: Tensor) -> None:
        config = self.config
        tensors = {"a": maps.rows(h), "b0": maps.reduce_cols(maps.matrices(w_down)), "out0": maps.rows(y_rows)}
        self._blocks(
            f"down|bf16|scored|{_TILE}|s4|c2",
            plan,
            tensors,
            k_steps=config.intermediate // _STAGE_K,
            columns=config.hidden,
            tile_columns=256,
            row_score=score.data_ptr(),
        )

    def down_grad(
        self,
        plan: Tensor,
        dy_rows: Tensor,
        w_down: Tensor,
        preact: Tensor,
        score: Tensor,
        dz: Tensor,
        scaled: Tensor,
        parts: Tensor,
    ) -> None:
        config = self.config
        pool = dz.shape[0]
        tensors = {
            "a": maps.rows(dy_rows),
            "b0": maps.reduce_rows(maps.matrices(w_down)),
            "out0": maps.rows(scaled),
            "out1": maps.row_halves(dz.data_ptr(), pool, config.intermediate),
            "in1": maps.row_halves(preact.data_ptr(), pool, config.intermediate),
        }
        self._blocks(
            f"down_grad|bf16|{'swiglu' if self.plain else 'clamped'}|{_TILE}|s3|c2",
            plan,
            tensors,
            k_steps=config.hidden // _STAGE_K,
            columns=config.intermediate,
            tile_columns=256,
            row_score=score.data_ptr(),
            score_parts=parts.data_ptr(),
        )

    def gate_up_grad(self, plan: Tensor, dz: Tensor, weights: Weights, dx_rows: Tensor) -> None:
        config = self.config
        gate, up = maps.halves(*_split(weights))
        tensors = {
            "a": maps.rows(dz),
            "b0": maps.reduce_rows(gate),
            "b1": maps.reduce_rows(up),
            "out0": maps.rows(dx_rows),
        }
        half = config.intermediate // _STAGE_K
        self._blocks(
            f"gate_up_grad|bf16|{_TILE}|s4|c2",
            plan,
            tensors,
            k_steps=2 * half,
            columns=config.hidden,
            tile_columns=256,
            split=half,
        )

    def wgrad(
        self,
        plan: Tensor,
        operands: tuple[Tensor, Tensor | None, Tensor, Tensor],
        dw_gate_up: Weights | None,
        dw_down: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """`operands`: dz, x rows (None without dw_gate_up), dy rows, score * h."""
        config = self.config
        dz, x_rows, dy_rows, scaled = operands
        word = "f32" if dtype == torch.float32 else "bf16"
        tensors: dict[str, maps.Map] = {}
        if dw_gate_up is not None:
            assert x_rows is not None
            gate, up = maps.halves(*_split(dw_gate_up))
            tensors |= {"a0": maps.reduce_rows(maps.matrices(dz)), "b0": maps.reduce_rows(maps.matrices(x_rows))}
            tensors |= {"gate": maps.gradient(gate, word), "up": maps.gradient(up, word)}
        if dw_down is not None:
            tensors |= {"a1": maps.reduce_rows(maps.matrices(dy_rows)), "b1": maps.reduce_rows(maps.matrices(scaled))}
            tensors["down"] = maps.gradient(maps.matrices(dw_down), word)
        filler = next(iter(tensors.values()))
        every = {name: tensors.get(name, filler) for name in ("a0", "b0", "a1", "b1", "gate", "up", "down")}
        at = plan_view(plan, config.num_experts)
        args = {
            "counts": at.counts,
            "starts": at.starts,
            "fault": self.fault,
            "num_experts": config.num_experts,
            "hidden": config.hidden,
            "intermediate": config.intermediate,
            "do_gate_up": int(dw_gate_up is not None),
            "do_down": int(dw_down is not None),
            "reserved": 0,
        }
        key = f"wgrad|{'fp32' if word == 'f32' else 'bf16'}|{_TILE}|s4|c2"
        self._run(self.kernel(key), self.sms // 2 * 2, args, every)


def _split(weights: Weights) -> tuple[Tensor, Tensor | None]:
    return (weights, None) if isinstance(weights, torch.Tensor) else weights
