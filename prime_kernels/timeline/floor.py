# SPDX-License-Identifier: Apache-2.0
"""What a call cannot be faster than: arithmetic on padded rows, and bytes that have to move.

Both floors are of one H200: 700 TFLOP/s of dense BF16 products and 4.0 TB/s of memory, which is what the best of plain
kernels reach there (docs/design.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from prime_kernels.moe.config import MegaMoEConfig

PEAK_FLOPS = 700e12  # a second
PEAK_BYTES = 4.0e12  # a second
PAD_ROWS = 64  # what an expert's rows are rounded up to
# Products of one row with I x H weights; "forward" is both GEMMs of a forward among peers in one launch.
_PRODUCTS = {"gate_up": 2, "down": 1, "down_grad": 1, "gate_up_grad": 2, "wgrad": 3, "forward": 3}
_AMONG_PEERS = "_peers"


def is_gemm(op: str) -> bool:
    """Whether a launch multiplies, and so has a recording build."""
    return op.removesuffix(_AMONG_PEERS) in _PRODUCTS


def padded_rows(counts: Iterable[int]) -> int:
    """Rows that are multiplied: those of every expert, rounded up to 64."""
    return sum(-(-count // PAD_ROWS) * PAD_ROWS for count in counts)


def padded_flops(op: str, config: MegaMoEConfig, counts: Iterable[int]) -> float:
    """FLOP of one launch; 0 for a launch that multiplies nothing.

    Args:
        op: "gate_up", "down", "down_grad", "gate_up_grad", "wgrad", the same with "_peers", or another launch.
        config: The layer.
        counts: Rows of every expert.
    """
    return (
        2.0
        * _PRODUCTS.get(op.removesuffix(_AMONG_PEERS), 0)
        * padded_rows(counts)
        * config.hidden
        * config.intermediate
    )


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
    """Lower bounds of one pass in ms: of its arithmetic, of its bytes, and of what paced ranks send one another."""

    arithmetic_ms: float
    memory_ms: float
    transport_ms: float = 0.0

    @property
    def ms(self) -> float:
        """The largest one."""
        return max(self.arithmetic_ms, self.memory_ms, self.transport_ms)

    @property
    def bound(self) -> str:
        """ "arithmetic", "memory" or "transport": which one that is."""
        values = {"arithmetic": self.arithmetic_ms, "memory": self.memory_ms, "transport": self.transport_ms}
        return max(values, key=lambda name: values[name])


def link_bytes(owners: Tensor, holders: Tensor, ranks: int, row_bytes: int, pulls: int) -> int:
    """Bytes through the busier end of the busiest rank's link in one pass.

    Args:
        owners: [T] rank that has the token.
        holders: [T, K] rank of the expert of every slot, -1 without one.
        ranks: R.
        row_bytes: Of one row.
        pulls: Rows that a rank reads of a token that has an expert there: 1 in a forward; 2 in a backward, dy and x.
    """
    moved = torch.zeros(ranks, ranks, dtype=torch.int64)  # [from, to]
    for owner in range(ranks):
        mine = holders[owners == owner]
        for rank in range(ranks):
            if rank != owner:
                moved[owner, rank] += pulls * int((mine == rank).any(1).sum())
                moved[rank, owner] += int((mine == rank).sum())
    return int(max(moved.sum(0).max(), moved.sum(1).max())) * row_bytes


def floor_of(direction: str, config: MegaMoEConfig, tokens: int, counts: Sequence[int], ops: Iterable[str]) -> Floor:
    """The floor of one pass.

    Args:
        direction: "forward" or "backward".
        config: The layer.
        tokens: T, of all ranks.
        counts: Rows of every expert.
        ops: The launches of the pass, of one rank.
    """
    flops = sum(padded_flops(op, config, counts) for op in ops)
    return Floor(flops / PEAK_FLOPS * 1e3, moved_bytes(direction, config, tokens, sum(counts)) / PEAK_BYTES * 1e3)
