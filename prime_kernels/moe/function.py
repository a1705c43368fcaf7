# SPDX-License-Identifier: Apache-2.0
"""The eager path: one autograd.Function around the ops, which also takes DTensor leaves and main_grad.

A leaf gets its gradient in `wgrad_dtype`, as a DTensor if it is one; going through `to_local()` outside would round it
to the parameter's dtype. In-place accumulation into `param.main_grad` has to happen in backward: a mutating op cannot
have an autograd formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from prime_kernels.errors import StaleWeightsError, UnsupportedConfig
from prime_kernels.moe import ops

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.runtime import MegaMoERuntime


class Call(NamedTuple):
    """What one call asks for beside its tensors."""

    runtime: MegaMoERuntime
    save: str
    prepared: tuple[Tensor, ...]
    main_grad: bool


class MegaMoEFunction(torch.autograd.Function):
    """y, tokens_per_expert, recv_per_local_expert of one checked call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_up: Tensor | None,
        w_down: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        result = run_forward(x, topk_ids, topk_weights, w_gate_up, w_up, w_down, call)
        preact = result[4] if len(result) == 5 else None
        ctx.save_for_backward(x, topk_ids, topk_weights, w_gate_up, w_up, w_down, result[1], preact)
        # Prepared weights may be rewritten with the same values between microbatches: their generation is compared in
        # backward, where autograd's version counter would refuse.
        ctx.call = call
        ctx.generation = int(call.prepared[-1]) if call.prepared else None
        if call.main_grad:
            # The parameters themselves: saved-tensor hooks hand back other objects, without main_grad.
            ctx.parameters = (w_gate_up, w_up, w_down)
        ctx.mark_non_differentiable(result[2], result[3])
        ctx.set_materialize_grads(False)
        return result[0], result[2], result[3]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 7
        call: Call = ctx.call
        x, topk_ids, topk_weights, w_gate_up, w_up, w_down, plan, preact = ctx.saved_tensors
        _require_unchanged(call, ctx.generation)
        wanted = ctx.needs_input_grad
        weights = (w_gate_up, w_up, w_down)
        dtype = call.runtime.config.wgrad_dtype
        if call.main_grad:
            # Of one dtype, as was checked; a frozen weight has none.
            asked = [parameter for parameter, use in zip(ctx.parameters, wanted[3:6], strict=True) if use]
            dtype = main_grad_of(asked[0]).dtype if asked else dtype
        dx, dscore, *gradients = ops.run_eager(
            ops.mega_moe_bwd,
            dy,
            x,
            topk_ids,
            topk_weights,
            *map(local_weight, weights),
            plan,
            preact,
            call.prepared,
            call.runtime.id,
            [wanted[0], wanted[2], wanted[3] or wanted[4], wanted[5]],
            dtype,
        )
        results: list[Tensor | None] = []
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if not wanted[3 + index]:
                results.append(None)
            elif call.main_grad:
                results.append(_accumulate(ctx.parameters[index], gradient))
            else:
                results.append(_like_weight(gradient, weight))
        return dx if wanted[0] else None, None, dscore if wanted[2] else None, *results, None


def run_forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    call: Call,
) -> tuple[Tensor, ...]:
    """The op of `call.save` on local weights, without recording a graph."""
    tensors = (x, topk_ids, topk_weights, local_weight(w_gate_up), local_weight(w_up), local_weight(w_down))
    # Skips the generated autograd layer of the op; dispatch modes, selective checkpointing among them, still see it.
    if call.save == "inputs":
        return ops.run_eager(ops.mega_moe_fwd, *tensors, call.prepared, call.runtime.id)
    return ops.run_eager(ops.mega_moe_fwd_preact, *tensors, call.prepared, call.runtime.id, call.save)


@overload
def local_weight(weight: Tensor) -> Tensor: ...
@overload
def local_weight(weight: Tensor | None) -> Tensor | None: ...
def local_weight(weight: Tensor | None) -> Tensor | None:
    """This rank's part, packed to three dimensions; no copy."""
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    if weight is not None and weight.dim() == 4:
        weight = weight.view(weight.shape[0], -1, weight.shape[3])
    return weight


def accept_grad_dtype(weights: tuple[Tensor | None, ...], dtype: torch.dtype) -> None:
    """Let leaves keep gradients of this dtype: autograd rounds them to the leaf's own dtype otherwise.

    Raises:
        UnsupportedConfig: this torch has no such switch, or the leaf already holds a gradient of another dtype.
    """
    for weight in weights:
        if weight is None or not (weight.requires_grad and weight.is_leaf) or weight.dtype == dtype:
            continue
        if getattr(weight, "grad_dtype", weight.dtype) in (None, dtype):
            continue
        held = None if weight.grad is None else weight.grad.dtype
        if held not in (None, dtype) or not hasattr(weight, "grad_dtype"):
            raise UnsupportedConfig(
                f"wgrad_dtype is {dtype}; a leaf of {weight.dtype} that holds a gradient of {held} cannot keep it.",
                facts={"argument": "wgrad_dtype", "got": str(dtype), "held": str(held)},
                remedy='Set grad to None first; with a torch that has no Tensor.grad_dtype use wgrad="main_grad".',
            )
        weight.grad_dtype = dtype


def main_grad_of(parameter: Tensor) -> Tensor:
    """The local tensor that the trainer accumulates this parameter's gradient in."""
    main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return main_grad.to_local() if isinstance(main_grad, DTensor) else main_grad


def _require_unchanged(call: Call, generation: int | None) -> None:
    now = None if generation is None else int(call.prepared[-1])
    if now != generation:
        raise StaleWeightsError(
            f"prepared weights were of generation {generation} in forward and are of {now} in backward.",
            facts={"generation": generation, "current": now},
            remedy="Refresh prepared weights only after the backward of every microbatch has run.",
        )


def _like_weight(gradient: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return gradient if gradient.shape == weight.shape else gradient.view(weight.shape)
    local_shape = weight.to_local().shape
    return DTensor.from_local(
        gradient.view(local_shape),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _accumulate(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    """Add to main_grad; empty experts add exact zeros. Returns what autograd gets in its place."""
    main_grad = main_grad_of(parameter)
    main_grad.add_(gradient.view(main_grad.shape))
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    # Trainers that declare this flag wait for a gradient hook, which needs a gradient; zeros of one element suffice.
    parameter.grad_added_to_main_grad = True
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
