# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's matrix, with DeepGEMM's names, argument order and meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_kernels.deep_gemm import launch, operands, options
from prime_kernels.deep_gemm.launch import Groups

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.cuda_maps import Matrices


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor | None = None,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    *,
    m_indices: Tensor | None = None,
) -> None:
    """d rows of group g = a rows of group g times b[g] transposed, for rows that stand group by group.

    Rounded once to bf16 from fp32 sums. Rows of d behind a group, up to the next multiple of 64 (of the alignment with
    `use_psum_layout` and `ensure_zero_padding`), get the product of a's rows there; all other padding keeps its values.

    Args:
        a: [M, K] bf16, rows contiguous; K a multiple of 64.
        b: [G, N, K] bf16, each matrix contiguous or the transpose of a contiguous one; N a multiple of 64.
        d: [M, N] bf16, rows contiguous; overwritten.
        grouped_layout: [M] int32 on the device: group of each row, -1 for padding. Every group is one run that starts
            at a multiple of 64 rows; runs may stand in any order, groups may be missing. With `use_psum_layout`: [G]
            int32, one past the last row of each group; groups start at multiples of
            `get_mk_alignment_for_contiguous_layout()`.
        compiled_dims: Ignored; nothing is compiled.
        use_psum_layout: What `grouped_layout` holds.
        ensure_zero_padding: With `use_psum_layout`: write padding rows, zeros where those of a are.
        expected_m_for_psum_layout: Ignored; goes with `use_psum_layout` only.
        m_indices: Another name of `grouped_layout`.

    Raises:
        ShapeError: A tensor of the wrong shape, dtype or device, or the layout of an earlier call was wrong (E42).
        UnsupportedConfig: Sizes, strides or alignment that the kernels do not take (E41).
        BackendUnavailable: There is no kernel for this GPU.
    """
    layout = operands.one_of("grouped_layout", grouped_layout, "m_indices", m_indices)
    if expected_m_for_psum_layout is not None and not use_psum_layout:
        got = f"{expected_m_for_psum_layout} without use_psum_layout"
        operands.unsupported("expected_m_for_psum_layout", got, "None", "Leave it out, or pass use_psum_layout=True.")
    _m_grouped(a, b, d, layout, False, use_psum_layout, ensure_zero_padding)


def m_grouped_bf16_gemm_nn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor | None = None,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    *,
    m_indices: Tensor | None = None,
) -> None:
    """As `m_grouped_bf16_gemm_nt_contiguous`, with b [G, K, N]: d rows of group g = a rows of group g times b[g].

    Args:
        a, d, grouped_layout, compiled_dims, use_psum_layout, ensure_zero_padding, m_indices: As there.
        b: [G, K, N] bf16, each matrix contiguous or the transpose of a contiguous one; N a multiple of 64.

    Raises:
        ShapeError, UnsupportedConfig, BackendUnavailable: As there.
    """
    layout = operands.one_of("grouped_layout", grouped_layout, "m_indices", m_indices)
    _m_grouped(a, b, d, layout, True, use_psum_layout, ensure_zero_padding)


def _weights(b: Tensor, nn: bool) -> tuple[Matrices, bool]:
    """b [G, N, K], or [G, K, N] when `nn`, as it lies in memory, and whether K is what is contiguous."""
    as_named = b.stride(-1) == 1
    return operands.matrices("b", b, transposed=not as_named), as_named != nn


def _m_grouped(
    a: Tensor, b: Tensor, d: Tensor, layout: Tensor | None, nn: bool, ends: bool, fill_padding: bool
) -> None:
    import torch

    operands.tensor("a", a, "[M, K]", 2, torch.bfloat16)
    operands.tensor("b", b, "[G, K, N]" if nn else "[G, N, K]", 3, torch.bfloat16)
    operands.tensor("d", d, "[M, N]", 2, torch.bfloat16)
    rows, k = a.shape
    num_groups, n, k_of_b = b.shape
    if nn:
        n, k_of_b = k_of_b, n
    if k_of_b != k:
        operands.wrong_shape("b", f"of K {k_of_b}", f"a's K {k}", "nt takes [G, N, K], nn takes [G, K, N].")
    if d.shape != (rows, n):
        operands.wrong_shape("d", list(d.shape), f"[M, N] = [{rows}, {n}]", "Allocate d for a's rows and b's columns.")
    operands.groups(num_groups)
    operands.width("K", k)
    operands.width("N", n)
    words, length = ("[G]", num_groups) if ends else ("[M]", rows)
    layout = operands.index_list("grouped_layout", layout, words, length)
    device = operands.one_device(a, b=b, d=d, grouped_layout=layout)
    if rows == 0:
        return
    a_rows, d_rows = operands.matrices("a", a), operands.matrices("d", d)
    weights, k_major = _weights(b, nn)
    with launch.on(device):
        at = launch.place_of(device)
        align = options.get_mk_alignment_for_contiguous_layout()
        kind, round_to = (Groups.ENDS, align if fill_padding else 1) if ends else (Groups.ROWS, 1)
        groups = launch.bounds(at, kind, layout, num_groups, rows, align=align, round_to=round_to)
        launch.rows_by_weights(at, groups, a_rows, weights, d_rows, k_major=k_major)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    """d[g, :masked_m[g]] = a[g, :masked_m[g]] times b[g] transposed, for groups that have a place of M rows each.

    Rows of d behind a group, up to the next multiple of 64, get the product of a's rows there; the others keep theirs.

    Args:
        a: [G, M, K] bf16, contiguous; K a multiple of 64, M one of 64.
        b: [G, N, K] bf16, as in `m_grouped_bf16_gemm_nt_contiguous`.
        d: [G, M, N] bf16, contiguous; N a multiple of 64.
        masked_m: [G] int32 on the device: rows of each group, 0 to M.
        expected_m: Ignored; the order of work follows `masked_m`.
        compiled_dims: Ignored; nothing is compiled.

    Raises:
        ShapeError, UnsupportedConfig, BackendUnavailable: As `m_grouped_bf16_gemm_nt_contiguous`.
    """
    import torch

    for name, value, words in (("a", a, "[G, M, K]"), ("b", b, "[G, N, K]"), ("d", d, "[G, M, N]")):
        operands.tensor(name, value, words, 3, torch.bfloat16)
    num_groups, rows, k = a.shape
    n = b.shape[1]
    if b.shape != (num_groups, n, k):
        operands.wrong_shape("b", list(b.shape), f"[G, N, K] = [{num_groups}, N, {k}]", "Pass one matrix per group.")
    if d.shape != (num_groups, rows, n):
        need = f"[G, M, N] = [{num_groups}, {rows}, {n}]"
        operands.wrong_shape("d", list(d.shape), need, "Allocate d for a's rows and b's columns.")
    operands.groups(num_groups)
    for name, size in (("M", rows), ("K", k), ("N", n)):
        operands.width(name, size)
    masked_m = operands.index_list("masked_m", masked_m, "[G]", num_groups)
    device = operands.one_device(a, b=b, d=d, masked_m=masked_m)
    a_rows, d_rows = operands.places("a", a), operands.places("d", d)
    weights, k_major = _weights(b, False)
    with launch.on(device):
        at = launch.place_of(device)
        groups = launch.bounds(at, Groups.PLACES, masked_m, num_groups, rows, align=1, round_to=1)
        launch.rows_by_weights(at, groups, a_rows, weights, d_rows, k_major=k_major)
