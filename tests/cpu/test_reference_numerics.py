# SPDX-License-Identifier: Apache-2.0
"""The reference against an oracle that shares no code with it, and against finite differences."""

from __future__ import annotations

import pytest
import torch

from prime_kernels import SwiGLU, mega_moe
from tests.helpers.cases import Result, assert_close, dense_oracle, make_case, worst_errors
from tests.helpers.layer import assert_same_bits, leaves_of, open_runtime, run

# fp32: rounding of sums of 128 products. bf16: z, h, s*h, dz and results each round to 8 bits.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}
ACTIVATIONS = {
    "silu": {},
    "clamped": {"clamp": 0.5},
    "oai": {"clamp": 7.0, "alpha": 1.702, "up_offset": 1.0},
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_tensor_and_expert_matches_the_dense_oracle(dtype, activation):
    case = make_case(dtype=dtype)
    if dtype is torch.float64:
        case = case.change(topk_weights=case.topk_weights.double())
    act = ACTIVATIONS[activation]
    # The clamp decides by the stored value: without this an element within rounding of the edge falls on either side.
    expected = dense_oracle(case, **act, preact_dtype=dtype if "clamp" in act else None)
    with open_runtime(case, activation=SwiGLU(**act)) as runtime:
        for _ in range(3):
            assert_close(run(case, runtime), expected, BOUNDS[dtype])


@pytest.mark.parametrize("scale", [1.0, 0.02])
@pytest.mark.parametrize("silent", ["w_gate", "w_up", None])
def test_each_half_of_the_gate_up_weights_has_its_own_gradient(silent, scale):
    case = make_case(dtype=torch.float32, scale=scale)
    act = {"up_offset": 1.0}
    if silent is not None:
        case = case.change(**{silent: torch.zeros_like(case.w_gate)})
    with open_runtime(case, activation=SwiGLU(**act)) as runtime:
        actual, expected = run(case, runtime), dense_oracle(case, **act)
    errors = worst_errors(actual, expected)
    assert max(errors.values()) <= 5e-6, errors
    if silent == "w_gate":
        # silu(0) = 0: nothing reaches y, dx or the other weights except through the gate.
        assert float(expected.dw_gate.norm()) > 0
    else:
        assert float(expected.y.norm()) > 0


def test_swapped_halves_are_detected_by_row_identifying_weights():
    case = make_case(dtype=torch.float32)
    experts, inter, hidden = case.w_gate.shape
    row = torch.arange(experts * inter, dtype=torch.float32).view(experts, inter, 1)
    spread = torch.linspace(-1, 1, hidden)
    case = case.change(w_gate=torch.sin(row) * spread / hidden**0.5, w_up=torch.cos(row * 0.7) * spread / hidden**0.5)
    swapped = case.change(w_gate=case.w_up, w_up=case.w_gate)
    with open_runtime(case) as runtime:
        actual = run(case, runtime)
    assert_close(actual, dense_oracle(case), 2e-5)
    errors = worst_errors(actual, dense_oracle(swapped))
    assert errors["y"] > 0.1
    assert errors["dw_gate"] > 0.1


def test_gradients_match_finite_differences_in_every_save_mode():
    case = make_case(tokens=8, intermediate=64, experts=4, topk=3, dtype=torch.float64)
    case = case.change(topk_weights=torch.tensor([-0.5, 0.0, 1e-6]).double().repeat(8, 1))
    case.topk_ids[0] = torch.tensor([2, 2, -1])
    for save in ("inputs", "preact", "full"):
        with open_runtime(case, activation=SwiGLU(clamp=3.0, alpha=1.3, up_offset=0.5)) as runtime:
            leaves = leaves_of(case)

            def layer(x, topk_weights, w_gate_up, w_down, runtime=runtime, save=save):
                return mega_moe(x, case.topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime, save=save)

            assert torch.autograd.gradcheck(layer, leaves, fast_mode=True)


def test_the_gradient_is_exactly_zero_outside_the_clamp():
    case = make_case(dtype=torch.float32, scale=20.0)
    act = {"clamp": 7.0}
    with open_runtime(case, activation=SwiGLU(**act)) as runtime:
        actual = run(case, runtime)
    expected = dense_oracle(case, **act)
    assert_close(actual, expected, 1e-4)
    # One token per expert at most reaches most weights' rows: where the oracle says 0, it has to be 0.
    single = make_case(tokens=1, topk=1, dtype=torch.float32, scale=20.0)
    with open_runtime(single, activation=SwiGLU(**act)) as runtime:
        actual = run(single, runtime)
    expected = dense_oracle(single, **act)
    expert = int(single.topk_ids[0, 0])
    dead = expected.dw_gate[expert].abs().sum(1) == 0
    assert 0 < int(dead.sum()) < dead.numel()
    assert torch.equal(actual.dw_gate[expert].abs().sum(1) == 0, dead)
    assert torch.equal(actual.dw_up[expert].abs().sum(1) == 0, expected.dw_up[expert].abs().sum(1) == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_save_modes_and_repeats_give_the_same_bits(dtype):
    case = make_case(tokens=100, dtype=dtype)
    case.topk_ids[::7, 1] = -1
    with open_runtime(case) as runtime:
        first = run(case, runtime, save="preact")
        for save in ("preact", "inputs", "full") * 2:
            assert_same_bits(run(case, runtime, save=save), first)
    with open_runtime(case, max_tokens_per_rank=100, num_sms=4, capacity_factor=0.5, save="full") as runtime:
        assert_same_bits(run(case, runtime), first)


@pytest.mark.parametrize(
    ("experts", "topk", "hidden", "intermediate"),
    [(1, 1, 64, 64), (1, 8, 128, 64), (6, 6, 192, 64), (60, 10, 64, 192), (128, 8, 64, 64), (5, 16, 320, 64)],
)
def test_odd_sizes_of_the_layer_are_right(experts, topk, hidden, intermediate):
    case = make_case(tokens=33, hidden=hidden, intermediate=intermediate, experts=max(experts, topk), topk=topk)
    case = case.change(
        topk_ids=case.topk_ids % experts,
        w_gate=case.w_gate[:experts].float(),
        w_up=case.w_up[:experts].float(),
        w_down=case.w_down[:experts].float(),
        x=case.x.float(),
        dy=case.dy.float(),
    )
    with open_runtime(case) as runtime:
        actual, expected = run(case, runtime), dense_oracle(case)
    assert max(worst_errors(actual, expected).values()) <= 5e-6
    assert float(expected.y.norm()) > 0


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 129])
def test_any_number_of_tokens_is_right(tokens):
    case = make_case(tokens=tokens, dtype=torch.float32)
    with open_runtime(case) as runtime:
        for _ in range(3):
            actual, expected = run(case, runtime), dense_oracle(case)
            assert actual.y.shape == (tokens, 64)
            assert max(worst_errors(actual, expected).values()) <= 5e-6
            assert isinstance(actual, Result)
