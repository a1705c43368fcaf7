# SPDX-License-Identifier: Apache-2.0
"""Weight gradients group by group, with DeepGEMM's name, argument order and meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_kernels.deep_gemm import launch, operands, options
from prime_kernels.deep_gemm.launch import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks: Sequence[int] | None = None,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    *,
    ks_cpu: Sequence[int] | None = None,
    ks_tensor: Tensor | None = None,
) -> None:
    """d[g] = a rows of group g, transposed, times b rows of group g, plus c[g] if there is a c: a weight gradient.

    Sums are fp32, in row order. A group without rows gets c[g], or zeros without c; when c is d it is not touched.
    Adding to c is one fp32 addition per element, so results do not depend on anything but the operands.

    Args:
        a: [sum of K_g, M] bf16, rows contiguous; M a multiple of 64.
        b: [sum of K_g, N] bf16, rows contiguous; N a multiple of 64.
        d: [G, M, N] float32 or bf16, overwritten. float32 when there is a c.
        ks: K_g on the host: rows of each group, multiples of 64. None: only the device knows them.
        grouped_layout: [G] int32 on the device, the same numbers. With `use_psum_layout`: one past the last row of each
            group; groups start at multiples of `get_mk_alignment_for_contiguous_layout()` and the rows between two
            groups are zero in a and b.
        c: [G, M, N] float32: what is added to. d itself, or memory apart from it.
        compiled_dims: Ignored; nothing is compiled.
        use_psum_layout: What `grouped_layout` holds.
        ks_cpu, ks_tensor: Other names of `ks` and `grouped_layout`.

    Raises:
        ShapeError: A tensor of the wrong shape, dtype or device, ks that do not fit, or the layout of an earlier call
            was wrong (E42).
        UnsupportedConfig: Sizes, strides or alignment that the kernels do not take, or c with a bf16 d (E41).
        BackendUnavailable: There is no kernel for this GPU.
    """
    import torch

    ks = operands.one_of("ks", ks, "ks_cpu", ks_cpu)
    layout = operands.one_of("grouped_layout", grouped_layout, "ks_tensor", ks_tensor)
    operands.tensor("a", a, "[sum of K_g, M]", 2, torch.bfloat16)
    operands.tensor("b", b, "[sum of K_g, N]", 2, torch.bfloat16)
    operands.tensor("d", d, "[G, M, N]", 3, torch.float32, torch.bfloat16)
    (rows, m), (rows_of_b, n), num_groups = a.shape, b.shape, d.shape[0]
    if rows_of_b != rows:
        operands.wrong_shape("b", f"of {rows_of_b} rows", f"a's {rows}", "a and b have the same rows.")
    if d.shape != (num_groups, m, n):
        operands.wrong_shape("d", list(d.shape), f"[G, M, N] = [{num_groups}, {m}, {n}]", "Allocate it for a and b.")
    operands.groups(num_groups)
    operands.width("M", m)
    operands.width("N", n)
    layout = operands.index_list("grouped_layout", layout, "[G]", num_groups)
    _check_ks(ks, rows, num_groups)
    device = operands.one_device(a, b=b, d=d, grouped_layout=layout)
    _check_c(c, d)
    grads = operands.matrices("d", d)
    if rows == 0:
        if c is None:
            d.zero_()
        elif c.data_ptr() != d.data_ptr():
            d.copy_(c)
        return
    a_rows, b_rows = operands.matrices("a", a), operands.matrices("b", b)
    with launch.on(device):
        at = launch.place_of(device)
        if c is not None and c.data_ptr() != d.data_ptr():
            d.copy_(c)
        align = options.get_mk_alignment_for_contiguous_layout()
        kind = Groups.ENDS if use_psum_layout else Groups.SIZES
        groups = launch.bounds(at, kind, layout, num_groups, rows, align=align, round_to=1)
        fp32 = d.dtype == torch.float32
        launch.reduce_rows(at, groups, a_rows, b_rows, grads, fp32=fp32, add=c is not None)


def _check_ks(ks: Sequence[int] | None, rows: int, num_groups: int) -> None:
    if ks is None or len(ks) == 0:
        return
    if len(ks) != num_groups:
        operands.wrong_shape("ks", f"{len(ks)} numbers", f"one per group, {num_groups}", "Pass the rows of each group.")
    bad = next((k for k in ks if k < 0 or k % options.BLOCK), None)
    if bad is not None:
        remedy = "Pad the group with rows of zeros in a and b."
        operands.wrong_shape("ks", f"{bad} for a group", f"multiples of {options.BLOCK}", remedy)
    if sum(ks) != rows:
        operands.wrong_shape("ks", f"{sum(ks)} rows in all", f"a's {rows}", "Every row of a belongs to a group.")


def _check_c(c: Tensor | None, d: Tensor) -> None:
    import torch

    if c is None:
        return
    if d.dtype != torch.float32:
        operands.unsupported("d", f"{d.dtype} with a c", "torch.float32", "Accumulate in float32, or leave c out.")
    operands.tensor("c", c, "[G, M, N]", 3, torch.float32)
    if c.shape != d.shape:
        operands.wrong_shape("c", list(c.shape), f"d's {list(d.shape)}", "c has d's shape.")
    if c.device != d.device:
        operands.wrong_shape("c", f"on {c.device}", f"d's device {d.device}", "Move it there.")
    if c.data_ptr() == d.data_ptr() and c.stride() != d.stride():
        operands.unsupported("c", f"of strides {c.stride()} at d's address", f"d's {d.stride()}", "Pass d itself as c.")
