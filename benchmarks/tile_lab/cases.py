# SPDX-License-Identifier: Apache-2.0
"""What the lab's kernels compute: inputs, tensor maps, tiles, expected results, and the plain GEMM beside them.

Matrices by expert e, over its rows: G1 z = x W^T with W [2I, H], h = silu(gate) up of the stored z. G2 y = h W^T with W
[H, I]. D2 dh = dy W with W [H, I], then dz, score x h and the score's gradient from a saved z. W, W32 dW = dz^T x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.cost import Shape
from benchmarks.numerics import BLOCK_BOUND, relative_error, worst_block_error
from benchmarks.tile_lab.driver import BF16, FP32, Box
from benchmarks.tile_lab.tiles import TILE_M, Pool, Tile, m_tiles, w_tiles

SLAB, STEP_K = 64, 64
BOUND = {torch.bfloat16: 3e-3, torch.float32: 1e-4}  # one bf16 rounding gives 1.7e-3; fp32 sums in any order 1e-6


@dataclass
class Case:
    """One problem. Holds its tensors alive."""

    tiles: list[Tile]
    flop: int
    maps: dict[str, Box]
    outputs: dict[str, Tensor]
    compare: Callable[[int], dict[str, tuple[Tensor, Tensor]]]  # of an expert: (got, want)
    peer: Callable[[], Tensor]
    pointers: dict[str, int] = field(default_factory=dict)
    num_n_tiles: int = 0
    kept: tuple[Tensor, ...] = ()

    def poison(self) -> None:
        """Make every output NaN, so that what is not written shows."""
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))

    def check(self, experts: int) -> tuple[dict[str, float], list[str]]:
        """(worst relative error of an expert by output, what is out of bounds)."""
        worst: dict[str, float] = {}
        found = []
        for expert in range(experts):
            for name, (got, want) in self.compare(expert).items():
                error, block = relative_error(got, want), worst_block_error(got, want)
                worst[name] = max(worst.get(name, 0.0), error)
                if not (error < BOUND[got.dtype] and block < BLOCK_BOUND):
                    found.append(f"{name} of expert {expert}: relative error {error:.1e}, {block:.1e} in a block")
        return worst, found


@dataclass(frozen=True)
class Bench:
    """What cases are made of: layer, rows, where, and what the kernel is."""

    shape: Shape
    pool: Pool
    tile_n: int
    cluster: int
    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.generator.device

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """Random bf16."""
        return self.empty(*sizes).normal_(0.0, scale, generator=self.generator)

    def grouped(self, cols: int) -> Tensor:
        """[pool rows, cols], zero in the padding."""
        return self.normal(self.pool.rows, cols) * self.mask()[:, None]

    def mask(self) -> Tensor:
        """[pool rows] bool: no padding."""
        mask = torch.zeros(self.pool.rows, dtype=torch.bool, device=self.device)
        for span in self.pool.spans():
            mask[span] = True
        return mask

    def empty(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)

    def m_tiles(self, n: int, n_step: int, k: int) -> list[Tile]:
        """Tiles of a product with grouped rows and n columns, n_step of them a tile."""
        return m_tiles(self.pool, n_tiles=-(-n // n_step), n_step=n_step, k=k, cluster=self.cluster)

    def grouped_mm(self, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
        """torch._grouped_mm over the rows without padding."""
        counts = torch.tensor(self.pool.counts, device=self.device)
        offsets = counts.cumsum(0).to(torch.int32)
        return lambda: torch._grouped_mm(a, b, offs=offsets)

    @property
    def rows(self) -> int:
        """Rows that count as work."""
        return sum(self.pool.counts)


def rows_box(t: Tensor, rows: int) -> Box:
    """[rows, cols]: `rows` rows of 64 columns."""
    return Box(t.data_ptr(), BF16, (t.shape[1], t.shape[0]), (t.shape[1] * 2,), (SLAB, rows))


def mn_major_box(t: Tensor, blocks: int) -> Box:
    """[..., k, mn], contiguous along mn: 64 k of `blocks` blocks of 64 mn."""
    k, mn = t.shape[-2:]
    sizes = (SLAB, k, mn // SLAB, t.numel() // (k * mn))
    return Box(t.data_ptr(), BF16, sizes, (mn * 2, SLAB * 2, k * mn * 2), (SLAB, STEP_K, blocks, 1))


def store_box(t: Tensor) -> Box:
    """[batch, rows, cols]: 64 rows of 128 bytes."""
    batch, rows, cols = t.shape
    size = t.element_size()
    strides = (cols * size, rows * cols * size)
    return Box(t.data_ptr(), BF16 if size == 2 else FP32, (cols, rows, batch), strides, (128 // size, SLAB, 1))


def halves_box(t: Tensor) -> Box:
    """[rows, gate columns then up columns]: 64 rows of 64 columns of one half."""
    rows, cols = t.shape
    return Box(t.data_ptr(), BF16, (cols // 2, 2, rows), (cols, cols * 2), (SLAB, 1, SLAB))


def weight_box(w: Tensor, parts: int, box_rows: int) -> Box:
    """[E, n, k], k contiguous, n in `parts` equal parts."""
    experts, n, k = w.shape
    strides = (k * 2, n // parts * k * 2, n * k * 2)
    return Box(w.data_ptr(), BF16, (k, n // parts, parts, experts), strides, (STEP_K, box_rows, 1, 1))


def gate_up(bench: Bench) -> Case:
    """G1: a tile holds half of its columns of gate and the same of up."""
    hidden, inter, spans = bench.shape.hidden, bench.shape.intermediate, bench.pool.spans()
    x = bench.grouped(hidden)
    w = bench.normal(bench.shape.num_experts, 2 * inter, hidden, scale=hidden**-0.5)
    z, h = bench.empty(bench.pool.rows, 2 * inter), bench.empty(bench.pool.rows, inter)
    half = bench.tile_n // 2

    def compare(e: int) -> dict[str, tuple[Tensor, Tensor]]:
        want = x[spans[e]].float() @ w[e].float().T
        gate, up = want.bfloat16().float().chunk(2, 1)
        return {"z": (z[spans[e]], want), "h": (h[spans[e]], torch.nn.functional.silu(gate) * up)}

    return Case(
        tiles=bench.m_tiles(inter, half, hidden),
        flop=4 * bench.rows * hidden * inter,
        maps={"a": rows_box(x, TILE_M), "b": weight_box(w, 2, half), "z": halves_box(z), "o0": rows_box(h, SLAB)},
        outputs={"z": z, "h": h},
        compare=compare,
        peer=bench.grouped_mm(x[bench.mask()], w.transpose(-2, -1)),
    )


def down(bench: Bench) -> Case:
    """G2."""
    hidden, inter, spans = bench.shape.hidden, bench.shape.intermediate, bench.pool.spans()
    x = bench.grouped(inter)
    w = bench.normal(bench.shape.num_experts, hidden, inter, scale=inter**-0.5)
    y = bench.empty(bench.pool.rows, hidden)
    return Case(
        tiles=bench.m_tiles(hidden, bench.tile_n, inter),
        flop=2 * bench.rows * hidden * inter,
        maps={"a": rows_box(x, TILE_M), "b": weight_box(w, 1, bench.tile_n // 2), "o0": store_box(y[None])},
        outputs={"y": y},
        compare=lambda e: {"y": (y[spans[e]], x[spans[e]].float() @ w[e].float().T)},
        peer=bench.grouped_mm(x[bench.mask()], w.transpose(-2, -1)),
    )


def down_grad(bench: Bench) -> Case:
    """D2. ds comes by n-tile and is summed here."""
    hidden, inter, spans = bench.shape.hidden, bench.shape.intermediate, bench.pool.spans()
    dy, z = bench.grouped(hidden), bench.grouped(2 * inter)
    w = bench.normal(bench.shape.num_experts, hidden, inter, scale=hidden**-0.5)
    score = bench.mask() * torch.rand(bench.pool.rows, generator=bench.generator, device=bench.device)
    n_tiles = -(-inter // bench.tile_n)
    dz, sh = bench.empty(bench.pool.rows, 2 * inter), bench.empty(bench.pool.rows, inter)
    ds = bench.empty(bench.pool.rows, n_tiles, dtype=torch.float32)

    def compare(e: int) -> dict[str, tuple[Tensor, Tensor]]:
        dh = dy[spans[e]].float() @ w[e].float()
        g, u = z[spans[e]].float().chunk(2, 1)
        s, a = score[spans[e], None], torch.sigmoid(g)
        h = (g * a * u).bfloat16().float()
        grads = torch.cat([s * dh * u * a * (1 + g * (1 - a)), s * dh * g * a], 1)
        sums = (ds[spans[e]].sum(1, keepdim=True), (dh * h).sum(1, keepdim=True))
        return {"dz": (dz[spans[e]], grads), "sh": (sh[spans[e]], s * h), "ds": sums}

    return Case(
        tiles=bench.m_tiles(inter, bench.tile_n, hidden),
        flop=2 * bench.rows * hidden * inter,
        maps={
            "a": rows_box(dy, TILE_M),
            "b": mn_major_box(w, bench.tile_n // 2 // SLAB),
            "z": halves_box(z),
            "o0": rows_box(sh, SLAB),
            "o1": halves_box(dz),
        },
        outputs={"dz": dz, "sh": sh, "ds": ds},
        compare=compare,
        peer=bench.grouped_mm(dy[bench.mask()], w),
        pointers={"score": score.data_ptr(), "ds": ds.data_ptr()},
        num_n_tiles=n_tiles,
        kept=(score,),
    )


def weight_grad(bench: Bench, dtype: torch.dtype = torch.bfloat16) -> Case:
    """W and W32. Rows of padding are zero in both operands, so that a sum may run over them."""
    hidden, inter, spans = bench.shape.hidden, bench.shape.intermediate, bench.pool.spans()
    dz, x = bench.grouped(2 * inter), bench.grouped(hidden)
    dw = bench.empty(bench.shape.num_experts, 2 * inter, hidden, dtype=dtype)
    mask = bench.mask()
    return Case(
        tiles=w_tiles(bench.pool, m=2 * inter, n=hidden, tile_n=bench.tile_n),
        flop=4 * bench.rows * hidden * inter,
        maps={
            "a": mn_major_box(dz, TILE_M // SLAB),
            "b": mn_major_box(x, bench.tile_n // 2 // SLAB),
            "o0": store_box(dw),
        },
        outputs={"dw": dw},
        compare=lambda e: {"dw": (dw[e], dz[spans[e]].float().T @ x[spans[e]].float())},
        peer=bench.grouped_mm(dz[mask].t(), x[mask]),
    )


KINDS: dict[str, Callable[[Bench], Case]] = {
    "g1": gate_up,
    "g2": down,
    "d2": down_grad,
    "w": weight_grad,
    "w32": lambda bench: weight_grad(bench, torch.float32),
}


def draw_counts(rows: int, experts: int) -> tuple[int, ...]:
    """Rows of every expert under uniform routing; always the same."""
    ids = torch.randint(0, experts, (rows,), generator=torch.Generator().manual_seed(0))
    return tuple(torch.bincount(ids, minlength=experts).tolist())
