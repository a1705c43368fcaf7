# SPDX-License-Identifier: Apache-2.0
"""The torch.library ops: functional, with fake tensors and autograd, for compile, selective checkpointing and opcheck.

    mega_moe_fwd         saves inputs only: what a checkpoint policy may keep without keeping pools
    mega_moe_fwd_preact  also returns what save="preact" or "full" keeps
    mega_moe_bwd         gradients; those not asked for come back as empty tensors
    mega_moe_prepare     quantised weights

`runtime` is `MegaMoERuntime.id`. `w_up` is None for packed weights; else `w_gate_up` holds the gate half. Eager calls
reach the same ops through `function.py` and `run_eager`, which skip the generated autograd layer and its host time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe.backend import BackwardResult, ForwardResult, Needs
from prime_kernels.moe.checks import check_call, check_ids
from prime_kernels.moe.dispatch import is_observed
from prime_kernels.moe.handles import lookup, require_generation
from prime_kernels.moe.recipe import prepare_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from prime_kernels.moe.backend import Weights
    from prime_kernels.moe.runtime import MegaMoERuntime

_INPUTS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor? w_up, Tensor w_down, Tensor[] prepared, "
    "int runtime"
)
_OUTPUTS = "Tensor y, Tensor plan, Tensor tokens_per_expert, Tensor recv_per_local_expert"
_SCHEMAS = (
    f"mega_moe_fwd({_INPUTS}) -> ({_OUTPUTS})",
    f"mega_moe_fwd_preact({_INPUTS}, str save) -> ({_OUTPUTS}, Tensor preact)",
    "mega_moe_bwd(Tensor dy, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor? w_up, "
    "Tensor w_down, Tensor plan, Tensor? preact, Tensor[] prepared, int runtime, bool[] needs, "
    "ScalarType? wgrad_dtype) -> (Tensor dx, Tensor dtopk_weights, Tensor dw_gate_up, Tensor dw_up, Tensor dw_down)",
    "mega_moe_prepare(Tensor w_gate_up, Tensor? w_up, Tensor w_down, int runtime) -> Tensor[]",
)

_library: Any = torch.library.Library("prime_kernels", "DEF")  # type: ignore[no-untyped-call]
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _weights(w_gate_up: Tensor, w_up: Tensor | None) -> Weights:
    return w_gate_up if w_up is None else (w_gate_up, w_up)


def _prepared(tensors: Sequence[Tensor]) -> dict[str, Any]:
    # Absent rather than None: backends without quantised recipes need not know the argument.
    return {"prepared": tuple(tensors[:-1])} if tensors else {}


def _run_forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    prepared: Sequence[Tensor],
    runtime_id: int,
    save: str = "inputs",
) -> ForwardResult:
    runtime = lookup(runtime_id)
    weights = _weights(w_gate_up, w_up)

    def work() -> ForwardResult:
        if runtime.vouched is not x:
            check_call(runtime, x, topk_ids, topk_weights, w_gate_up, w_up, w_down)
        if runtime.checks_ids:
            check_ids(runtime, topk_ids)
        if prepared:
            # A host scalar among the tensors, so that a compiled graph neither bakes it in nor recompiles per step.
            require_generation(int(prepared[-1]), runtime)
        return runtime.implementation.forward(
            runtime, x, topk_ids, topk_weights, weights, w_down, save=save, **_prepared(prepared)
        )

    result = runtime.run("forward", work)
    runtime.forwards += 1
    return result


def _forward(*args: Any) -> tuple[Tensor | None, ...]:
    return _run_forward(*args)[:4]


def _gradients(
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    plan: Tensor,
    preact: Tensor | None,
    prepared: Sequence[Tensor],
    runtime_id: int,
    needs: Sequence[bool],
    wgrad_dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    runtime = lookup(runtime_id)

    def work() -> BackwardResult:
        return runtime.implementation.backward(
            runtime,
            dy.contiguous(),  # autograd hands out expanded gradients, e.g. of a sum
            x,
            topk_ids,
            topk_weights,
            _weights(w_gate_up, w_up),
            w_down,
            plan,
            preact,
            needs=Needs(*needs),
            wgrad_dtype=wgrad_dtype,
            **_prepared(prepared),
        )

    result = runtime.run("backward", work)
    runtime.backwards += 1
    dw_gate_up, dw_up = result.dw_gate_up, None
    if isinstance(dw_gate_up, tuple):
        dw_gate_up, dw_up = dw_gate_up
    return result.dx, result.dtopk_weights, dw_gate_up, dw_up, result.dw_down


def _backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in _gradients(dy, *args))


def _prepare(w_gate_up: Tensor, w_up: Tensor | None, w_down: Tensor, runtime_id: int) -> list[Tensor]:
    runtime = lookup(runtime_id)
    tensors = prepare_tensors(runtime.config.precision, _weights(w_gate_up, w_up), w_down)
    return [*tensors, torch.tensor(runtime.weight_generation, device="cpu")]


def _fake_outputs(runtime: MegaMoERuntime, x: Tensor) -> tuple[Tensor, ...]:
    config = runtime.config
    numel = runtime.implementation.plan_numel(config, num_tokens=x.shape[0], ep_size=runtime.ep_size)
    sizes = (numel, config.num_experts, runtime.num_local_experts)
    return (torch.empty_like(x), *(x.new_empty(size, dtype=torch.int32) for size in sizes))


def _fake_forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _fake_outputs(lookup(rest[6]), x)


def _fake_forward_preact(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    runtime, save = lookup(rest[6]), rest[7]
    shape = runtime.implementation.preact_shape(
        runtime.config, num_tokens=x.shape[0], ep_size=runtime.ep_size, save=save
    )
    return (*_fake_outputs(runtime, x), x.new_empty(shape))


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    needs, dtype = Needs(*rest[4]), rest[5]
    dtype = w_down.dtype if dtype is None else dtype

    def like(source: Tensor | None, wanted: bool, dtype: torch.dtype) -> Tensor:
        if source is None or not wanted:
            return x.new_empty(0)
        return torch.empty_like(source, dtype=dtype, memory_format=torch.contiguous_format)

    return (
        like(x, needs.x, x.dtype),
        like(topk_weights, needs.topk_weights, torch.promote_types(topk_weights.dtype, torch.float32)),
        like(w_gate_up, needs.w_gate_up, dtype),
        like(w_up, needs.w_gate_up, dtype),
        like(w_down, needs.w_down, dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, prepared, ctx.runtime = inputs[:8]
    preact = output[4] if len(output) == 5 else None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1], preact, *prepared)
    ctx.num_inputs = len(inputs)
    ctx.num_prepared = len(prepared)


def _autograd(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    rest = [None] * ctx.num_inputs
    if dy is None:
        return tuple(rest)
    tensors, prepared = ctx.saved_tensors[:8], list(ctx.saved_tensors[8:])
    wanted = ctx.needs_input_grad
    needs = [wanted[0], wanted[2], wanted[3] or wanted[4], wanted[5]]
    dtype = lookup(ctx.runtime).config.wgrad_dtype
    gradients = torch.ops.prime_kernels.mega_moe_bwd.default(dy, *tensors, prepared, ctx.runtime, needs, dtype)
    places = (0, 2, 3, 4, 5)
    result: list[Any] = [
        gradients[places.index(i)] if i in places and wanted[i] else None for i in range(ctx.num_inputs)
    ]
    result[6] = [None] * ctx.num_prepared
    return tuple(result)


def _no_double_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedConfig(
        "mega_moe was differentiated twice; its backward has no derivative.",
        facts={"argument": "create_graph"},
        remedy="Drop create_graph=True around this layer.",
    )


for _name, _implementation, _fake in (
    ("mega_moe_fwd", _forward, _fake_forward),
    ("mega_moe_fwd_preact", _run_forward, _fake_forward_preact),
    ("mega_moe_bwd", _backward, _fake_backward),
    ("mega_moe_prepare", _prepare, _prepare),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"prime_kernels::{_name}", _fake, lib=_library)
for _name in ("mega_moe_fwd", "mega_moe_fwd_preact"):
    torch.library.register_autograd(f"prime_kernels::{_name}", _autograd, setup_context=_setup, lib=_library)
torch.library.register_autograd("prime_kernels::mega_moe_bwd", _no_double_backward, lib=_library)

mega_moe_fwd = torch.ops.prime_kernels.mega_moe_fwd.default
mega_moe_fwd_preact = torch.ops.prime_kernels.mega_moe_fwd_preact.default
mega_moe_bwd = torch.ops.prime_kernels.mega_moe_bwd.default
mega_moe_prepare = torch.ops.prime_kernels.mega_moe_prepare.default

_DIRECT: dict[Any, Any] = {mega_moe_fwd: _forward, mega_moe_fwd_preact: _run_forward, mega_moe_bwd: _gradients}


def run_eager(op: Any, *args: Any) -> tuple[Any, ...]:
    """One of the ops below autograd: as what it is for whoever observes ops, its implementation itself otherwise.

    Boxing arguments and results for the dispatcher takes as long as everything else that the host does in a call.
    Gradients that were not asked for are empty tensors from the op, None from its implementation.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return tuple((op if is_observed(args) else _DIRECT[op])(*args))
