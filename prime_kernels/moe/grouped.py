# SPDX-License-Identifier: Apache-2.0
"""The unfused layer: what trainers run without a fused kernel, across any network that torch.distributed reaches.

Forward: sort slots by expert, all-to-all of rows with host-known split sizes, local order, grouped gate/up GEMM,
SwiGLU, grouped down GEMM, all-to-all back, weighted sum per token. Backward repeats the dispatch of x, dispatches dy,
and runs two grouped GEMMs for dgrad and two for wgrad. Rounding points are those of reference.py, except that expert
outputs, dgrad rows and dh are stored in x.dtype between two kernels.

Engines: "torch" (`torch._grouped_mm`) and "deep_gemm" (package sgl-deep-gemm), see grouped_gemm.py. On the CPU, and for
dtypes other than bf16, GEMMs are loops over experts: the semantics, not the speed.

Every sum has a fixed order: same inputs, same bits. On CUDA rows travel in the group's own collectives, whose waits are
bounded by that group's time-out; peer_timeout_s bounds the header that precedes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from prime_kernels.moe import exchange
from prime_kernels.moe import grouped_pointwise as pointwise
from prime_kernels.moe.backend import Backend, BackwardResult, ForwardResult, Needs
from prime_kernels.moe.grouped_deep_gemm import load_deep_gemm
from prime_kernels.moe.grouped_gemm import Groups, TorchEngine
from prime_kernels.moe.reference import check_plan

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import RuntimeView, Weights
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.exchange import Routing
    from prime_kernels.moe.grouped_gemm import GemmEngine

# Bits of `Routing.peer_flags`: what some rank needs, so that all of them take part.
_NEED_DX, _NEED_DSCORE, _NEED_ROWS = 1, 2, 4


class GroupedBackend(Backend):
    """bf16 recipes on CUDA and CPU; fp16, fp32 and fp64 too, by loops."""

    name = "grouped"

    def unsupported_reason(self, config: MegaMoEConfig, *, ep_size: int, device: torch.device) -> str | None:
        if config.quantized:
            return f'precision={config.precision!r} with backend="grouped"; it computes in bf16. Use precision="bf16".'
        if device.type == "cuda" and not hasattr(torch, "_grouped_mm"):
            return f'backend="grouped" needs torch._grouped_mm; torch {torch.__version__} has none. Update torch.'
        return None

    def unavailable_reason(self, device: torch.device, config: MegaMoEConfig) -> str | None:
        if config.engine != "deep_gemm":
            return None
        engine = load_deep_gemm(device)
        if not isinstance(engine, str):
            return None
        return f'{engine}. Use engine="torch", or install a sgl-deep-gemm that was built for this torch.'

    def dtypes(self, config: MegaMoEConfig) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32, torch.float64)

    def plan_numel(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int) -> int:
        # One more than the routing: the rows this rank received, which tells whether all of them were saved.
        return exchange.plan_numel(num_tokens, config.topk, config.num_experts) + 1

    def preact_shape(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int, save: str) -> tuple[int, int]:
        rows, width = super().preact_shape(config, num_tokens=num_tokens, ep_size=ep_size, save=save)
        return rows, width + (config.hidden if save == "full" else 0)

    def forward(
        self,
        runtime: RuntimeView,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_gate_up: Weights,
        w_down: Tensor,
        *,
        save: str,
        prepared: tuple[Tensor, ...] | None = None,
    ) -> ForwardResult:
        config = runtime.config
        engine = self._engine(runtime)
        routing = exchange.build_routing(
            topk_ids,
            num_experts=config.num_experts,
            group=runtime.group,
            ep_rank=runtime.ep_rank,
            ep_size=runtime.ep_size,
            channel=runtime.channel,
        )
        groups = Groups(routing.recv_per_local_expert, routing.num_recv, routing.recv_counts)
        rows = _dispatch(x, routing)
        z = _gate_up(engine, rows, w_gate_up, groups)
        y_rows = engine.nt(pointwise.activate(z, config.activation), w_down, groups)
        y_rows = exchange.combine_rows(y_rows, routing)
        y = pointwise.sum_slots(y_rows, routing.slot_rows, topk_weights, x.dtype)
        received = routing.recv_per_local_expert.sum(dtype=torch.int32).reshape(1)
        return ForwardResult(
            y,
            torch.cat([exchange.pack_plan(routing), received]),
            routing.tokens_per_expert.clone(),
            routing.recv_per_local_expert.clone(),
            self._saved(runtime, save, x.shape[0], z, rows),
        )

    def backward(
        self,
        runtime: RuntimeView,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_gate_up: Weights,
        w_down: Tensor,
        plan: Tensor,
        preact: Tensor | None,
        *,
        needs: Needs,
        wgrad_dtype: torch.dtype | None,
        prepared: tuple[Tensor, ...] | None = None,
    ) -> BackwardResult:
        config = runtime.config
        engine = self._engine(runtime)
        if not x.is_cuda or config.validate:
            check_plan(plan, topk_ids, config.num_experts)
        saved = _saved_rows(preact, plan, config, runtime.ep_size)
        flags = needs.x * _NEED_DX | needs.topk_weights * _NEED_DSCORE
        flags |= (saved.z is None or (needs.w_gate_up and saved.x is None)) * _NEED_ROWS
        routing = exchange.routing_from_plan(
            plan[:-1],
            topk_ids.shape,
            group=runtime.group,
            ep_size=runtime.ep_size,
            channel=runtime.channel,
            flags=flags,
        )
        groups = Groups(routing.recv_per_local_expert, routing.num_recv, routing.recv_counts)
        groups.prefetch()
        flags = routing.peer_flags
        rows = _dispatch(x, routing) if flags & _NEED_ROWS else saved.x
        dy_rows = _dispatch(dy, routing)
        scores = exchange.dispatch(exchange.slots_to_rows(topk_weights, routing), routing)
        z = saved.z[: routing.num_recv] if saved.z is not None else None
        if z is None:
            assert rows is not None  # _NEED_ROWS
            z = _gate_up(engine, rows, w_gate_up, groups)
        dh = engine.nn(dy_rows, w_down, groups)  # without the routing weight
        dz, weighted_h, dscores = pointwise.activate_backward(z, dh, scores, config.activation)

        dtype = wgrad_dtype if wgrad_dtype is not None else w_down.dtype
        dw_down = engine.tn(dy_rows, weighted_h, groups, dtype) if needs.w_down else None
        dw_gate_up = None
        if needs.w_gate_up:
            assert rows is not None  # _NEED_ROWS, or saved
            dw_gate_up = _gate_up_wgrad(engine, dz, rows[: routing.num_recv], w_gate_up, groups, dtype)
        dx = dtopk_weights = None
        if flags & _NEED_DX:
            dx_rows = exchange.combine_rows(_gate_up_dgrad(engine, dz, w_gate_up, groups), routing)
            dx = pointwise.sum_slots(dx_rows, routing.slot_rows, None, x.dtype)
        if flags & _NEED_DSCORE:
            dtopk_weights = exchange.rows_to_slots(exchange.combine_rows(dscores, routing), routing)
        return BackwardResult(
            dx if needs.x else None, dtopk_weights if needs.topk_weights else None, dw_gate_up, dw_down
        )

    def warmup(self, runtime: RuntimeView, num_tokens: tuple[int, ...]) -> None:
        """Compile the pointwise functions for the config's widths; row counts do not matter."""
        config, rows = runtime.config, 4 * runtime.config.topk
        x = torch.zeros(4, config.hidden, dtype=torch.bfloat16, device=runtime.device)
        slots = torch.arange(rows, device=runtime.device)
        weights = torch.zeros(4, config.topk, device=runtime.device)
        z = torch.zeros(rows, 2 * config.intermediate, dtype=x.dtype, device=runtime.device)
        h = pointwise.activate(z, config.activation)
        pointwise.activate_backward(z, h, weights.view(-1, 1), config.activation)
        for factors in (weights, None):
            pointwise.sum_slots(pointwise.gather(x, slots, config.topk), slots.view(4, -1), factors, x.dtype)

    def _engine(self, runtime: RuntimeView) -> GemmEngine:
        if runtime.config.engine == "torch":
            return TorchEngine()
        engine = load_deep_gemm(runtime.device)
        assert not isinstance(engine, str)  # `unavailable_reason` was asked when the runtime was created
        return engine

    def _saved(self, runtime: RuntimeView, save: str, num_tokens: int, z: Tensor, rows: Tensor) -> Tensor | None:
        """z, and x rows for "full", in the static shape of `preact_shape`; places without a row hold anything."""
        if save == "inputs":
            return None
        shape = self.preact_shape(runtime.config, num_tokens=num_tokens, ep_size=runtime.ep_size, save=save)
        if z.shape == shape:
            return z
        out = z.new_empty(shape)
        kept = min(shape[0], z.shape[0])
        out[:kept, : z.shape[1]] = z[:kept]
        if save == "full":
            out[:kept, z.shape[1] :] = rows[:kept]
        return out


class _Saved(NamedTuple):
    """Rows that forward kept, each None unless all of them are there."""

    z: Tensor | None
    x: Tensor | None


def _saved_rows(preact: Tensor | None, plan: Tensor, config: MegaMoEConfig, ep_size: int) -> _Saved:
    # At ep_size 1 every row has its place by construction; asking the plan would wait for the device.
    if preact is None or (ep_size > 1 and int(plan[-1]) > preact.shape[0]):
        # All or nothing: a GEMM over the missing rows alone may round differently from forward's.
        return _Saved(None, None)
    width = 2 * config.intermediate
    full = preact.shape[1] > width
    return _Saved(preact[:, :width], preact[:, width:] if full else None)


def _dispatch(x: Tensor, routing: Routing) -> Tensor:
    return exchange.dispatch(pointwise.gather(x, routing.order, routing.topk), routing)


def _gate_up(engine: GemmEngine, rows: Tensor, weights: Weights, groups: Groups) -> Tensor:
    if isinstance(weights, tuple):
        return torch.cat([engine.nt(rows, half, groups) for half in weights], dim=1)
    return engine.nt(rows, weights, groups)


def _gate_up_dgrad(engine: GemmEngine, dz: Tensor, weights: Weights, groups: Groups) -> Tensor:
    if isinstance(weights, tuple):
        # One GEMM over both halves would need them adjacent; the sum is rounded once.
        gate, up = (engine.nn(dz_half, half, groups) for dz_half, half in zip(_halves(dz), weights, strict=True))
        return torch.add(gate, up)
    return engine.nn(dz, weights, groups)


def _gate_up_wgrad(
    engine: GemmEngine, dz: Tensor, rows: Tensor, weights: Weights, groups: Groups, dtype: torch.dtype
) -> Weights:
    if isinstance(weights, tuple):
        gate, up = (engine.tn(half, rows, groups, dtype) for half in _halves(dz))
        return gate, up
    return engine.tn(dz, rows, groups, dtype)


def _halves(dz: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = dz.chunk(2, dim=1)
    return gate, up
