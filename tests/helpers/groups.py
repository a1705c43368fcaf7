# SPDX-License-Identifier: Apache-2.0
"""Ragged groups of rows in the layouts that the grouped GEMMs take, and their products in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Around every boundary of the kernels: half a block, a block, a pair of blocks, a unit; and groups without rows.
SIZES = (0, 1, 3, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 0, 500, 1100)


def align_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


@dataclass(frozen=True)
class Layout:
    """Groups of rows with padding between them.

    Attributes:
        sizes, starts: Rows and first row of each group.
        rows: Of the operands.
        align: Rows that groups start at multiples of.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    rows: int
    align: int

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Groups that have rows, with their rows."""
        for group, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if size:
                yield group, slice(start, start + size)

    def indices(self) -> Tensor:
        """[rows] int32: group of each row, -1 for padding."""
        out = torch.full((self.rows,), -1, dtype=torch.int32)
        for group, span in self.spans():
            out[span] = group
        return out

    def ends(self) -> Tensor:
        """[groups] int32: one past each group's last row."""
        return torch.tensor([s + n for s, n in zip(self.starts, self.sizes, strict=True)], dtype=torch.int32)

    def taken(self) -> Tensor:
        """[rows] bool: rows of a group."""
        return self.indices() >= 0

    def reach(self, to: int) -> Tensor:
        """[rows] bool: rows of a group and padding behind it up to the next multiple of `to`."""
        out = torch.zeros(self.rows, dtype=torch.bool)
        for _, span in self.spans():
            out[span.start : align_up(span.stop, to)] = True
        return out


def make_layout(
    sizes: Sequence[int], *, align: int, seed: int | None = None, tail: int = 0, cut: bool = False
) -> Layout:
    """Groups in order, or in one given by `seed`, then `tail` rows of padding; `cut`: none behind the last group."""
    order = list(range(len(sizes)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    starts, at = [0] * len(sizes), 0
    end = 0
    for group in order:
        starts[group] = at
        if sizes[group]:
            end = at + sizes[group]
            at = align_up(end, align)
    return Layout(tuple(sizes), tuple(starts), (end if cut else at) + tail, align)


def product_of_rows(a: Tensor, b: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """a [rows, K] and b [G, N, K] -> (rows of each group times its b transposed, the same of magnitudes), float64."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    size = torch.zeros_like(out)
    for group, span in layout.spans():
        out[span] = a[span].double() @ b[group].double().t()
        size[span] = a[span].double().abs() @ b[group].double().abs().t()
    return out, size


def product_over_rows(a: Tensor, b: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """a [rows, M] and b [rows, N] -> (a transposed times b over each group's rows, of magnitudes), [G, M, N]."""
    out = torch.zeros(len(layout.sizes), a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    size = torch.zeros_like(out)
    for group, span in layout.spans():
        out[group] = a[span].double().t() @ b[span].double()
        size[group] = a[span].double().abs().t() @ b[span].double().abs()
    return out, size


def worst_excess(got: Tensor, want: Tensor, size: Tensor) -> float:
    """Largest error of an element in units of what it may have; at most 1 is right, infinity where got is not finite.

    An element may be off by the rounding of its type, and by 2^-16 of the sum of magnitudes for fp32 sums in any order.
    """
    rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-23
    allowed = rounding * want.abs() + 2.0**-16 * size + 1e-30
    excess = (got.double() - want).abs() / allowed
    if excess.numel() == 0:
        return 0.0
    return float(torch.where(torch.isfinite(got), excess, torch.inf).max())
