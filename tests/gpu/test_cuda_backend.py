# SPDX-License-Identifier: Apache-2.0
"""The packed kernels against a float64 oracle: sizes off the tile, ragged and empty experts, save modes, same bits."""

from __future__ import annotations

import threading

import pytest
import torch

import prime_kernels
from tests.gpu.helpers import BOUND, on_gpu, poison_allocator, run, runtime_for, same_bits, worst_row_block
from tests.helpers.cases import Case, Result, assert_close, dense_oracle, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

# Rows per expert around every boundary of the kernels: 16 (a warp), 64 (a warpgroup), 128 (a tile), pairs and units.
RAGGED = (0, 1, 3, 15, 16, 17, 0, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 0, 500, 1100)


def check(case: Case, result: Result, **activation: float | None) -> None:
    want = dense_oracle(case, **activation)  # type: ignore[arg-type]
    assert_close(result, want, BOUND)
    assert worst_row_block(result.y, want.y) <= BOUND
    assert worst_row_block(result.dx, want.dx) <= BOUND


def ragged_case(hidden: int, intermediate: int, seed: int) -> Case:
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(RAGGED), generator=g).tolist()
    ids = torch.cat([torch.full((RAGGED[i],), e) for e, i in enumerate(order)])
    ids = ids[torch.randperm(len(ids), generator=g)]
    case = make_case(tokens=len(ids), hidden=hidden, intermediate=intermediate, experts=len(RAGGED), topk=1, seed=seed)
    return on_gpu(case.change(topk_ids=ids[:, None]))


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(512, 256), (704, 1408), (2880, 704), (1408, 2880), (64, 64), (192, 320)]
)
def test_ragged_experts_of_sizes_off_the_tile_agree_with_the_oracle_three_steps_running(
    hidden: int, intermediate: int
) -> None:
    case = ragged_case(hidden, intermediate, seed=hidden)
    with runtime_for(case) as runtime:
        for seed in range(3):
            case = ragged_case(hidden, intermediate, seed=seed)
            check(case, run(case, runtime))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000])
def test_any_token_count_agrees_with_the_oracle(tokens: int) -> None:
    case = on_gpu(make_case(tokens=tokens, hidden=512, intermediate=384, experts=16, topk=4, seed=tokens))
    with runtime_for(case) as runtime:
        check(case, run(case, runtime))


def test_no_tokens_give_no_rows_and_zero_gradients() -> None:
    case = on_gpu(make_case(tokens=0, hidden=512, intermediate=256))
    with runtime_for(case) as runtime:
        result = run(case, runtime)
        assert result.y.shape == (0, 512)
        assert not any(t.any() for t in result)
        full = on_gpu(make_case(tokens=1, hidden=512, intermediate=256))
        check(full, run(full, runtime))


def test_skipped_slots_and_repeated_experts_and_zero_and_negative_scores_keep_their_gradients() -> None:
    case = make_case(tokens=300, hidden=512, intermediate=256, experts=8, topk=4, seed=3)
    ids, weights = case.topk_ids.clone(), case.topk_weights.clone()
    ids[::3, 1] = -1
    ids[5] = -1
    ids[::4, 2] = ids[::4, 3]
    weights[::5, 0], weights[1::5, 0] = 0.0, -0.7
    case = on_gpu(case.change(topk_ids=ids, topk_weights=weights))
    with runtime_for(case) as runtime:
        result = run(case, runtime)
        check(case, result)
        assert not result.dtopk_weights[case.topk_ids == -1].any()
        assert not result.y[5].any()
        assert same_bits(result, run(case.change(topk_ids=case.topk_ids.int()), runtime))


def test_experts_without_rows_get_exact_zeros_from_dirty_memory() -> None:
    case = make_case(tokens=64, hidden=512, intermediate=256, experts=32, topk=2, seed=4)
    case = on_gpu(case.change(topk_ids=case.topk_ids % 5))
    with runtime_for(case) as runtime:
        for _ in range(3):
            result = run(case, runtime)
            for gradient in (result.dw_gate, result.dw_up, result.dw_down):
                assert torch.isfinite(gradient).all()
                assert not gradient[5:].any()


@pytest.mark.parametrize("save", ["inputs", "full"])
def test_what_is_kept_for_the_backward_does_not_change_a_bit(save: str) -> None:
    case = ragged_case(704, 320, seed=9)
    with runtime_for(case) as kept, runtime_for(case, save=save) as other:
        assert same_bits(run(case, kept), run(case, other))


def test_separate_gate_and_up_weights_give_the_bits_of_the_packed_ones() -> None:
    case = ragged_case(512, 320, seed=10)
    with runtime_for(case) as runtime:
        assert same_bits(run(case, runtime), run(case, runtime, pair=True))


def test_results_do_not_depend_on_run_or_sm_count() -> None:
    case = ragged_case(1408, 704, seed=11)
    with runtime_for(case) as runtime:
        first = run(case, runtime)
        for _ in range(3):
            assert same_bits(first, run(case, runtime))
    for num_sms in (2, 7, 64):
        with runtime_for(case, num_sms=num_sms) as runtime:
            assert same_bits(first, run(case, runtime))


@pytest.mark.parametrize(("clamp", "alpha", "up_offset"), [(7.0, 1.702, 1.0), (0.5, 1.0, 0.0), (None, 1.3, 0.25)])
def test_clamped_and_offset_activations_agree_with_the_oracle(
    clamp: float | None, alpha: float, up_offset: float
) -> None:
    case = ragged_case(512, 256, seed=12)
    activation = prime_kernels.SwiGLU(clamp=clamp, alpha=alpha, up_offset=up_offset)
    with runtime_for(case, activation=activation) as runtime:
        result = run(case, runtime)
    want = dense_oracle(case, clamp=clamp, alpha=alpha, up_offset=up_offset, preact_dtype=torch.bfloat16)
    # Values beside the clamp round to either side of it: where one flips, its whole gradient does.
    assert_close(result, want, BOUND if clamp is None or clamp > 4 else 3e-2)


def test_fp32_weight_gradients_are_not_rounded() -> None:
    case = ragged_case(512, 320, seed=13)
    with runtime_for(case, wgrad_dtype=torch.float32) as runtime, runtime_for(case) as rounded:
        wide, narrow = gradients_of(case, runtime), gradients_of(case, rounded)
    for a, b in zip(wide, narrow, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a.bfloat16(), b)
        assert not torch.equal(a, b.float())


def gradients_of(case: Case, runtime: prime_kernels.MegaMoERuntime) -> tuple[torch.Tensor, torch.Tensor]:
    packed, down = case.w_gate_up.detach().requires_grad_(), case.w_down.detach().clone().requires_grad_()
    for weight in (packed, down):
        if runtime.config.wgrad_dtype == torch.float32 and hasattr(weight, "grad_dtype"):
            weight.grad_dtype = None
    poison_allocator()
    y = prime_kernels.mega_moe(case.x, case.topk_ids, case.topk_weights, packed, down, runtime=runtime)
    y.backward(case.dy)
    assert packed.grad is not None
    assert down.grad is not None
    return packed.grad, down.grad


def test_frozen_leaves_get_no_gradient_and_change_no_bit_of_the_others() -> None:
    case = ragged_case(512, 256, seed=14)
    with runtime_for(case) as runtime:
        everything = run(case, runtime)
        packed = case.w_gate_up.detach()
        down = case.w_down.detach().clone().requires_grad_()
        y = prime_kernels.mega_moe(case.x, case.topk_ids, case.topk_weights, packed, down, runtime=runtime)
        y.backward(case.dy)
        assert torch.equal(down.grad, everything.dw_down)
        x = case.x.detach().clone().requires_grad_()
        y = prime_kernels.mega_moe(x, case.topk_ids, case.topk_weights, packed, case.w_down, runtime=runtime)
        y.backward(case.dy)
        assert torch.equal(x.grad, everything.dx)


def test_a_token_that_is_not_finite_spoils_its_own_rows_only() -> None:
    case = on_gpu(make_case(tokens=200, hidden=512, intermediate=256, experts=8, topk=2, seed=15))
    x = case.x.clone()
    x[17] = float("nan")
    with runtime_for(case) as runtime:
        clean, result = run(case, runtime), run(case.change(x=x), runtime)
    others = torch.arange(200, device="cuda") != 17
    assert torch.equal(result.y[others], clean.y[others])
    assert torch.equal(result.dx[others], clean.dx[others])
    hit = case.topk_ids[17].tolist()
    for e in range(8):
        assert torch.isfinite(result.dw_gate[e]).all() == (e not in hit)


def test_ids_that_name_no_expert_are_skipped_and_reported() -> None:
    case = on_gpu(make_case(tokens=100, hidden=512, intermediate=256, experts=8, topk=2, seed=16))
    ids = case.topk_ids.clone()
    ids[3, 0], ids[9, 1], ids[50, 0] = 8, -5, 2**31 - 1
    masked = torch.where((ids < 0) | (ids > 7), -1, ids)
    with runtime_for(case) as runtime:
        want = run(case.change(topk_ids=masked), runtime)
        y = prime_kernels.mega_moe(case.x, ids, case.topk_weights, case.w_gate_up, case.w_down, runtime=runtime)
        assert torch.equal(y, want.y)
        with pytest.raises(prime_kernels.errors.ShapeError, match="3 ids outside"):
            runtime.synchronize()
        runtime.check()


def test_only_our_kernels_run_between_call_and_return() -> None:
    case = on_gpu(make_case(tokens=256, hidden=512, intermediate=256, experts=8, topk=2, seed=17))
    x, down = case.x.requires_grad_(), case.w_down.requires_grad_()
    packed = case.w_gate_up.detach().requires_grad_()
    with runtime_for(case) as runtime:
        args = (x, case.topk_ids, case.topk_weights.requires_grad_(), packed, down)
        prime_kernels.mega_moe(*args, runtime=runtime).backward(case.dy)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as forward:
            y = prime_kernels.mega_moe(*args, runtime=runtime)
            torch.cuda.synchronize()
        for leaf in args:
            leaf.grad = None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as backward:
            y.backward(case.dy)
            torch.cuda.synchronize()
    for profile, limit in ((forward, 4), (backward, 6)):
        names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert names
        assert all(name.startswith("pk_") for name in names), names
        assert len(names) <= limit, names


def test_a_new_thread_whose_memory_is_all_cached_can_launch() -> None:
    case = on_gpu(make_case(tokens=256, hidden=512, intermediate=256, experts=8, topk=2, seed=18))
    results: list[Result] = []
    with runtime_for(case, allow_multi_stream=True) as runtime:
        first = run(case, runtime)
        thread = threading.Thread(target=lambda: results.append(run(case, runtime, poison=False)))
        thread.start()
        thread.join()
    assert same_bits(first, results[0])
