# SPDX-License-Identifier: Apache-2.0
"""Rows grouped by expert, and the tile lists of the lab's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

TILE_M, STEP_K = 128, 64
MIN_STEPS = 2  # the second warpgroup may be told to wait for the first one's second step


class Tile(NamedTuple):
    """struct Tile of tile.cuh: m and n are element offsets, k0 the first row of a weight gradient's sum."""

    m: int
    n: int
    expert: int
    k0: int
    k_steps: int
    multicast: int
    reserved0: int = 0
    reserved1: int = 0


@dataclass(frozen=True)
class Pool:
    """Rows grouped by expert; every expert starts at a multiple of 128 rows."""

    counts: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        """First row of every expert."""
        return [0, *accumulate(self._padded())][:-1]

    @property
    def rows(self) -> int:
        """All rows with the padding."""
        return sum(self._padded())

    def spans(self) -> list[slice]:
        """An expert's rows without the padding."""
        return [slice(start, start + count) for start, count in zip(self.starts, self.counts, strict=True)]

    def blocks(self, expert: int) -> list[int]:
        """First rows of an expert's m-blocks."""
        start, padded = self.starts[expert], self._padded()[expert]
        return list(range(start, start + padded, TILE_M))

    def _padded(self) -> list[int]:
        return [-(-count // TILE_M) * TILE_M for count in self.counts]


def m_tiles(pool: Pool, *, n_tiles: int, n_step: int, k: int, cluster: int) -> list[Tile]:
    """Tiles of a product whose rows are grouped, m fastest.

    In pairs, two m-blocks share the weights. An expert's odd last block is paired along n instead, without sharing; if
    the number of n-tiles is odd too, the last one's partner lies beyond the matrix.
    """
    out = []
    for expert in range(len(pool.counts)):
        blocks = pool.blocks(expert)
        shared = blocks if cluster == 1 else blocks[: len(blocks) // 2 * 2]
        for n in range(n_tiles):
            out += [Tile(m, n * n_step, expert, 0, k // STEP_K, 1) for m in shared]
        for m in blocks[len(shared) :]:
            out += [Tile(m, n * n_step, expert, 0, k // STEP_K, 0) for n in range(n_tiles + n_tiles % 2)]
    return out


def w_tiles(pool: Pool, *, m: int, n: int, tile_n: int) -> list[Tile]:
    """Tiles of weight gradients [m, n], one sum over an expert's rows each; m fastest, so that pairs share n."""
    return [
        Tile(m_at, n_at, expert, start, -(-count // STEP_K), 1)
        for expert, (start, count) in enumerate(zip(pool.starts, pool.counts, strict=True))
        for n_at in range(0, n, tile_n)
        for m_at in range(0, m, TILE_M)
    ]


def problems(tiles: Sequence[Tile], *, cluster: int, ctas: int) -> list[str]:
    """What would hang a kernel or give wrong results; empty when the list is fine."""
    found = []
    if len(tiles) < ctas:
        found.append(f"{len(tiles)} tiles for {ctas} CTAs")
    found += [f"{tile}: fewer than {MIN_STEPS} steps" for tile in tiles if tile.k_steps < MIN_STEPS]
    if cluster == 1:
        return found
    if len(tiles) % 2:
        found.append(f"{len(tiles)} tiles for pairs")
    for first, second in zip(tiles[::2], tiles[1::2], strict=False):
        alike = first[2:] == second[2:]
        along_m = first.n == second.n and first.m != second.m
        along_n = first.m == second.m and first.n != second.n
        if not alike or not (along_m if first.multicast else along_n):
            found.append(f"no pair: {first}, {second}")
    return found
