# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs over expert-sorted rows, with the library's own kernels: `torch._grouped_mm` or a loop of `torch.mm`.

Rows of expert e lie at `offsets[e - 1] : offsets[e]`. Rows at and after `offsets[-1]` belong to nobody: they are
neither read into a result that counts nor written with one.

`torch._grouped_mm` runs bf16 on CUDA; everything else (other dtypes, the CPU, fp32 weight gradients) is a loop over
experts that reads the counts on the host. The loop is semantics, not speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


class Groups:
    """Row counts of the local experts, on the device and, when somebody asks, on the host.

    Args:
        counts: [E_l] int32. Rows of each local expert.
        num_rows: Rows of the tensors; at least the sum of the counts.
        host: The same counts, when the host knows them already.
    """

    def __init__(self, counts: Tensor, num_rows: int, host: Sequence[int] | None = None) -> None:
        self.counts = counts
        self.num_rows = num_rows
        self.offsets = counts.cumsum(0, dtype=torch.int32)
        self._host = None if host is None else tuple(host)
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    def prefetch(self) -> None:
        """Start copying the counts to the host, so that `host` waits for this point of the stream only."""
        if self._host is not None or not self.counts.is_cuda:
            return
        pinned = torch.empty(self.counts.shape, dtype=self.counts.dtype, pin_memory=True)
        pinned.copy_(self.counts, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copy = (pinned, event)

    @property
    def host(self) -> tuple[int, ...]:
        """The counts on the host; synchronises when they are not there yet."""
        if self._host is None:
            values = self.counts
            if self._copy is not None:
                values, event = self._copy
                event.synchronize()
            self._host = tuple(values.tolist())
        return self._host

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, with their rows."""
        end = 0
        for expert, count in enumerate(self.host):
            start, end = end, end + count
            if count:
                yield expert, slice(start, end)


class GemmEngine(Protocol):
    """Three products of an expert layer. fp32 accumulation; results are new tensors."""

    name: str

    def nt(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        """[rows, K] x [E_l, N, K] -> [rows, N]: rows of e times weights[e]^T."""
        ...

    def nn(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        """[rows, K] x [E_l, K, N] -> [rows, N]: rows of e times weights[e]."""
        ...

    def tn(self, left: Tensor, right: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        """[rows, M] x [rows, N] -> [E_l, M, N]: left rows of e, transposed, times right rows of e; 0 without rows."""
        ...


class TorchEngine:
    """`torch._grouped_mm` where it applies, else the loop. What trainers use today."""

    name = "torch"

    def nt(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        return self.nn(rows, weights.transpose(1, 2), groups)

    def nn(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        if groups.num_rows == 0:
            return rows.new_empty(0, weights.shape[2])
        if uses_grouped_mm(rows):
            # TMA reads 16-byte aligned addresses; a parameter may be a view into something larger.
            aligned = weights if weights.data_ptr() % 16 == 0 else weights.clone()
            out = torch._grouped_mm(rows, aligned, offs=groups.offsets)
            return out
        out = rows.new_zeros(groups.num_rows, weights.shape[2])
        for expert, span in groups.spans():
            torch.mm(rows[span], weights[expert], out=out[span])
        return out

    def tn(self, left: Tensor, right: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        shape = (groups.counts.numel(), left.shape[1], right.shape[1])
        if groups.num_rows == 0:
            return left.new_zeros(shape, dtype=dtype)
        if uses_grouped_mm(left) and dtype == left.dtype:
            out = torch._grouped_mm(left.t(), right, offs=groups.offsets)
            return zero_empty(out, groups)
        out = left.new_zeros(shape, dtype=dtype)
        for expert, span in groups.spans():
            _mm_into(out[expert], left[span].t(), right[span])
        return out


def uses_grouped_mm(rows: Tensor) -> bool:
    """Whether `torch._grouped_mm` takes these rows on its fast path."""
    return rows.is_cuda and rows.dtype == torch.bfloat16


def zero_empty(out: Tensor, groups: Groups) -> Tensor:
    """Set [E_l, M, N] results of experts without rows to exactly 0, in place.

    A grouped GEMM whose reduced extent is 0 may leave its output as it was allocated, depending on the architecture.
    """
    empty = [expert for expert, count in enumerate(groups.host) if count == 0]
    if empty:
        out.index_fill_(0, torch.tensor(empty, device=out.device), 0)
    return out


def _mm_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, rounded once to out's dtype."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        out.copy_(torch.mm(left, right, out_dtype=torch.float32))
    else:
        out.copy_(left.to(out.dtype) @ right.to(out.dtype))
