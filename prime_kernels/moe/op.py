# SPDX-License-Identifier: Apache-2.0
"""`mega_moe`: the whole routed-expert layer as one differentiable call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from prime_kernels.moe import auto, ops
from prime_kernels.moe.arguments import Options, check_options, split_gate_up, traced_id
from prime_kernels.moe.checks import check_call
from prime_kernels.moe.function import Call, MegaMoEFunction, accept_grad_dtype, local_weight, run_forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from prime_kernels.moe.config import Precision, Save
    from prime_kernels.moe.runtime import MegaMoERuntime
    from prime_kernels.moe.weights import PreparedExpertWeights


class MegaMoEStats(NamedTuple):
    """Load of one call, on the device; not summed over calls, so that recomputation counts nothing twice."""

    tokens_per_expert: Tensor
    """[E] int32. Routes from this rank's tokens to each global expert."""
    recv_per_local_expert: Tensor
    """[E_l] int32. Rows this rank computed for each of its experts."""


def mega_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    runtime: MegaMoERuntime | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    precision: Precision = "bf16",
    prepared: PreparedExpertWeights | None = None,
    save: Save | None = None,
    wgrad: Literal["autograd", "main_grad"] = "autograd",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, MegaMoEStats]:
    """Send this rank's tokens through their experts' SwiGLU FFN and add up the weighted results.

    y[t] = sum_k topk_weights[t, k] * down_e(swiglu(gate_e(x[t]), up_e(x[t]))),  e = topk_ids[t, k]

    Dims: T tokens here, K topk, H hidden, I intermediate, E experts, E_l experts on this rank. With a group of more
    than one rank this is a collective, forward and backward, for every rank whatever its T.

    Args:
        x: [T, H] bf16 contiguous, 16-byte aligned. T may be 0 and may differ per rank (reference: fp16/32/64 too).
        topk_ids: [T, K] int32 or int64 contiguous. Global expert ids; -1 is no expert; repeated ids are summed.
        topk_weights: [T, K] fp32 contiguous (bf16 and fp16 are upcast). Ignored where the id is -1.
        w_gate_up: [E_l, 2I, H] x.dtype contiguous, gate rows then up rows; or [E_l, 2, I, H]; or (w_gate, w_up),
            each [E_l, I, H]. DTensors sharded on dim 0 are taken by their local part.
        w_down: [E_l, H, I] x.dtype contiguous.
        runtime: From `MegaMoERuntime.create`. None, in eager mode only: one is created on first use for these shapes,
            a collective over `group`, and kept.
        group: Expert-parallel ranks when `runtime` is None; None: this rank holds all experts.
        precision: Must equal the runtime's, so that a call never runs in another recipe than it says.
        prepared: From `prepare_weights`; None quantises on the fly. The weights are passed all the same.
        save: "preact", "inputs" or "full"; None takes the config's. Same bits in every mode.
        wgrad: "main_grad" adds the weight gradients to `param.main_grad` in backward instead of returning them.
        return_stats: Also return `MegaMoEStats`.

    Returns:
        y, [T, H] x.dtype on x's device, ordered on the current stream; with `return_stats` also the counts.

    Raises:
        ShapeError: a tensor's shape, dtype or device, T over the cap, or an id out of range; names the argument.
        UnsupportedConfig: strides, alignment, or an option that does not fit the runtime.
        StaleWeightsError: `prepared` is older than the runtime's weight generation.
        PeerAborted: another rank failed its own checks or stopped; nothing of this call was used.
        PeerTimeout: another rank did not come within peer_timeout_s.
        RuntimeClosedError: the runtime is closed.

    Numerics: fp32 accumulation, SwiGLU in fp32 from the rounded gate and up values, slots added in fp32 in slot order.
    Bitwise repeatable. Expert gradients are the plain sum over the tokens of all ranks, without 1/ep_size.
    Autograd: x, topk_weights and both weights; only what is needed is computed; an empty expert's gradient is zeros.
        With the config's wgrad_dtype, leaf weights keep gradients of that dtype (their `grad_dtype` is set to it).
        Under no_grad nothing is saved. Differentiating twice raises.
    Source: moe/function.py and moe/ops.py; the reference is moe/reference.py.
    """
    run: Callable[..., tuple[Tensor, ...]] = _traced
    if not torch.compiler.is_compiling():
        if runtime is None:
            runtime = auto.runtime_for(x, topk_ids, w_gate_up, w_down, group=group, precision=precision)
        elif group is not None:
            auto.require_same_group(runtime, group)
        # Whatever is wrong on this rank is told to the peers, which otherwise wait for it.
        run = _eager if runtime.channel is None else _guarded
    y, *counts = run(x, topk_ids, topk_weights, w_gate_up, w_down, runtime, Options(precision, prepared, save, wgrad))
    return (y, MegaMoEStats(*counts)) if return_stats else y


def _guarded(*args: Any) -> tuple[Tensor, ...]:
    with args[5].channel.guard("forward"):
        return _eager(*args)


def _eager(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    runtime: MegaMoERuntime,
    options: Options,
) -> tuple[Tensor, ...]:
    gate_up, up = split_gate_up(w_gate_up)
    check_options(runtime, options, x, (gate_up, up, w_down))
    check_call(runtime, x, topk_ids, topk_weights, local_weight(gate_up), local_weight(up), local_weight(w_down))
    if topk_weights.dtype in (torch.bfloat16, torch.float16):
        topk_weights = topk_weights.float()
    prepared = () if options.prepared is None else options.prepared.tensors
    save = options.save or runtime.config.save
    call = Call(runtime, save, prepared, options.wgrad == "main_grad")
    runtime.vouched = x
    try:
        if not _differentiable(x, topk_weights, gate_up, up, w_down):
            result = run_forward(x, topk_ids, topk_weights, gate_up, up, w_down, call._replace(save="inputs"))
            return result[0], result[2], result[3]
        if runtime.config.wgrad_dtype is not None and not call.main_grad:
            accept_grad_dtype((gate_up, up, w_down), runtime.config.wgrad_dtype)
        outputs: tuple[Tensor, ...] = MegaMoEFunction.apply(  # type: ignore[no-untyped-call]
            x, topk_ids, topk_weights, gate_up, up, w_down, call
        )
        return outputs
    finally:
        runtime.vouched = None


def _traced(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    runtime: MegaMoERuntime | None,
    options: Options,
) -> tuple[Tensor, ...]:
    """Inside torch.compile: the op with its registered autograd. Tensors are checked when the compiled call runs."""
    gate_up, up = split_gate_up(w_gate_up)
    save = options.save or (runtime.config.save if runtime is not None else "inputs")
    if topk_weights.dtype in (torch.bfloat16, torch.float16):
        topk_weights = topk_weights.float()
    if not _differentiable(x, topk_weights, gate_up, up, w_down):
        save = "inputs"
    tensors = (x, topk_ids, topk_weights, local_weight(gate_up), local_weight(up), local_weight(w_down))
    prepared = [] if options.prepared is None else list(options.prepared.tensors)
    runtime_id = traced_id(runtime, options)
    if save == "inputs":
        y, _, sent, received = ops.mega_moe_fwd(*tensors, prepared, runtime_id)
    else:
        y, _, sent, received, _ = ops.mega_moe_fwd_preact(*tensors, prepared, runtime_id, save)
    return y, sent, received


def _differentiable(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
