# SPDX-License-Identifier: Apache-2.0
"""The calls with DeepGEMM's names against float64, element by element: ragged groups, padding, sums, same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_kernels import deep_gemm
from prime_kernels.errors import ShapeError
from tests.gpu.helpers import poison_allocator
from tests.helpers.groups import (
    SIZES,
    Layout,
    align_up,
    make_layout,
    product_of_rows,
    product_over_rows,
    worst_excess,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NT, NN = deep_gemm.m_grouped_bf16_gemm_nt_contiguous, deep_gemm.m_grouped_bf16_gemm_nn_contiguous
TN, MASKED = deep_gemm.k_grouped_bf16_gemm_tn_contiguous, deep_gemm.m_grouped_bf16_gemm_nt_masked
NAN = float("nan")


@pytest.fixture(autouse=True)
def no_fault_is_left_and_options_are_as_they_were() -> Iterator[None]:
    poison_allocator(64)
    yield
    deep_gemm.set_num_sms(0)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    deep_gemm.check()


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype, device="cuda")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def rows_and_weights(layout: Layout, n: int, k: int, *, seed: int, padding: float) -> tuple[Tensor, Tensor]:
    """a [rows, K] with `padding` in rows of no group, and b [G, N, K]."""
    a, b = normal(layout.rows, k, seed=seed), normal(len(layout.sizes), n, k, seed=seed + 1)
    a[~layout.taken().cuda()] = padding
    return a, b


def call_with(kind: str, a: Tensor, b: Tensor, d: Tensor, layout: Tensor, **options: Any) -> None:
    """One product by one of four ways to pass the weights b [G, N, K]."""
    if kind == "nt":
        NT(a, b, d, layout, **options)
    elif kind == "nn":
        NN(a, b.transpose(1, 2).contiguous(), d, layout, **options)
    elif kind == "nt of a transpose":
        NT(a, b.transpose(1, 2).contiguous().transpose(1, 2), d, layout, **options)
    else:
        NN(a, b.transpose(1, 2), d, layout, **options)


KINDS = ("nt", "nn", "nt of a transpose", "nn of a transpose")
SHAPES = ((512, 256), (704, 1408), (64, 64), (192, 320), (2880, 704))  # N, K


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_ragged_groups_in_any_order_agree_with_float64(n: int, k: int, kind: str) -> None:
    for seed, align in ((0, 128), (1, 64)):
        layout = make_layout(SIZES, align=align, seed=seed, tail=seed * 200)
        a, b = rows_and_weights(layout, n, k, seed=seed, padding=NAN)
        d = poisoned(layout.rows, n)
        call_with(kind, a, b, d, layout.indices().cuda())
        taken = layout.taken().cuda()
        want, size = product_of_rows(a, b, layout)
        assert worst_excess(d[taken], want[taken], size[taken]) <= 1
        assert d[~layout.reach(64).cuda()].isnan().all(), "rows of nobody were written"


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 100, 128, 129, 1000])
def test_the_last_group_may_end_with_the_operands(rows: int) -> None:
    layout = make_layout((130, rows), align=128, cut=True)
    a, b = rows_and_weights(layout, 192, 320, seed=rows, padding=0.0)
    whole = poisoned(layout.rows + 3, 192)
    NT(a, b, whole[: layout.rows], layout.indices().cuda())
    want, size = product_of_rows(a, b, layout)
    taken = layout.taken().cuda()
    assert worst_excess(whole[: layout.rows][taken], want[taken], size[taken]) <= 1
    assert whole[layout.rows :].isnan().all(), "rows past the end were written"


def test_padding_behind_a_group_gets_its_product_and_other_padding_is_left_alone() -> None:
    layout = make_layout((1, 130, 0, 64, 70), align=256)
    a, b = normal(layout.rows, 320, seed=3), normal(5, 192, 320, seed=4)
    d = poisoned(layout.rows, 192)
    NT(a, b, d, layout.indices().cuda())
    wide = Layout(tuple(align_up(s, 64) for s in layout.sizes), layout.starts, layout.rows, 256)
    want, size = product_of_rows(a, b, wide)
    reached = layout.reach(64).cuda()
    assert worst_excess(d[reached], want[reached], size[reached]) <= 1
    assert d[~reached].isnan().all()


@pytest.mark.parametrize("align", [128, 192])
@pytest.mark.parametrize("kind", ["nt", "nn"])
def test_groups_given_by_their_ends_agree_and_zero_padding_stays_zero(kind: str, align: int) -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(align)
    layout = make_layout(SIZES, align=align)
    a, b = rows_and_weights(layout, 320, 192, seed=5, padding=0.0)
    taken, want = layout.taken().cuda(), product_of_rows(a, b, layout)
    for fill in (True, False):
        d = poisoned(layout.rows, 320)
        call_with(kind, a, b, d, layout.ends().cuda(), use_psum_layout=True, ensure_zero_padding=fill)
        assert worst_excess(d[taken], want[0][taken], want[1][taken]) <= 1
        reached = layout.reach(align if fill else 64).cuda()
        assert not d[reached & ~taken].any()
        assert d[~reached].isnan().all()


def test_groups_with_places_agree_and_write_no_further_than_they_reach() -> None:
    counts = [0, 1, 63, 64, 65, 192, 100, 0]
    a, b = normal(8, 192, 320, seed=6), normal(8, 704, 320, seed=7)
    d = poisoned(8, 192, 704)
    MASKED(a, b, d, torch.tensor(counts, dtype=torch.int32, device="cuda"), 80)
    layout = Layout(tuple(counts), tuple(192 * g for g in range(8)), 8 * 192, 192)
    want, size = product_of_rows(a.view(-1, 320), b, layout)
    flat, taken = d.view(-1, 704), layout.taken().cuda()
    assert worst_excess(flat[taken], want[taken], size[taken]) <= 1
    assert flat[~layout.reach(64).cuda()].isnan().all()


def grads_of(sizes: tuple[int, ...], m: int, n: int, seed: int) -> tuple[Layout, Tensor, Tensor, Tensor]:
    """Layout, a [rows, M], b [rows, N], and the list of sizes on the device."""
    layout = make_layout(sizes, align=64)
    a, b = normal(layout.rows, m, seed=seed), normal(layout.rows, n, seed=seed + 1)
    return layout, a, b, torch.tensor(sizes, dtype=torch.int32, device="cuda")


GROUP_ROWS = (64, 0, 128, 192, 0, 0, 1088, 256, 64, 0)


@pytest.mark.parametrize(("m", "n"), [(512, 256), (704, 1408), (64, 64), (192, 320), (320, 2880)])
def test_weight_gradients_agree_with_float64_and_groups_without_rows_are_zero(m: int, n: int) -> None:
    layout, a, b, ks = grads_of(GROUP_ROWS, m, n, seed=m)
    want, size = product_over_rows(a, b, layout)
    wide, narrow = poisoned(10, m, n, dtype=torch.float32), poisoned(10, m, n)
    TN(a, b, wide, list(GROUP_ROWS), ks)
    TN(a, b, narrow, list(GROUP_ROWS), ks)
    assert worst_excess(wide, want, size) <= 1
    assert torch.equal(bits(narrow), bits(wide.bfloat16()))
    assert not wide[[1, 4, 5, 9]].any()


def test_adding_gives_the_bits_of_adding_afterwards_and_leaves_empty_groups_alone() -> None:
    layout, a, b, ks = grads_of(GROUP_ROWS, 192, 704, seed=8)
    direct = poisoned(10, 192, 704, dtype=torch.float32)
    TN(a, b, direct, list(GROUP_ROWS), ks)
    start = torch.randn(10, 192, 704, device="cuda") * 30
    start[1], start[4] = NAN, -0.0
    want = start + direct
    want[1], want[4] = start[1], start[4]
    total = start.clone()
    TN(a, b, total, list(GROUP_ROWS), ks, total)
    assert torch.equal(bits(total), bits(want))
    apart = poisoned(10, 192, 704, dtype=torch.float32)
    TN(a, b, apart, list(GROUP_ROWS), ks, start)
    assert torch.equal(bits(apart), bits(want))
    for _ in range(3):
        TN(a, b, total, None, ks, total)
        want = want + direct
    want[1], want[4] = start[1], start[4]
    assert torch.equal(bits(total), bits(want))
    assert layout.rows == sum(GROUP_ROWS)


def test_gradients_of_groups_given_by_their_ends_stop_at_the_next_group() -> None:
    layout = make_layout(SIZES, align=128)
    a, _ = rows_and_weights(layout, 64, 320, seed=9, padding=0.0)
    b, _ = rows_and_weights(layout, 64, 192, seed=10, padding=0.0)
    d = poisoned(len(SIZES), 320, 192, dtype=torch.float32)
    TN(a, b, d, None, layout.ends().cuda(), use_psum_layout=True)
    want, size = product_over_rows(a, b, layout)
    assert worst_excess(d, want, size) <= 1


def test_no_rows_at_all_give_zeros_or_what_was_there() -> None:
    none, ks = torch.empty(0, 64, dtype=torch.bfloat16, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    d = poisoned(3, 64, 64, dtype=torch.float32)
    TN(none, none, d, [0, 0, 0], ks)
    assert not d.any()
    rows, ks = normal(64, 64, seed=1), torch.zeros(3, dtype=torch.int32, device="cuda")
    d = poisoned(3, 64, 64, dtype=torch.float32)
    TN(rows, rows, d, None, ks)
    assert not d.any()
    out = poisoned(128, 64)
    NT(
        normal(128, 64, seed=2),
        normal(3, 64, 64, seed=3),
        out,
        torch.full((128,), -1, dtype=torch.int32, device="cuda"),
    )
    assert out.isnan().all()


def test_bits_do_not_depend_on_run_or_sm_count() -> None:
    layout = make_layout(SIZES, align=128, seed=2)
    a, b = rows_and_weights(layout, 704, 1408, seed=11, padding=0.0)
    ids, taken = layout.indices().cuda(), layout.taken().cuda()
    _, x, y, ks = grads_of(GROUP_ROWS, 704, 320, seed=12)

    def outputs() -> list[Tensor]:
        d, w = poisoned(layout.rows, 704), torch.ones(10, 704, 320, device="cuda")
        NT(a, b, d, ids)
        TN(x, y, w, list(GROUP_ROWS), ks, w)
        return [bits(d[taken]), bits(w)]

    first = outputs()
    for sms in (0, 0, 2, 7, 64):
        deep_gemm.set_num_sms(sms)
        for again, want in zip(outputs(), first, strict=True):
            assert torch.equal(again, want)


def test_four_thousand_groups_are_found() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 3, (4096,), generator=generator).tolist()
    layout = make_layout(sizes, align=64, seed=3)
    a, b = rows_and_weights(layout, 64, 64, seed=13, padding=0.0)
    d = poisoned(layout.rows, 64)
    NT(a, b, d, layout.indices().cuda())
    taken, (want, size) = layout.taken().cuda(), product_of_rows(a, b, layout)
    assert worst_excess(d[taken], want[taken], size[taken]) <= 1
    ks = torch.tensor([align_up(s, 64) for s in sizes], dtype=torch.int32, device="cuda")
    ordered = make_layout(sizes, align=64)
    x, _ = rows_and_weights(ordered, 64, 64, seed=14, padding=0.0)
    grads = poisoned(4096, 64, 64, dtype=torch.float32)
    TN(x, x, grads, ks.tolist(), ks)
    want, size = product_over_rows(x, x, ordered)
    assert worst_excess(grads, want, size) <= 1


def test_parts_of_larger_tensors_are_read_and_written_in_place() -> None:
    layout = make_layout((100, 0, 300), align=128)
    a, b = rows_and_weights(layout, 192, 320, seed=15, padding=0.0)
    wide_a, wide_d, all_b = normal(layout.rows, 1000, seed=16), poisoned(layout.rows, 512), normal(6, 192, 320, seed=17)
    wide_a[:, 128:448], all_b[1::2] = a, b
    NT(wide_a[:, 128:448], all_b[1::2], wide_d[:, 64:256], layout.indices().cuda())
    d = poisoned(layout.rows, 192)
    NT(a, b, d, layout.indices().cuda())
    taken = layout.taken().cuda()
    assert torch.equal(wide_d[taken, 64:256], d[taken])
    assert wide_d[:, :64].isnan().all()
    assert wide_d[:, 256:].isnan().all()


def ids_of(*blocks: tuple[int, int]) -> Tensor:
    return torch.cat([torch.full((rows,), group, dtype=torch.int32) for group, rows in blocks]).cuda()


@pytest.mark.parametrize(
    "bad",
    [[(0, 128), (1, 64), (0, 64)], [(0, 100), (1, 156)], [(0, 128), (2, 128)], [(0, 128), (-2, 128)]],
    ids=["two pieces", "unaligned", "no such group", "negative"],
)
def test_a_layout_that_is_none_is_reported_and_nothing_else_is_harmed(bad: list[tuple[int, int]]) -> None:
    a, b, d = normal(256, 64, seed=18), normal(2, 64, 64, seed=19), poisoned(256, 64)
    NT(a, b, d, ids_of(*bad))
    with pytest.raises(ShapeError, match="grouped_layout of an earlier call was wrong"):
        deep_gemm.check()
    NT(a, b, d, ids_of((1, 128), (0, 128)))
    deep_gemm.check()
    want, size = product_of_rows(a, b, Layout((128, 128), (128, 0), 256, 128))
    assert worst_excess(d, want, size) <= 1


def test_sizes_on_the_device_that_exceed_the_operands_are_reported() -> None:
    rows = normal(192, 64, seed=20)
    d = torch.full((2, 64, 64), 5.0, device="cuda")
    TN(rows, rows, d, [64, 128], torch.tensor([64, 4096], dtype=torch.int32, device="cuda"), d)
    with pytest.raises(ShapeError, match="in 1 places"):
        deep_gemm.check()
    assert (d[1] == 5).all()


def test_calls_follow_the_stream_and_a_graph_reads_new_groups_at_every_replay() -> None:
    a, b, d = normal(256, 64, seed=21), normal(2, 64, 64, seed=22), poisoned(256, 64)
    ids = ids_of((0, 128), (1, 128))
    NT(a, b, d, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        NT(a, b, d, ids)
    for blocks, starts, sizes in (
        (((1, 64), (0, 192)), (64, 0), (192, 64)),
        (((0, 64), (1, 100), (-1, 92)), (0, 64), (64, 100)),
    ):
        ids.copy_(ids_of(*blocks))
        d.fill_(NAN)
        graph.replay()
        layout = Layout(sizes, starts, 256, 64)
        taken, (want, size) = layout.taken().cuda(), product_of_rows(a, b, layout)
        assert worst_excess(d[taken], want[taken], size[taken]) <= 1


def test_a_call_is_two_of_our_kernels_and_nothing_else() -> None:
    layout, a, b, ks = grads_of((64, 192), 64, 128, seed=23)
    d, ids = torch.zeros(2, 64, 128, device="cuda"), layout.indices().cuda()
    weights, out = normal(2, 128, 64, seed=24), poisoned(layout.rows, 128)

    def both() -> None:
        TN(a, b, d, [64, 192], ks, d)
        NT(a, weights, out, ids)

    both()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        both()
        torch.cuda.synchronize()
    names = sorted(e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    assert names == ["pk_group_bounds", "pk_group_bounds", "pk_rows_nt", "pk_wgrad"]
