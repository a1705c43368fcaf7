# SPDX-License-Identifier: Apache-2.0
"""Work of one expert layer: floating-point operations and the least bytes, counted on the rows that really arrive."""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of an expert layer: H, I, E, K."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    topk: int


def flops(op: str, shape: Shape, rows: int) -> int:
    """Floating-point operations of `rows` routed rows (received rows, not T * K: skipped slots cost nothing).

    One multiply and one add per element of a GEMM; the activation and the sums are left out.
    """
    gemm = 2 * rows * shape.hidden * shape.intermediate  # one [rows, H] x [H, I]
    forward = 2 * gemm + gemm  # gate and up, then down
    # Each of the three has a product for its input's gradient and one for its weight's.
    backward = 2 * forward
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}[op]


def least_bytes(op: str, shape: Shape, tokens: int, rows: int, local_experts: int, *, save_preact: bool) -> int:
    """Bytes that must cross device memory if every intermediate stayed on the chip and weights were read once."""
    activations = tokens * shape.hidden * BF16_BYTES  # x, y, dx or dy
    weights = local_experts * 3 * shape.intermediate * shape.hidden * BF16_BYTES  # gate, up, down
    preact = rows * 2 * shape.intermediate * BF16_BYTES if save_preact else 0
    scores = tokens * shape.topk * FP32_BYTES
    forward = activations + weights + preact + activations + scores  # read x and weights; write preact and y
    # Read x, dy, weights and preact; write dx, the weights' gradients and the scores' gradients.
    backward = 2 * activations + weights + preact + scores + activations + weights + scores
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}[op]


def tflops(op: str, shape: Shape, rows: int, ms: float) -> float:
    """Achieved rate in TFLOP/s."""
    return flops(op, shape, rows) / (ms * 1e-3) / 1e12
