# SPDX-License-Identifier: Apache-2.0
"""The layer in plain torch: the oracle of the kernels, and the backend for CPUs.

Per routed row r of token t with weight s and expert e, all products accumulated in fp32 (fp64 for fp64 inputs):

    z = x_t W1_e^T          stored rounded to x.dtype
    h = swiglu(z)           from the rounded z, rounded once
    y_t = sum_k s * (h W2_e^T)                  in slot order, rounded once

    dh' = dy_t W2_e         ds = <dh', h>
    dz = swiglu'(z, s * dh')                    rounded once
    dx_t = sum_k dz W1_e                        in slot order, rounded once
    dW2_e = sum_r dy_t^T (s * h)                s * h rounded once
    dW1_e = sum_r dz^T x_t

W1 holds gate rows, then up rows. Loops over experts, and reads the row counts on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prime_kernels.errors import ConfigMismatch
from prime_kernels.moe import exchange
from prime_kernels.moe.activation import swiglu, swiglu_backward
from prime_kernels.moe.backend import Backend, BackwardResult, ForwardResult, Needs
from prime_kernels.moe.recipe import Operands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from prime_kernels.moe.backend import RuntimeView, Weights
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.exchange import Routing

# Bits of `Routing.peer_flags`: what some rank needs, so that all of them take part.
_NEED_DX, _NEED_DSCORE, _NEED_ROWS = 1, 2, 4


class ReferenceBackend(Backend):
    """Every precision and save mode, on any torch device, one process or many."""

    name = "reference"

    def unsupported_reason(self, config: MegaMoEConfig, *, ep_size: int, device: torch.device) -> str | None:
        return None

    def dtypes(self, config: MegaMoEConfig) -> tuple[torch.dtype, ...]:
        if config.quantized:
            return (torch.bfloat16,)
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
        operands = Operands(config.precision, w_gate_up, w_down, prepared)
        routing = exchange.build_routing(
            topk_ids,
            num_experts=config.num_experts,
            group=runtime.group,
            ep_rank=runtime.ep_rank,
            ep_size=runtime.ep_size,
            channel=runtime.channel,
        )
        rows = exchange.dispatch(exchange.gather_slots(x, routing), routing)
        z = rows.new_zeros(routing.num_recv, 2 * config.intermediate)
        y_rows = rows.new_zeros(routing.num_recv, config.hidden, dtype=operands.acc_dtype)
        for expert, span in _spans(routing):
            z[span] = _gate_up(operands, rows[span], expert)
            h = swiglu(z[span].to(operands.acc_dtype), config.activation).to(x.dtype)
            y_rows[span] = operands.rows(h) @ operands.down(expert).t()
        y = exchange.sum_slots(exchange.combine_rows(y_rows, routing), routing, topk_weights).to(x.dtype)
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
        operands = Operands(config.precision, w_gate_up, w_down, prepared)
        saved = _SavedRows(preact, int(plan[-1]), config.intermediate)
        _check_plan(plan, topk_ids, config.num_experts)
        flags = needs.x * _NEED_DX | needs.topk_weights * _NEED_DSCORE
        routing = exchange.routing_from_plan(
            plan[:-1],
            topk_ids.shape,
            group=runtime.group,
            ep_size=runtime.ep_size,
            channel=runtime.channel,
            flags=flags | (0 if saved.has_all_x else _NEED_ROWS),
        )
        if routing.peer_flags & _NEED_ROWS:
            rows = exchange.dispatch(exchange.gather_slots(x, routing), routing)
        else:
            rows = saved.x
        dy_rows = exchange.dispatch(exchange.gather_slots(dy, routing), routing)
        scores = exchange.dispatch(exchange.slots_to_rows(topk_weights, routing), routing)

        dtype = wgrad_dtype if wgrad_dtype is not None else w_down.dtype
        dx_rows = dy_rows.new_zeros(dy_rows.shape, dtype=operands.acc_dtype)
        ds_rows = scores.new_zeros(scores.shape, dtype=operands.acc_dtype)
        dw_gate_up = _zeros(w_gate_up, dtype) if needs.w_gate_up else None
        dw_down = _zeros(w_down, dtype) if needs.w_down else None
        for expert, span in _spans(routing):
            x_e, dy_e, s = rows[span], operands.rows_backward(dy_rows[span]), scores[span].to(operands.acc_dtype)
            z = saved.z(span)
            z = (_gate_up(operands, x_e, expert).to(x.dtype) if z is None else z).to(operands.acc_dtype)
            h = swiglu(z, config.activation).to(x.dtype).to(operands.acc_dtype)
            if dw_down is not None:
                dw_down[expert] = operands.tokens(dy_e).t() @ operands.tokens((s * h).to(x.dtype))
            if not (needs.w_gate_up or routing.peer_flags & (_NEED_DX | _NEED_DSCORE)):
                continue
            dh = dy_e @ operands.down(expert, dgrad=True)  # without s
            ds_rows[span] = (dh * h).sum(1, keepdim=True)
            dz = swiglu_backward(z, s * dh, config.activation).to(x.dtype)
            if routing.peer_flags & _NEED_DX:
                dx_rows[span] = operands.rows_backward(dz) @ operands.gate_up(expert, dgrad=True)
            if dw_gate_up is not None:
                # The forward's rows: of an fp8 forward, the values its codes stand for.
                _store(dw_gate_up, expert, operands.tokens(dz).t() @ operands.tokens(operands.rows(x_e)))
        dx = dscore = None
        if routing.peer_flags & _NEED_DX:
            dx = exchange.sum_slots(exchange.combine_rows(dx_rows, routing), routing).to(x.dtype)
        if routing.peer_flags & _NEED_DSCORE:
            dscore = exchange.rows_to_slots(exchange.combine_rows(ds_rows, routing), routing)
        return BackwardResult(dx if needs.x else None, dscore if needs.topk_weights else None, dw_gate_up, dw_down)

    def _saved(self, runtime: RuntimeView, save: str, num_tokens: int, z: Tensor, rows: Tensor) -> Tensor | None:
        """The first rows of z (and of x), as many as have a place; zeros in the places that are left."""
        if save == "inputs":
            return None
        if save == "full":
            z = torch.cat([z, rows], dim=1)
        shape = self.preact_shape(runtime.config, num_tokens=num_tokens, ep_size=runtime.ep_size, save=save)
        if z.shape == shape:
            return z
        out = z.new_zeros(shape)
        kept = min(shape[0], z.shape[0])
        out[:kept] = z[:kept]
        return out


class _SavedRows:
    """What forward kept of the rows this rank computed. Rows beyond the pool's capacity were not kept."""

    def __init__(self, preact: Tensor | None, num_rows: int, intermediate: int) -> None:
        self._preact = preact
        self._width = 2 * intermediate
        self.has_all_x = preact is not None and preact.shape[1] > self._width and num_rows <= preact.shape[0]

    @property
    def x(self) -> Tensor:
        """[rows, H]; only with `has_all_x`."""
        assert self._preact is not None
        return self._preact[:, self._width :].contiguous()

    def z(self, span: slice) -> Tensor | None:
        """One expert's pre-activations; None when any of them is missing, since a GEMM over fewer rows may round
        differently."""
        if self._preact is None or span.stop > self._preact.shape[0]:
            return None
        return self._preact[span, : self._width]


def _gate_up(operands: Operands, rows: Tensor, expert: int) -> Tensor:
    return operands.rows(rows) @ operands.gate_up(expert).t()


def _spans(routing: Routing) -> Iterator[tuple[int, slice]]:
    """Local experts that have rows, with their rows."""
    end = 0
    for expert, count in enumerate(routing.recv_per_local_expert.tolist()):
        start, end = end, end + count
        if count:
            yield expert, slice(start, end)


def _zeros(weights: Weights, dtype: torch.dtype) -> Weights:
    if isinstance(weights, tuple):
        gate, up = weights
        return torch.zeros_like(gate, dtype=dtype), torch.zeros_like(up, dtype=dtype)
    return torch.zeros_like(weights, dtype=dtype)


def _store(target: Weights, expert: int, value: Tensor) -> None:
    if isinstance(target, tuple):
        target[0][expert], target[1][expert] = value.chunk(2)
    else:
        target[expert] = value


def _check_plan(plan: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    """A recomputed router may choose other experts than the forward that made the plan: then nothing fits."""
    num_slots = topk_ids.numel()
    rows, counts = plan[:num_slots].view(topk_ids.shape), plan[num_slots:-1]
    ends = counts.cumsum(0)
    owners = torch.where(rows < 0, -1, torch.searchsorted(ends, rows, right=True))
    changed = (owners != topk_ids).nonzero()
    if len(changed):
        token, slot = changed[0].tolist()
        raise ConfigMismatch(
            f"topk_ids changed between forward and backward: {len(changed)} of {num_slots} slots, the first at "
            f"token {token}, slot {slot} ({owners[token, slot].item()} then {topk_ids[token, slot].item()}).",
            facts={"argument": "topk_ids", "changed": len(changed), "token": token, "slot": slot},
            remedy="Save the router's choice outside the checkpointed region, so that recomputation reuses it.",
        )
