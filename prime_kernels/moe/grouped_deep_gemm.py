# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs by the package deep_gemm (distribution sgl-deep-gemm), an optional engine of the grouped backend.

Its binary is bound to one torch: under another one it may load and then fail every call. So it is used only after a
tiny problem, one empty expert included, came out right on this device; otherwise the reason is raised, and no other
engine takes its place.

Its layout wants each expert's rows padded to a multiple of its tile, so every operand is copied into such a layout and
results are copied back. Weight gradients are accumulated in fp32 and rounded once.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from prime_kernels.moe.grouped_gemm import Groups, TorchEngine

if TYPE_CHECKING:
    from torch import Tensor

_CALLS = ("m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nn_contiguous", "k_grouped_bf16_gemm_tn_contiguous")
# The call was renamed between releases; either says what row counts must be multiples of.
_ALIGNMENT_CALLS = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")
_PROBE_TOLERANCE = 1e-2  # bf16 rounds to 4e-3; a wrong layout or group is off by about 1


class DeepGemmEngine:
    """The three grouped products by deep_gemm. Reads the row counts on the host."""

    name = "deep_gemm"

    def __init__(self, module: Any) -> None:
        self._module = module
        self._alignment = int(next(getattr(module, call) for call in _ALIGNMENT_CALLS if hasattr(module, call))())

    def nt(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        return self._by_rows(self._module.m_grouped_bf16_gemm_nt_contiguous, rows, weights, groups, weights.shape[1])

    def nn(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        return self._by_rows(self._module.m_grouped_bf16_gemm_nn_contiguous, rows, weights, groups, weights.shape[2])

    def tn(self, left: Tensor, right: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        shape = (groups.counts.numel(), left.shape[1], right.shape[1])
        out = left.new_zeros(shape, dtype=torch.float32)
        if sum(groups.host):
            padded, places, _ = self._layout(groups, left.device)
            extents = torch.tensor(padded, dtype=torch.int32, device=left.device)
            a, b = (self._pad(side, places, sum(padded)) for side in (left, right))
            self._module.k_grouped_bf16_gemm_tn_contiguous(a, b, out, padded, extents, out)
        return out.to(dtype)

    def _by_rows(self, call: Any, rows: Tensor, weights: Tensor, groups: Groups, width: int) -> Tensor:
        out = rows.new_empty(groups.num_rows, width)
        if sum(groups.host):
            padded, places, experts = self._layout(groups, rows.device)
            result = rows.new_empty(sum(padded), width)
            call(self._pad(rows, places, sum(padded)), weights, result, experts)
            torch.index_select(result, 0, places, out=out[: places.numel()])
        return out

    def _layout(self, groups: Groups, device: torch.device) -> tuple[list[int], Tensor, Tensor]:
        """(padded rows of each expert, padded place of each row [n], expert of each padded row or -1 [p] int32)."""
        counts = torch.tensor(groups.host)
        padded = (counts + self._alignment - 1) // self._alignment * self._alignment
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        places = torch.arange(int(counts.sum())) + torch.repeat_interleave(shift, counts)
        experts = torch.full((int(padded.sum()),), -1, dtype=torch.int32)
        experts[places] = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
        return padded.tolist(), places.to(device), experts.to(device)

    def _pad(self, rows: Tensor, places: Tensor, num_rows: int) -> Tensor:
        # Zeros, not anything: the k-grouped product reads padding rows.
        return rows.new_zeros(num_rows, rows.shape[1]).index_copy_(0, places, rows[: places.numel()])


@cache
def load_deep_gemm(device: torch.device) -> DeepGemmEngine | str:
    """The engine, or the reason why it does not work on this device in this process."""
    if device.type != "cuda":
        return f'engine="deep_gemm" got device {device}; it runs on CUDA only'
    try:
        module = import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError) as error:
        return f"deep_gemm does not import under torch {torch.__version__}: {error}"
    missing = [call for call in _CALLS if not hasattr(module, call)]
    if missing or not any(hasattr(module, call) for call in _ALIGNMENT_CALLS):
        return f"deep_gemm {getattr(module, '__version__', '')} has no {missing[0] if missing else _ALIGNMENT_CALLS[0]}"
    try:
        engine = DeepGemmEngine(module)
        worst = _probe(engine, device)
    except Exception as error:  # whatever its extension throws is the answer to the question asked here
        return f"deep_gemm failed a probe call under torch {torch.__version__}: {type(error).__name__}: {error}"
    if not worst < _PROBE_TOLERANCE:
        return f"deep_gemm gave wrong results in a probe call: relative error {worst:.1e}"
    return engine


def _probe(engine: DeepGemmEngine, device: torch.device) -> float:
    """Largest relative error of the three products on a tiny problem whose middle expert has no rows."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    counts = torch.tensor([5, 0, 300], dtype=torch.int32, device=device)
    rows, other, weights = random(305, 256), random(305, 512), random(3, 512, 256)
    groups = Groups(counts, 305)
    loop = TorchEngine()
    exact = Groups(counts, 305)
    pairs = [
        (engine.nt(rows, weights, groups), loop.nt(rows.float(), weights.float(), exact)),
        (engine.nn(other, weights, groups), loop.nn(other.float(), weights.float(), exact)),
        (engine.tn(other, rows, groups, torch.float32), loop.tn(other.float(), rows.float(), exact, torch.float32)),
    ]
    return max(float((got.float() - want).norm() / want.norm()) for got, want in pairs)
