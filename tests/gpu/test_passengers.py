# SPDX-License-Identifier: Apache-2.0
"""The two small kernels, gather_rows and topk_sum, against plain torch: equal to the bit, on poisoned outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prime_kernels.loader import load_kernel

pytestmark = pytest.mark.gpu

GATHER = "gather_rows|b16|t256|l4"
TOPK_SUM = "topk_sum|bf16|t256"
GUARD_ROWS = 3


def blocks() -> int:
    return 4 * torch.cuda.get_device_properties(0).multi_processor_count


def poisoned(rows: int, columns: int) -> Tensor:
    """NaN everywhere, with guard rows at the end that a kernel must leave alone."""
    return torch.full((rows + GUARD_ROWS, columns), float("nan"), dtype=torch.bfloat16, device="cuda")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


def gather(x: Tensor, row_src: Tensor, *, grid: int | None = None) -> Tensor:
    rows, columns = row_src.numel(), x.shape[1]
    pool = poisoned(rows, columns)
    args = {"x": x.data_ptr(), "row_src": row_src.data_ptr(), "pool": pool.data_ptr(), "rows": rows}
    kernel = load_kernel(GATHER, device=0)
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(grid=grid or blocks(), stream=stream, args={**args, "row_bytes": 2 * columns})
    assert pool[rows:].isnan().all(), "rows past the end were written"
    return pool[:rows]


def topk_sum(slots: Tensor, ids: Tensor, weights: Tensor | None, *, grid: int | None = None) -> Tensor:
    tokens, topk, hidden = slots.shape
    y = poisoned(tokens, hidden)
    args = {"slots": slots.data_ptr(), "ids": ids.data_ptr(), "y": y.data_ptr(), "tokens": tokens, "topk": topk}
    args |= {"weights": 0 if weights is None else weights.data_ptr(), "hidden": hidden, "reserved": 0}
    kernel = load_kernel(TOPK_SUM, device=0)
    kernel.launch(grid=grid or blocks(), stream=torch.cuda.current_stream().cuda_stream, args=args)
    assert y[tokens:].isnan().all(), "rows past the end were written"
    return y[:tokens]


def plain_topk_sum(slots: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    total = torch.zeros(slots.shape[0], slots.shape[2], dtype=torch.float32, device=slots.device)
    for k in range(slots.shape[1]):
        term = slots[:, k].float() if weights is None else weights[:, k, None] * slots[:, k].float()
        total = torch.where(ids[:, k, None] == -1, total, total + term)
    return total.to(torch.bfloat16)


@pytest.mark.parametrize("columns", [8, 64, 768, 2048, 2880, 7168])
@pytest.mark.parametrize("rows", [1, 7, 129, 4096])
def test_rows_are_gathered_and_padding_is_zero(rows: int, columns: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows * 10000 + columns)
    x = torch.randn(257, columns, dtype=torch.bfloat16, device="cuda", generator=generator)
    row_src = torch.randint(-1, 257, (rows,), dtype=torch.int32, device="cuda", generator=generator)
    row_src[0], row_src[-1] = 256, -1
    if rows == 1:
        row_src[0] = 0
    want = torch.where(row_src[:, None] < 0, torch.zeros_like(x[:1]), x[row_src.clamp(min=0).long()])
    assert torch.equal(bits(gather(x, row_src)), bits(want))


def test_non_finite_rows_are_copied_as_they_are() -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0] * 4], dtype=torch.bfloat16, device="cuda")
    row_src = torch.zeros(5, dtype=torch.int32, device="cuda")
    assert torch.equal(bits(gather(x, row_src)), bits(x.expand(5, -1)))


@pytest.mark.parametrize("grid", [1, 3, 1000])
def test_any_grid_gathers_every_row_once(grid: int) -> None:
    x = torch.randn(33, 264, device="cuda").to(torch.bfloat16)
    row_src = torch.arange(500, dtype=torch.int32, device="cuda") % 34 - 1
    assert torch.equal(bits(gather(x, row_src, grid=grid)), bits(gather(x, row_src)))


@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted sum"])
@pytest.mark.parametrize(("tokens", "topk", "hidden"), [(1, 1, 8), (5, 8, 2880), (128, 4, 768), (1031, 8, 2048)])
def test_slots_are_summed_in_order_to_the_bit(tokens: int, topk: int, hidden: int, weighted: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    slots = torch.randn(tokens, topk, hidden, dtype=torch.bfloat16, device="cuda", generator=generator)
    ids = torch.randint(-1, 16, (tokens, topk), dtype=torch.int32, device="cuda", generator=generator)
    weights = torch.rand(tokens, topk, device="cuda", generator=generator) if weighted else None
    want = plain_topk_sum(slots, ids, weights)
    first = topk_sum(slots, ids, weights)
    assert torch.equal(bits(first), bits(want))
    assert want.float().abs().sum() > 0
    assert torch.equal(bits(topk_sum(slots, ids, weights, grid=1)), bits(first))


def test_slots_without_an_expert_are_never_read_and_such_tokens_give_zeros() -> None:
    slots = torch.full((3, 4, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    ids = torch.full((3, 4), -1, dtype=torch.int32, device="cuda")
    slots[1, 2], ids[1, 2] = 2.0, 9
    weights = torch.full((3, 4), float("nan"), device="cuda")
    weights[1, 2] = 0.5
    y = topk_sum(slots, ids, weights)
    assert torch.equal(bits(y[0]), torch.zeros(64, dtype=torch.int16, device="cuda"))
    assert (y[1] == 1.0).all()
    assert torch.equal(bits(y[2]), torch.zeros(64, dtype=torch.int16, device="cuda"))


def test_the_order_of_the_slots_decides_the_bits() -> None:
    # 2**24 + 1 is 2**24 in fp32: ascending order loses each 1, descending order would give 2.
    values = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)], device="cuda").to(torch.bfloat16)
    ids = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    slots = values.view(1, 4, 1).repeat(1, 1, 8)
    assert (topk_sum(slots, ids, None) == 0).all()
    assert (topk_sum(slots.flip(1), ids, None) == 2).all()


def test_both_kernels_follow_the_current_stream() -> None:
    side = torch.cuda.Stream()
    x = torch.randn(64, 2048, device="cuda").to(torch.bfloat16)
    row_src = torch.arange(63, -1, -1, dtype=torch.int32, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        x.mul_(2)
        pool = gather(x, row_src)
    side.synchronize()
    assert torch.equal(bits(pool), bits(x.flip(0)))
