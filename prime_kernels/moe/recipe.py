# SPDX-License-Identifier: Apache-2.0
"""The operands each precision multiplies: one small object per call that the reference asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prime_kernels.moe import quantize as q

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import Weights

# Tensors of a prepared set, in this order; mxfp8 adds the same weights coded along their other axis, for dgrad.
PREPARED_NAMES = ("w_gate_up", "w_gate_up_sf", "w_down", "w_down_sf")
_E8M0 = torch.float8_e8m0fnu


class Operands:
    """Weights and rows as the GEMMs of one call see them, in the accumulation dtype.

    Args:
        precision: The config's recipe.
        w_gate_up: Packed [E_l, 2I, H] or the pair of [E_l, I, H].
        w_down: [E_l, H, I].
        prepared: Result of `prepare_tensors`, used instead of quantising here; same values, bit for bit.
    """

    def __init__(
        self, precision: str, w_gate_up: Weights, w_down: Tensor, prepared: tuple[Tensor, ...] | None = None
    ) -> None:
        self.acc_dtype = torch.promote_types(w_down.dtype, torch.float32)
        self._precision = precision
        self._w_gate_up = w_gate_up
        self._w_down = w_down
        self._prepared = prepared
        self._forward_quantized = precision in ("fp8", "mxfp8")
        self._backward_quantized = precision != "bf16"

    def rows(self, values: Tensor) -> Tensor:
        """Row operand of a forward GEMM."""
        return self._rows(values, self._forward_quantized)

    def rows_backward(self, values: Tensor) -> Tensor:
        """Row operand of a dgrad GEMM."""
        return self._rows(values, self._backward_quantized)

    def tokens(self, values: Tensor) -> Tensor:
        """Operand of a wgrad GEMM: all rows of one expert, reduced over the rows."""
        if not self._backward_quantized:
            return values.to(self.acc_dtype)
        return q.fake_quantize(values, q.token_block(self._precision))

    def gate_up(self, expert: int, *, dgrad: bool = False) -> Tensor:
        """[2I, H] of one local expert."""
        return self._weight(0, expert, dgrad)

    def down(self, expert: int, *, dgrad: bool = False) -> Tensor:
        """[H, I] of one local expert."""
        return self._weight(1, expert, dgrad)

    def _rows(self, values: Tensor, quantized: bool) -> Tensor:
        if not quantized:
            return values.to(self.acc_dtype)
        return q.fake_quantize(values, q.row_block(self._precision))

    def _weight(self, which: int, expert: int, dgrad: bool) -> Tensor:
        quantized = self._backward_quantized if dgrad else self._forward_quantized
        block = _dgrad_block(self._precision) if dgrad else q.weight_block(self._precision)
        if quantized and self._prepared is not None:
            first = 2 * which + (4 if dgrad and self._precision == "mxfp8" else 0)
            codes, sf = (tensor[expert] for tensor in self._prepared[first : first + 2])
            codes = codes.view(torch.float8_e4m3fn)
            return q.dequantize(q.Quantized(codes, sf if sf.is_floating_point() else sf.view(_E8M0)), block)
        weight = self._w_down[expert] if which else _packed(self._w_gate_up, expert)
        return q.fake_quantize(weight, block) if quantized else weight.to(self.acc_dtype)


def prepare_tensors(precision: str, w_gate_up: Weights, w_down: Tensor) -> tuple[Tensor, ...]:
    """Codes and scales of all local experts, in the order of `PREPARED_NAMES`.

    Codes are bytes of e4m3fn, scales fp32, or bytes of e8m0 for mxfp8: as uint8, because torch can neither compare,
    copy nor multiply the 8-bit float dtypes everywhere.
    """
    packed = torch.cat(w_gate_up, dim=1) if isinstance(w_gate_up, tuple) else w_gate_up
    sf_dtype = _E8M0 if precision == "mxfp8" else torch.float32
    blocks = [q.weight_block(precision)]
    if precision == "mxfp8":
        blocks.append(_dgrad_block(precision))
    return tuple(
        tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8)
        for block in blocks
        for weight in (packed, w_down)
        for tensor in q.quantize(weight, block, sf_dtype=sf_dtype)
    )


def _dgrad_block(precision: str) -> q.Block:
    """dgrad reduces the weights' first axis; square blocks are the same either way."""
    block = q.weight_block(precision)
    return q.Block(block.cols, block.rows)


def _packed(w_gate_up: Weights, expert: int) -> Tensor:
    if isinstance(w_gate_up, tuple):
        return torch.cat([w_gate_up[0][expert], w_gate_up[1][expert]])
    return w_gate_up[expert]
