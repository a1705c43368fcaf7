# SPDX-License-Identifier: Apache-2.0
"""Checks of one call's tensors: typed errors that name the argument. Nothing is copied or cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from prime_kernels.deep_gemm.options import BLOCK
from prime_kernels.errors import DtypeError, ShapeError, UnsupportedConfig
from prime_kernels.moe.cuda_maps import Matrices

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
    """`value` as a tensor of `dims` dimensions and one of `dtypes`."""
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
    return value


def one_device(a: Tensor, **others: Tensor) -> torch.device:
    """The CUDA device that all tensors of a call are on."""
    device = a.device
    if device.type != DEVICE_TYPE:
        wrong_shape("a", f"on {device}", "a CUDA device", "Move it there; these kernels run on GPUs only.")
    for name, other in others.items():
        if other.device != device:
            wrong_shape(name, f"on {other.device}", f"a's device {device}", "Move it there.")
    return device


def matrices(name: str, value: Tensor, *, transposed: bool = False) -> Matrices:
    """[rows, cols] or [batch, rows, cols], possibly a part of a larger tensor, as a tensor map can describe it.

    Rows have to be contiguous, and everything at multiples of 16 bytes. `transposed`: the last two dimensions change
    places first. The stride of a dimension of size 1 says nothing.
    """
    shape, strides, size = value.shape, value.stride(), value.element_size()
    row, col = (-1, -2) if transposed else (-2, -1)
    rows, cols, batch = shape[row], shape[col], shape[0] if len(shape) == 3 else 1
    pitch = strides[row] * size if rows > 1 else cols * size
    stride = strides[0] * size if batch > 1 else rows * pitch
    address = value.data_ptr()
    if strides[col] != 1 or pitch <= 0 or stride <= 0 or (pitch | stride) % _ALIGNMENT:
        got = f"{list(shape)} with strides {list(strides)}"
        need = f"contiguous rows whose starts are multiples of {_ALIGNMENT} bytes apart"
        unsupported(name, got, need, "Call .contiguous() where the tensor is made; no copy is made silently.")
    if address % _ALIGNMENT:
        beyond = f"{address % _ALIGNMENT} bytes past a multiple of {_ALIGNMENT}"
        unsupported(name, beyond, f"{_ALIGNMENT}-byte alignment", "Pass a slice at an aligned offset.")
    return Matrices(address, batch, rows, cols, stride, pitch)


def places(name: str, value: Tensor) -> Matrices:
    """[groups, rows, cols] without gaps, as one matrix of all rows."""
    each = matrices(name, value)
    if each.stride != each.rows * each.pitch:
        got = f"{list(value.shape)} with strides {list(value.stride())}"
        unsupported(name, got, "groups that follow one another without gaps", "Call .contiguous() where it is made.")
    return each._replace(batch=1, rows=each.batch * each.rows)


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
