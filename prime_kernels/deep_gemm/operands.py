# SPDX-License-Identifier: Apache-2.0
"""Checks of one call's tensors: typed errors that name the argument. Nothing is copied or cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from prime_kernels.deep_gemm.options import BLOCK
from prime_kernels.errors import DtypeError, ShapeError, UnsupportedConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEVICE_TYPE = "cuda"
MAX_GROUPS = 4096  # kMaxGroups of kernels_src/moe/group_bounds.cuh
_ALIGNMENT = 16  # bytes; what bulk tensor copies read and write at


def wrong_shape(name: str, got: object, need: str, remedy: str) -> NoReturn:
    raise ShapeError(f"{name} is {got}; need {need}.", facts={"argument": name, "got": repr(got)}, remedy=remedy)


def unsupported(name: str, got: object, need: str, remedy: str) -> NoReturn:
    raise UnsupportedConfig(f"{name} is {got}; need {need}.", facts={"argument": name, "got": repr(got)}, remedy=remedy)


def one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    """The value of an argument that DeepGEMM releases call by two names."""
    if value is not None and other is not None:
        wrong_shape(name, f"given, and so is {alias}", "one of them", "They are two names of one argument.")
    return other if value is None else value


def tensor(name: str, value: object, shape: str, dims: int, *dtypes: torch.dtype) -> Tensor:
    """`value` as a tensor of `dims` dimensions and one of `dtypes` on a CUDA device."""
    import torch

    if not isinstance(value, torch.Tensor):
        wrong_shape(name, f"a {type(value).__name__}", f"a tensor {shape}", "Pass a torch.Tensor.")
    if value.dim() != dims:
        wrong_shape(name, list(value.shape), shape, f"Pass a tensor of {dims} dimensions.")
    if value.dtype not in dtypes:
        need = " or ".join(map(str, dtypes))
        raise DtypeError(
            f"{name} is {value.dtype}; need {need}.",
            facts={"argument": name, "got": str(value.dtype), "need": need},
            remedy="Cast it where it is made; no copy is made silently.",
        )
    if value.device.type != DEVICE_TYPE:
        wrong_shape(name, f"on {value.device}", "a CUDA device", "Move it there; these kernels run on GPUs only.")
    return value


def same_device(first: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if other.device != first.device:
            wrong_shape(name, f"on {other.device}", f"a's device {first.device}", "Move it there.")


def row_major(name: str, value: Tensor) -> None:
    """Rows contiguous, everything at multiples of 16 bytes: what a tensor map can describe."""
    size = value.element_size()
    steps = [value.stride(i) * size for i in range(value.dim() - 1) if value.shape[i] > 1]
    if value.stride(-1) != 1 or any(step % _ALIGNMENT or step <= 0 for step in steps):
        strides = f"{list(value.shape)} with strides {list(value.stride())}"
        need = f"contiguous rows whose starts are multiples of {_ALIGNMENT} bytes apart"
        unsupported(name, strides, need, "Call .contiguous() where the tensor is made; no copy is made silently.")
    if value.data_ptr() % _ALIGNMENT:
        beyond = f"{value.data_ptr() % _ALIGNMENT} bytes past a multiple of {_ALIGNMENT}"
        unsupported(name, beyond, f"{_ALIGNMENT}-byte alignment", "Pass a slice at an aligned offset.")


def width(name: str, size: int) -> None:
    """A width of an operand, which kernels cover in steps of 64."""
    if size <= 0 or size % BLOCK:
        nearest = max(BLOCK, (size + BLOCK // 2) // BLOCK * BLOCK)
        unsupported(name, size, f"a positive multiple of {BLOCK}", f"Pad it with zeros; the nearest is {nearest}.")


def groups(count: int) -> None:
    if not 0 < count <= MAX_GROUPS:
        unsupported("the number of groups", count, f"1 to {MAX_GROUPS}", "Split the call.")


def index_list(name: str, value: object, shape: str, length: int) -> Tensor:
    """A contiguous int32 vector of a given length on the device."""
    import torch

    found = tensor(name, value, shape, 1, torch.int32)
    if found.shape[0] != length:
        wrong_shape(name, list(found.shape), f"{shape} = [{length}]", "Pass one entry for each.")
    if not found.is_contiguous():
        unsupported(name, f"of stride {found.stride(0)}", "a contiguous tensor", "Call .contiguous() where it is made.")
    return found
