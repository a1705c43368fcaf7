# SPDX-License-Identifier: Apache-2.0
"""FP8 (e4m3) codes with power-of-two block scales, and where each recipe uses them.

| precision | forward operands | backward operands |
|---|---|---|
| fp8 | x, h: 1x128 along the reduced axis; weights 128x128 | dy, dz: 1x128; the same codes; wgrad: 128 tokens x 1 |
| fp8_bwd | bf16 | as fp8, with wgrad's x quantised from bf16 |
| mxfp8 | 1x32 along the reduced axis, weights too | 1x32 along each GEMM's own reduced axis |

A scale is the least power of two that keeps the block's largest magnitude within e4m3's 448, so quantising a tensor
twice (rows, then columns) only loses what underflows. A block of zeros has scale 1. A non-finite value makes its own
element NaN and leaves the scale to the finite ones of its block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

E4M3_MAX = 448.0
_MIN_EXPONENT, _MAX_EXPONENT = -126, 127  # normal fp32 numbers; e8m0 has them all


class Block(NamedTuple):
    """Elements that share a scale, along the last two axes."""

    rows: int
    cols: int


class Quantized(NamedTuple):
    """codes: [..., N, K] float8_e4m3fn; sf: [..., ceil(N/rows), ceil(K/cols)] power-of-two scales."""

    codes: Tensor
    sf: Tensor


def weight_block(precision: str) -> Block:
    """Scale block of [N, K] weights whose K axis is reduced."""
    return Block(1, 32) if precision == "mxfp8" else Block(128, 128)


def row_block(precision: str) -> Block:
    """Scale block of row operands, reduced along their columns."""
    return Block(1, 32 if precision == "mxfp8" else 128)


def token_block(precision: str) -> Block:
    """Scale block of wgrad operands, reduced along the tokens of one expert; groups start at its first row."""
    return Block(32 if precision == "mxfp8" else 128, 1)


def quantize(values: Tensor, block: Block, *, sf_dtype: torch.dtype = torch.float32) -> Quantized:
    """Round to e4m3 with one scale per block of the last two axes; ragged edges are blocks of their own."""
    tiles = _tiles(values.float(), block)
    finite = torch.where(tiles.isfinite(), tiles, 0)
    scale = _scale(finite.abs().amax(dim=(-3, -1)))
    scaled = (finite / scale[..., :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = torch.where(tiles.isfinite(), scaled, torch.nan)
    codes = _untile(scaled, values.shape).to(torch.float8_e4m3fn)
    return Quantized(codes, scale.to(sf_dtype))


def dequantize(quantized: Quantized, block: Block) -> Tensor:
    """fp32 values of the codes."""
    codes, sf = quantized
    scaled = _tiles(codes.float(), block) * sf.float()[..., :, None, :, None]
    return _untile(scaled, codes.shape)


def fake_quantize(values: Tensor, block: Block) -> Tensor:
    """The fp32 values that a GEMM over these codes multiplies."""
    return dequantize(quantize(values, block), block)


def _scale(amax: Tensor) -> Tensor:
    """Least power of two s with amax / s <= 448, exact; 1 where amax is 0."""
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    # amax / 448 rounds; a quotient that rounded down to a power of two is one step short.
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    short = torch.ldexp(torch.full_like(amax, E4M3_MAX), exponent) < amax
    exponent = (exponent + short.to(exponent.dtype)).clamp(_MIN_EXPONENT, _MAX_EXPONENT)
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)


def _tiles(values: Tensor, block: Block) -> Tensor:
    """[..., N, K] -> [..., N/rows, rows, K/cols, cols], padded with zeros."""
    rows, cols = values.shape[-2:]
    pad = (-cols % block.cols, -rows % block.rows)
    if any(pad):
        values = torch.nn.functional.pad(values, (0, pad[0], 0, pad[1]))
    rows, cols = values.shape[-2:]
    return values.reshape(*values.shape[:-2], rows // block.rows, block.rows, cols // block.cols, block.cols)


def _untile(tiles: Tensor, shape: torch.Size) -> Tensor:
    outer = tiles.shape[:-4]
    rows, cols = tiles.shape[-4] * tiles.shape[-3], tiles.shape[-2] * tiles.shape[-1]
    return tiles.reshape(*outer, rows, cols)[..., : shape[-2], : shape[-1]]
