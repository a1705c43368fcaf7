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
from prime_kernels.moe.activation import swiglu
from prime_kernels.moe.backend import Backend, BackwardResult, ForwardResult, Needs
from prime_kernels.moe.matmul_precision import full_precision
from prime_kernels.moe.recipe import Operands
from prime_kernels.moe.reference_experts import (
    NEED_DSCORE,
    NEED_DX,
    NEED_ROWS,
    ExpertBackward,
    SavedRows,
    gate_up_rows,
    spans,
)

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import RuntimeView, Weights
    from prime_kernels.moe.config import MegaMoEConfig


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

    @full_precision()
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
        for expert, span in spans(routing):
            z[span] = gate_up_rows(operands, rows[span], expert)
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

    @full_precision()
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
        saved = SavedRows(preact, int(plan[-1]), config.intermediate)
        check_plan(plan, topk_ids, config.num_experts)
        flags = needs.x * NEED_DX | needs.topk_weights * NEED_DSCORE
        routing = exchange.routing_from_plan(
            plan[:-1],
            topk_ids.shape,
            group=runtime.group,
            ep_size=runtime.ep_size,
            channel=runtime.channel,
            flags=flags | (0 if saved.has_all_x else NEED_ROWS),
        )
        if routing.peer_flags & NEED_ROWS:
            rows = exchange.dispatch(exchange.gather_slots(x, routing), routing)
        else:
            rows = saved.x
        dy_rows = exchange.dispatch(exchange.gather_slots(dy, routing), routing)
        scores = exchange.dispatch(exchange.slots_to_rows(topk_weights, routing), routing)
        work = ExpertBackward(config, operands, saved, routing, needs, wgrad_dtype or w_down.dtype)
        work.run(rows, dy_rows, scores, w_gate_up, w_down)
        dx = dscore = None
        if work.wants_dx:
            dx = exchange.sum_slots(exchange.combine_rows(work.dx_rows, routing), routing).to(x.dtype)
        if work.wants_dscore:
            dscore = exchange.rows_to_slots(exchange.combine_rows(work.ds_rows, routing), routing)
        return BackwardResult(
            dx if needs.x else None, dscore if needs.topk_weights else None, work.dw_gate_up, work.dw_down
        )

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


def check_plan(plan: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    """A recomputed router may choose other experts than the forward that made the plan: then nothing fits."""
    num_slots = topk_ids.numel()
    rows, counts = plan[:num_slots].view(topk_ids.shape), plan[num_slots : num_slots + num_experts]
    ends = counts.cumsum(0)
    owners = torch.where(rows < 0, -1, torch.searchsorted(ends, rows, right=True))
    routed = torch.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids, -1)
    changed = (owners != routed).nonzero()
    if len(changed):
        token, slot = changed[0].tolist()
        raise ConfigMismatch(
            f"topk_ids changed between forward and backward: {len(changed)} of {num_slots} slots, the first at "
            f"token {token}, slot {slot} ({owners[token, slot].item()} then {topk_ids[token, slot].item()}).",
            facts={"argument": "topk_ids", "changed": len(changed), "token": token, "slot": slot},
            remedy="Save the router's choice outside the checkpointed region, so that recomputation reuses it.",
        )
