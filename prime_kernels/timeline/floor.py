# SPDX-License-Identifier: Apache-2.0
"""What a call cannot be faster than: arithmetic on padded rows, and bytes that have to move.

Both floors are of one H200: 700 TFLOP/s of dense BF16 products and 4.0 TB/s of memory, which is what the best of plain
kernels reach there (docs/design.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prime_kernels.moe.config import MegaMoEConfig

PEAK_FLOPS = 700e12  # a second
PEAK_BYTES = 4.0e12  # a second
PAD_ROWS = 64  # what an expert's rows are rounded up to
# Products of one row with I x H weights.
_PRODUCTS = {"gate_up": 2, "down": 1, "down_grad": 1, "gate_up_grad": 2, "wgrad": 3}
GEMMS = tuple(_PRODUCTS)


def padded_rows(counts: Iterable[int]) -> int:
    """Rows that are multiplied: those of every expert, rounded up to 64."""
    return sum(-(-count // PAD_ROWS) * PAD_ROWS for count in counts)


def padded_flops(op: str, config: MegaMoEConfig, counts: Iterable[int]) -> float:
    """FLOP of one launch; 0 for a launch that multiplies nothing.

    Args:
        op: "gate_up", "down", "down_grad", "gate_up_grad", "wgrad" or another launch.
        config: The layer.
        counts: Rows of every expert.
    """
    return 2.0 * _PRODUCTS.get(op, 0) * padded_rows(counts) * config.hidden * config.intermediate


def moved_bytes(direction: str, config: MegaMoEConfig, tokens: int, rows: int) -> float:
    """Bytes that one pass reads and writes at least, each intermediate once per use, weights once, BF16 gradients.

    Args:
        direction: "forward" or "backward".
        config: The layer.
        tokens: T.
        rows: Routed rows, without padding.
    """
    h, i = config.hidden, config.intermediate
    weights = 3.0 * config.num_experts * h * i
    if direction == "forward":
        return rows * (8.0 * h + 8.0 * i) + 2 * weights + 4.0 * tokens * h
    return rows * (12.0 * h + 20.0 * i) + 2 * weights + 2 * weights + 4.0 * tokens * h


@dataclass(frozen=True)
class Floor:
    """Lower bounds of one pass in ms: of its arithmetic and of its bytes."""

    arithmetic_ms: float
    memory_ms: float

    @property
    def ms(self) -> float:
        """The larger one."""
        return max(self.arithmetic_ms, self.memory_ms)


def floor_of(direction: str, config: MegaMoEConfig, tokens: int, counts: Sequence[int], ops: Iterable[str]) -> Floor:
    """The floor of one pass.

    Args:
        direction: "forward" or "backward".
        config: The layer.
        tokens: T.
        counts: Rows of every expert.
        ops: The launches of the pass.
    """
    flops = sum(padded_flops(op, config, counts) for op in ops)
    return Floor(flops / PEAK_FLOPS * 1e3, moved_bytes(direction, config, tokens, sum(counts)) / PEAK_BYTES * 1e3)
