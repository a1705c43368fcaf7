# SPDX-License-Identifier: Apache-2.0
"""The arguments of `mega_moe` that are not plain tensors: options, prepared weights, DTensors, main_grad."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch.distributed.tensor import DTensor

from prime_kernels.errors import ShapeError, UnsupportedConfig
from prime_kernels.moe.config import Save
from prime_kernels.moe.handles import NO_RUNTIME, TRACED_MAIN_GRAD, TRACED_OPTIONS
from prime_kernels.moe.limits import require_choice

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.runtime import MegaMoERuntime
    from prime_kernels.moe.weights import PreparedExpertWeights

SAVE_MODES = get_args(Save)


class Options(NamedTuple):
    """Keyword arguments of one call."""

    precision: str
    prepared: PreparedExpertWeights | None
    save: str | None
    wgrad: str


def split_gate_up(w_gate_up: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """(packed, None) or (gate, up)."""
    if isinstance(w_gate_up, (tuple, list)):
        if len(w_gate_up) != 2:
            raise ShapeError(
                f"w_gate_up is a sequence of {len(w_gate_up)}; need one tensor or (w_gate, w_up).",
                facts={"argument": "w_gate_up"},
                remedy="Pass the packed tensor, or the gate and the up weights in this order.",
            )
        return w_gate_up[0], w_gate_up[1]
    return w_gate_up, None


def traced_id(runtime: MegaMoERuntime | None, options: Options) -> int:
    """The number that torch.compile puts into its graph: the runtime's, or the reason why there must not be one."""
    if runtime is None:
        return NO_RUNTIME
    if options.wgrad == "main_grad":
        return TRACED_MAIN_GRAD
    fits = options.precision == runtime.config.precision and options.wgrad == "autograd"
    return runtime.id if fits and options.save in (None, *SAVE_MODES) else TRACED_OPTIONS


def _check_choices(runtime: MegaMoERuntime, options: Options) -> None:
    if options.precision != runtime.config.precision:
        raise UnsupportedConfig(
            f"precision is {options.precision!r}; the runtime was created with {runtime.config.precision!r}.",
            facts={"argument": "precision", "got": options.precision, "need": runtime.config.precision},
            remedy="Pass the runtime's precision in every call, or create a runtime for this one.",
        )
    require_choice("wgrad", options.wgrad, ("autograd", "main_grad"))
    if options.save is not None:
        require_choice("save", options.save, SAVE_MODES)


def check_options(
    runtime: MegaMoERuntime, options: Options, x: Tensor, weights: tuple[Tensor, Tensor | None, Tensor]
) -> None:
    """Options against the runtime; no device access unless the config says `debug`."""
    runtime.require_open()
    _check_choices(runtime, options)
    if isinstance(x, DTensor):
        raise ShapeError(
            f"x is a DTensor {x.placements}; need this rank's tokens as a plain tensor.",
            facts={"argument": "x"},
            remedy="Pass x.to_local(); the op itself moves tokens between the ranks of its group.",
        )
    w_gate_up, w_up, w_down = weights
    names = ("w_gate_up" if w_up is None else "w_gate_up[0]", "w_gate_up[1]", "w_down")
    for name, weight in zip(names, weights, strict=True):
        if isinstance(weight, DTensor):
            _check_placements(name, weight)
        if weight is not None and options.wgrad == "main_grad" and weight.requires_grad:
            _check_main_grad(name, weight)
    if options.wgrad == "main_grad":
        _check_one_dtype(names, weights)
    _check_wgrad_dtype(runtime, w_down)
    if options.prepared is not None:
        options.prepared.require_current(runtime, w_gate_up, w_up, w_down)


def _check_placements(name: str, weight: DTensor) -> None:
    mesh = weight.device_mesh
    for dim, placement in enumerate(weight.placements):
        if mesh.size(dim) > 1 and not placement.is_shard(0):
            raise UnsupportedConfig(
                f"{name} is a DTensor with placement {placement} over {mesh.size(dim)} ranks; "
                "need Shard(0), whole experts, on every mesh dimension of more than one rank.",
                facts={"argument": name, "placements": str(weight.placements)},
                remedy="Call through the module that owns the parameters, so that FSDP has gathered them, and shard "
                "experts only by expert.",
            )


def _check_main_grad(name: str, weight: Tensor) -> None:
    main_grad = getattr(weight, "main_grad", None)
    local = main_grad.to_local() if isinstance(main_grad, DTensor) else main_grad
    expected = weight.to_local() if isinstance(weight, DTensor) else weight
    fits = isinstance(local, torch.Tensor) and local.shape == expected.shape and local.device == expected.device
    if fits and local is not None and local.dtype in (torch.float32, weight.dtype) and local.is_contiguous():
        return
    got = "missing" if main_grad is None else f"{list(local.shape)} {local.dtype}" if local is not None else "no tensor"
    raise ShapeError(
        f"{name}.main_grad is {got}; need a contiguous {list(expected.shape)} torch.float32 or {weight.dtype} tensor.",
        facts={"argument": f"{name}.main_grad"},
        remedy='Attach main_grad to the parameter before the forward, or use wgrad="autograd".',
    )


def _check_one_dtype(names: tuple[str, ...], weights: tuple[Tensor, Tensor | None, Tensor]) -> None:
    dtypes = {
        name: weight.main_grad.dtype  # type: ignore[attr-defined]
        for name, weight in zip(names, weights, strict=True)
        if weight is not None and weight.requires_grad
    }
    if len(set(dtypes.values())) > 1:
        raise ShapeError(
            f"main_grad dtypes differ: {', '.join(f'{name} {dtype}' for name, dtype in dtypes.items())}.",
            facts={"argument": "main_grad"},
            remedy="Give all expert weights main_grad buffers of one dtype.",
        )


def _check_wgrad_dtype(runtime: MegaMoERuntime, w_down: Tensor) -> None:
    dtype = runtime.config.wgrad_dtype
    if dtype in (None, torch.float32, w_down.dtype):
        return
    raise UnsupportedConfig(
        f"wgrad_dtype is {dtype}; need None, torch.float32 or the weights' {w_down.dtype}.",
        facts={"argument": "wgrad_dtype", "got": str(dtype)},
        remedy="Use None to follow the weights or torch.float32 for master gradients.",
    )
