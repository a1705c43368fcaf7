# SPDX-License-Identifier: Apache-2.0
"""Tensor maps of the grouped GEMMs: shapes, strides and boxes as kernels_src/moe/gemm_args.cuh states them.

Every function returns what `Kernel.launch` takes for one map: a record, cached by shape, and the address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prime_kernels.loader.launch import tensor_map

if TYPE_CHECKING:
    from prime_kernels.moe.cuda_buffers import Operand

    Map = tuple[bytes, int]

_SLAB = 64  # rows of a box, and its columns in bf16


class Matrices(NamedTuple):
    """[batch, rows, cols] in memory: a row is contiguous, rows are `pitch` and matrices `stride` bytes apart."""

    address: int
    batch: int
    rows: int
    cols: int
    stride: int
    pitch: int


def matrices(tensor: Operand) -> Matrices:
    """A contiguous [rows, cols] or [batch, rows, cols] tensor."""
    rows, cols = tensor.shape[-2:]
    batch = 1 if tensor.dim() == 2 else tensor.shape[0]
    pitch = cols * tensor.element_size()
    return Matrices(tensor.data_ptr(), batch, rows, cols, rows * pitch, pitch)


def halves(packed_or_gate: Operand, up: Operand | None) -> tuple[Matrices, Matrices]:
    """The gate and the up matrices of [E_l, 2I, H], or of two tensors [E_l, I, H]."""
    whole = matrices(packed_or_gate)
    if up is not None:
        return whole, matrices(up)
    rows = whole.rows // 2
    gate = whole._replace(rows=rows)
    return gate, gate._replace(address=whole.address + rows * whole.cols * packed_or_gate.element_size())


def rows(tensor: Operand) -> Map:
    """[rows, cols] bf16, read or written in slabs of 64 x 64."""
    count, cols = tensor.shape
    return tensor_map((cols, count), (cols * 2,), (_SLAB, _SLAB)), tensor.data_ptr()


def strided_rows(m: Matrices) -> Map:
    """`rows` of one matrix that may be a part of a larger one."""
    return tensor_map((m.cols, m.rows), (m.pitch,), (_SLAB, _SLAB)), m.address


def row_halves(pool: int, count: int, cols: int) -> Map:
    """[rows, 2, cols] bf16 at an address, one half of 64 rows at a time; columns past the end are cut."""
    return tensor_map((cols, 2, count), (cols * 2, cols * 4), (_SLAB, 1, _SLAB)), pool


def reduce_cols(w: Matrices) -> Map:
    """Weights [expert, n, k] as a K-major B operand, 128 n at a time."""
    dims = (w.cols, w.rows, 1, w.batch)
    return tensor_map(dims, (w.pitch, w.stride, w.stride), (64, 128, 1, 1)), w.address


def reduce_rows(w: Matrices) -> Map:
    """[expert, k, n] as an MN-major operand, two blocks of 64 n at a time."""
    dims = (64, w.rows, w.cols // 64, w.batch)
    return tensor_map(dims, (w.pitch, 128, w.stride), (64, 64, 2, 1)), w.address


def gradient(w: Matrices, dtype: str) -> Map:
    """Weight gradients [expert, rows, cols], written in slabs of 64 rows x 128 bytes."""
    size = 4 if dtype == "f32" else 2
    return tensor_map((w.cols, w.rows, w.batch), (w.pitch, w.stride), (128 // size, 64, 1), dtype), w.address
