# SPDX-License-Identifier: Apache-2.0
"""Checks of one call's tensors. Nothing is cast, copied or made contiguous on the caller's behalf."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from prime_kernels.errors import DtypeError, ShapeError, UnsupportedConfig

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.runtime import MegaMoERuntime

_ALIGNMENT = 16  # bytes; the bulk copies of the kernels
_ID_DTYPES = (torch.int32, torch.int64)
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_call(
    runtime: MegaMoERuntime,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
) -> None:
    """Shapes, dtypes, devices, strides and alignment; no device access.

    Args:
        w_gate_up: Packed [E_l, 2I, H] or [E_l, 2, I, H]; with `w_up`, the gate half [E_l, I, H].

    Raises:
        ShapeError: a tensor of the wrong size, dtype or device.
        UnsupportedConfig: strides or alignment that no backend reads.
    """
    config = runtime.config
    hidden, inter, local = config.hidden, config.intermediate, runtime.num_local_experts
    if not (isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[1] == hidden):
        _shape("x", x, f"[T, hidden] = [T, {hidden}]", "Flatten batch and sequence; hidden is fixed by the config.")
    tokens = x.shape[0]
    if tokens > config.max_tokens_per_rank:
        raise ShapeError(
            f"x has {tokens} tokens; max_tokens_per_rank is {config.max_tokens_per_rank}.",
            facts={"argument": "x", "got": tokens, "max_tokens_per_rank": config.max_tokens_per_rank},
            remedy="Create the runtime with a larger max_tokens_per_rank "
            "(model.moe.dispatch.max_tokens_per_rank in prime-rl), or feed fewer tokens per call.",
        )
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if not (isinstance(tensor, torch.Tensor) and tensor.shape == (tokens, config.topk)):
            _shape(name, tensor, f"[T, topk] = [{tokens}, {config.topk}]", "Pass one entry per token and choice.")
    if w_up is None:
        packed = (local, 2 * inter, hidden)
        if not (isinstance(w_gate_up, torch.Tensor) and w_gate_up.shape in (packed, (local, 2, inter, hidden))):
            _weight_shape("w_gate_up", w_gate_up, f"[E_l, 2*intermediate, hidden] = {list(packed)}", runtime)
    else:
        for name, tensor in (("w_gate_up[0]", w_gate_up), ("w_gate_up[1]", w_up)):
            if not (isinstance(tensor, torch.Tensor) and tensor.shape == (local, inter, hidden)):
                _weight_shape(name, tensor, f"[E_l, intermediate, hidden] = {[local, inter, hidden]}", runtime)
    if not (isinstance(w_down, torch.Tensor) and w_down.shape == (local, hidden, inter)):
        _weight_shape("w_down", w_down, f"[E_l, hidden, intermediate] = {[local, hidden, inter]}", runtime)
    _check_dtypes(runtime, x, topk_ids, topk_weights, w_gate_up, w_up, w_down)
    _check_placement("x", x, runtime.device, _ALIGNMENT)
    _check_placement("topk_ids", topk_ids, runtime.device, 0)
    _check_placement("topk_weights", topk_weights, runtime.device, 0)
    _check_placement("w_gate_up" if w_up is None else "w_gate_up[0]", w_gate_up, runtime.device, _ALIGNMENT)
    if w_up is not None:
        _check_placement("w_gate_up[1]", w_up, runtime.device, _ALIGNMENT)
    _check_placement("w_down", w_down, runtime.device, _ALIGNMENT)


def check_ids(runtime: MegaMoERuntime, topk_ids: Tensor) -> None:
    """Every id is -1 or in [0, E). Reads the ids on the host.

    Raises:
        ShapeError: names the first bad slot and its value.
    """
    bad = (topk_ids < -1) | (topk_ids >= runtime.config.num_experts)
    if not bool(bad.any()):
        return
    token, slot = (int(i) for i in bad.nonzero()[0])
    value = int(topk_ids[token, slot])
    raise ShapeError(
        f"topk_ids[{token}, {slot}] is {value} on ep_rank {runtime.ep_rank}; "
        f"need -1 (no expert) or a global expert id in 0..{runtime.config.num_experts - 1}. "
        f"{int(bad.sum())} of {topk_ids.numel()} slots are out of range.",
        facts={"argument": "topk_ids", "token": token, "slot": slot, "got": value, "ep_rank": runtime.ep_rank},
        remedy="Mask unused slots with -1; check that the ids are global, not local to a rank.",
    )


def _check_dtypes(
    runtime: MegaMoERuntime,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
) -> None:
    allowed = runtime.dtypes
    if x.dtype not in allowed:
        hint = "Cast x and the weights yourself; torch.autocast does not reach into this op."
        _dtype("x", x, " or ".join(map(str, allowed)), hint)
    if topk_ids.dtype not in _ID_DTYPES:
        _dtype("topk_ids", topk_ids, "torch.int32 or torch.int64", "Cast it where it is made.")
    if topk_weights.dtype not in _WEIGHT_DTYPES and not topk_weights.dtype == x.dtype == torch.float64:
        _dtype("topk_weights", topk_weights, "torch.float32, torch.bfloat16 or torch.float16", "Pass float32.")
    for name, tensor in (("w_gate_up", w_gate_up), ("w_gate_up[1]", w_up), ("w_down", w_down)):
        if tensor is not None and tensor.dtype != x.dtype:
            _dtype(name, tensor, f"x's dtype {x.dtype}", "Keep fp32 master weights in the optimizer and pass a cast.")


def _check_placement(name: str, tensor: Tensor, device: torch.device, alignment: int) -> None:
    if tensor.device != device:
        raise ShapeError(
            f"{name} is on {tensor.device}; the runtime is on {device}.",
            facts={"argument": name, "got": str(tensor.device), "need": str(device)},
            remedy="Move the tensor, or create the runtime with device=.",
        )
    if not tensor.is_contiguous():
        raise UnsupportedConfig(
            f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())}; need a contiguous tensor.",
            facts={"argument": name, "strides": tuple(tensor.stride())},
            remedy="Call .contiguous() where the tensor is made; no copy is made silently.",
        )
    if alignment and tensor.data_ptr() % alignment:
        raise UnsupportedConfig(
            f"{name} starts {tensor.data_ptr() % alignment} bytes past a multiple of {alignment} "
            f"(storage offset {tensor.storage_offset()} elements); need {alignment}-byte alignment.",
            facts={"argument": name, "alignment": alignment, "storage_offset": tensor.storage_offset()},
            remedy="Pass a tensor that owns its storage, or a slice at an aligned offset.",
        )


def _describe(tensor: object) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"


def _shape(name: str, tensor: object, need: str, remedy: str) -> NoReturn:
    got = _describe(tensor)
    raise ShapeError(f"{name} is {got}; need {need}.", facts={"argument": name, "got": got}, remedy=remedy)


def _weight_shape(name: str, tensor: object, need: str, runtime: MegaMoERuntime) -> NoReturn:
    _shape(
        name,
        tensor,
        f"{need} for {runtime.num_local_experts} of {runtime.config.num_experts} experts on this rank",
        "Call through the module that owns the parameters, so that FSDP has gathered them; "
        "convert_gate_up turns other layouts into this one.",
    )


def _dtype(name: str, tensor: Tensor, need: str, remedy: str) -> NoReturn:
    raise DtypeError(
        f"{name} is {tensor.dtype}; need {need}.",
        facts={"argument": name, "got": str(tensor.dtype), "need": need},
        remedy=remedy,
    )
