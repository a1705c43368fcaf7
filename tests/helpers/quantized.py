# SPDX-License-Identifier: Apache-2.0
"""The layer with quantised GEMM operands, in float64 and sharing no code with the package.

Codes come from a table of all e4m3 values and a search for the nearest, scales from a search over powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.cases import Case, Result


def e4m3_values() -> Tensor:
    """All non-negative finite values of e4m3fn, ascending: 3 mantissa bits, exponent bias 7, no infinity."""
    values = [m / 8 * 2.0**-6 for m in range(8)]
    values += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor(values[:-1], dtype=torch.float64)  # the last code is NaN


def nearest_e4m3(values: Tensor) -> Tensor:
    """Round to the nearest table entry, ties to the even code."""
    table = e4m3_values()
    magnitude = values.abs().clamp(max=float(table[-1])).contiguous()
    above = torch.searchsorted(table, magnitude).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    down, up = magnitude - table[below], table[above] - magnitude
    take_below = (down < up) | ((down == up) & (below % 2 == 0))
    return torch.where(take_below, table[below], table[above]) * values.sign()


def quantized(values: Tensor, rows: int, cols: int) -> Tensor:
    """Values of the codes of a matrix, one power-of-two scale per rows x cols block."""
    n, k = values.shape
    padded = torch.zeros(-(-n // rows) * rows, -(-k // cols) * cols, dtype=torch.float64)
    padded[:n, :k] = values
    blocks = padded.unfold(0, rows, rows).unfold(1, cols, cols)  # [n / rows, k / cols, rows, cols], views
    amax = blocks.abs().flatten(2).amax(2)
    powers = torch.tensor([2.0**e for e in range(-126, 128)], dtype=torch.float64)
    scale = powers[torch.searchsorted(448.0 * powers, amax)]  # the first whose reach is not below amax
    scale = torch.where(amax == 0, 1.0, scale)[:, :, None, None]
    blocks.copy_(nearest_e4m3(blocks / scale) * scale)
    return padded[:n, :k].clone()


def quantized_oracle(case: Case, precision: str) -> Result:
    """y and gradients; every GEMM operand rounded to bf16 where it is stored, then quantised."""
    block = 32 if precision == "mxfp8" else 128
    forward = precision != "fp8_bwd"
    square = precision != "mxfp8"

    def stored(values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).double()

    def rows(values: Tensor, wanted: bool = True) -> Tensor:
        return quantized(values, 1, block) if wanted else values.double()

    def columns(values: Tensor) -> Tensor:
        return quantized(values, block, 1)

    def weight(values: Tensor, *, dgrad: bool) -> Tensor:
        if not dgrad and not forward:
            return values.double()
        if square:
            return quantized(values, 128, 128)
        return quantized(values, block, 1) if dgrad else quantized(values, 1, block)

    tokens, topk = case.topk_ids.shape
    y = torch.zeros(tokens, case.x.shape[1], dtype=torch.float64)
    dx, dscore = torch.zeros_like(y), torch.zeros(tokens, topk, dtype=torch.float64)
    grads = [torch.zeros_like(w, dtype=torch.float64) for w in (case.w_gate, case.w_up, case.w_down)]
    for expert in range(case.w_down.shape[0]):
        token, slot = (case.topk_ids == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        score = case.topk_weights[token, slot].double()[:, None]
        x, dy = rows(case.x[token], forward), rows(case.dy[token])
        gate = stored(x @ weight(case.w_gate[expert], dgrad=False).T)
        up = stored(x @ weight(case.w_up[expert], dgrad=False).T)
        sig = torch.sigmoid(gate)
        h = stored(gate * sig * up)
        y.index_add_(0, token, score * (rows(h, forward) @ weight(case.w_down[expert], dgrad=False).T))
        dh = dy @ weight(case.w_down[expert], dgrad=True)
        dscore[token, slot] = (dh * h).sum(1)
        dgate = stored(score * dh * up * sig * (1 + gate * (1 - sig)))
        dup = stored(score * dh * gate * sig)
        for dz, w, grad in ((dgate, case.w_gate, grads[0]), (dup, case.w_up, grads[1])):
            dx.index_add_(0, token, rows(dz) @ weight(w[expert], dgrad=True))
            grad[expert] = columns(dz).T @ columns(x)
        grads[2][expert] = columns(dy).T @ columns(stored(score * h))
    return Result(y, dx, dscore, *grads)
