# SPDX-License-Identifier: Apache-2.0
"""The contract of the call: skipped and repeated slots, empty experts, no tokens, bad values, what is saved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_kernels import mega_moe
from prime_kernels.errors import UnsupportedConfig
from tests.helpers.cases import assert_close, dense_oracle, make_case, relative_error, worst_errors
from tests.helpers.layer import assert_same_bits, leaves_of, open_runtime, poison, result_of, run
from tests.helpers.quantized import quantized_oracle

PRECISIONS = ["bf16", "fp8", "fp8_bwd", "mxfp8"]


def quantizable_case(**fields):
    return make_case(hidden=128, intermediate=128, **fields)


@pytest.fixture
def nan_filled_memory():
    """torch.empty returns NaN while this is in use."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("nan_filled_memory")
def test_empty_experts_have_gradients_of_exact_zeros(precision):
    case = quantizable_case()
    case.topk_ids %= 2
    shapes = [(96, 256), (96, 128), (48, 128), (8, 256, 128), (8, 128, 128)]
    with open_runtime(case, precision=precision) as runtime:
        first = None
        for _ in range(3):
            poison(*shapes)
            actual = run(case, runtime)
            for gradient in (actual.dw_gate, actual.dw_up, actual.dw_down):
                assert bool((gradient[2:] == 0).all())
                assert bool((gradient[:2].abs().sum((1, 2)) > 0).all())
            first = first or actual
            assert_same_bits(actual, first)
    expected = dense_oracle(case) if precision == "bf16" else quantized_oracle(case, precision)
    assert max(worst_errors(first, expected).values()) <= 8e-3


def test_empty_experts_between_busy_ones_stay_zero():
    # [0, 8, 8, 0, 16] rows: an accumulator left over from the expert before must not show.
    ids = torch.tensor([1] * 8 + [2] * 8 + [4] * 16)[:, None]
    case = make_case(tokens=32, experts=5, topk=1, dtype=torch.float32).change(topk_ids=ids)
    with open_runtime(case) as runtime:
        for _ in range(3):
            actual = run(case, runtime)
            assert float(actual.dw_down[[0, 3]].abs().max()) == 0
            assert float(actual.dw_gate[[0, 3]].abs().max()) == 0
            assert_close(actual, dense_oracle(case), 5e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("nan_filled_memory")
def test_no_tokens_give_an_empty_result_and_zero_weight_gradients(precision):
    case, normal = quantizable_case(tokens=0), quantizable_case()
    with open_runtime(normal, precision=precision) as runtime:
        expected = run(normal, runtime)
        for _ in range(3):
            actual = run(case, runtime)
            assert actual.y.shape == (0, 128)
            assert actual.dx.shape == (0, 128)
            assert actual.dtopk_weights.shape == (0, 2)
            assert float(actual.dw_gate.abs().max()) == 0
            assert float(actual.dw_down.abs().max()) == 0
            assert_same_bits(run(normal, runtime), expected)


def test_skipped_slots_cost_nothing_and_have_zero_weight_gradient():
    case = make_case(tokens=30, topk=4, dtype=torch.float32)
    case.topk_ids[::2, 1] = -1
    case.topk_ids[5] = -1
    # What stands in a skipped slot's weight is nobody's business.
    case.topk_weights[case.topk_ids < 0] = torch.nan
    clean = case.change(topk_weights=case.topk_weights.nan_to_num(0.0))
    with open_runtime(case) as runtime:
        for _ in range(3):
            actual = run(case, runtime)
            assert_close(actual, dense_oracle(clean), 5e-6)
            assert float(actual.dtopk_weights[case.topk_ids < 0].abs().max()) == 0
            assert float(actual.y[5].abs().max()) == 0
            assert float(actual.dx[5].abs().max()) == 0
        x, topk_weights, w_gate_up, w_down = leaves_of(case)
        _, stats = mega_moe(x, case.topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime, return_stats=True)
    expected = torch.bincount(case.topk_ids[case.topk_ids >= 0], minlength=8)
    assert torch.equal(stats.tokens_per_expert.long(), expected)
    assert torch.equal(stats.recv_per_local_expert.long(), expected)
    assert stats.tokens_per_expert.dtype == stats.recv_per_local_expert.dtype == torch.int32


def test_all_slots_skipped_gives_zeros():
    case = make_case(tokens=7)
    case.topk_ids.fill_(-1)
    with open_runtime(case) as runtime:
        for _ in range(3):
            assert all(float(tensor.abs().max()) == 0 for tensor in run(case, runtime))


def test_repeated_experts_are_summed_and_keep_their_own_gradients():
    case = make_case(tokens=20, topk=3, dtype=torch.float32)
    case.topk_ids[:] = case.topk_ids[:, :1]
    case.topk_weights[:, 2] = -0.5
    with open_runtime(case) as runtime:
        for _ in range(3):
            assert_close(run(case, runtime), dense_oracle(case), 5e-6)


def test_all_tokens_on_one_expert_are_computed():
    case = make_case(tokens=200, topk=1, dtype=torch.float32)
    case.topk_ids.fill_(5)
    with open_runtime(case, capacity_factor=0.01) as runtime:
        actual = run(case, runtime)
        assert max(worst_errors(actual, dense_oracle(case)).values()) <= 5e-6
        assert float(actual.dw_down[5].norm()) > 0


def test_weight_gradients_are_right_for_negative_zero_and_tiny_weights():
    case = make_case(tokens=8, topk=4, dtype=torch.float32)
    case.topk_weights[:] = torch.tensor([-0.5, 0.0, 1e-6, 1.0])
    with open_runtime(case) as runtime:
        actual, expected = run(case, runtime), dense_oracle(case)
    for slot in range(4):
        assert float(expected.dtopk_weights[:, slot].norm()) > 0
        assert relative_error(actual.dtopk_weights[:, slot], expected.dtopk_weights[:, slot]) <= 5e-6


def test_both_id_dtypes_give_the_same_bits():
    case = make_case()
    with open_runtime(case) as runtime:
        assert_same_bits(run(case, runtime), run(case.change(topk_ids=case.topk_ids.to(torch.int32)), runtime))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_weights_are_upcast_and_get_gradients_of_their_dtype(dtype):
    case = make_case(dtype=torch.float32)
    narrow = case.change(topk_weights=case.topk_weights.to(dtype))
    wide = case.change(topk_weights=narrow.topk_weights.float())
    with open_runtime(case) as runtime:
        actual, expected = run(narrow, runtime), run(wide, runtime)
    assert actual.dtopk_weights.dtype == dtype
    assert torch.equal(actual.dtopk_weights, expected.dtopk_weights.to(dtype))
    assert_same_bits(actual._replace(dtopk_weights=expected.dtopk_weights), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_non_finite_token_spoils_only_its_own_rows_and_its_experts(value, precision):
    case = quantizable_case(tokens=150)
    clean = case.change(x=case.x.clone())
    case.x[17, 5] = value
    hit = torch.zeros(8, dtype=torch.bool)
    hit[case.topk_ids[17]] = True
    with open_runtime(case, precision=precision) as runtime:
        expected = run(clean, runtime)
        for _ in range(3):
            actual = run(case, runtime)
            others = torch.arange(150) != 17
            assert not bool(actual.y[17].isfinite().all())
            for name in ("y", "dx", "dtopk_weights"):
                assert torch.equal(getattr(actual, name)[others], getattr(expected, name)[others]), name
            for name in ("dw_gate", "dw_up", "dw_down"):
                assert torch.equal(getattr(actual, name)[~hit], getattr(expected, name)[~hit]), name


@pytest.mark.parametrize(
    "wanted", [("x",), ("w_gate_up", "w_down"), ("w_down",), ("w_gate_up",), ("topk_weights",), ()], ids=str
)
def test_only_needed_gradients_are_computed(wanted, monkeypatch):
    case = make_case()
    asked = []
    with open_runtime(case) as runtime:
        full = run(case, runtime)
        grads = {"x": full.dx, "topk_weights": full.dtopk_weights, "w_down": full.dw_down}
        grads["w_gate_up"] = torch.cat([full.dw_gate, full.dw_up], dim=1)
        backward = runtime.implementation.backward
        monkeypatch.setattr(
            runtime.implementation,
            "backward",
            lambda *args, needs, **rest: asked.append(needs) or backward(*args, needs=needs, **rest),
        )
        for _ in range(3):
            leaves = dict(zip(("x", "topk_weights", "w_gate_up", "w_down"), leaves_of(case), strict=True))
            for name, leaf in leaves.items():
                leaf.requires_grad_(name in wanted)
            x, topk_weights, w_gate_up, w_down = leaves.values()
            before = runtime.stats().backwards
            y = mega_moe(x, case.topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime)
            assert y.requires_grad == bool(wanted)
            if wanted:
                y.backward(case.dy)
            assert runtime.stats().backwards == before + bool(wanted)
            for name, leaf in leaves.items():
                assert (leaf.grad is not None) == (name in wanted), name
                assert leaf.grad is None or torch.equal(leaf.grad, grads[name]), name
    assert [needs._asdict() for needs in asked] == [{name: name in wanted for name in leaves}] * (3 * bool(wanted))


def test_unfreezing_weights_between_calls_takes_effect():
    case = make_case()
    x, topk_weights, w_gate_up, w_down = leaves_of(case)
    with open_runtime(case) as runtime:
        for frozen in (True, False, True):
            w_gate_up.requires_grad_(not frozen)
            w_gate_up.grad = None
            mega_moe(x, case.topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime).backward(case.dy)
            assert (w_gate_up.grad is None) == frozen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_saved_and_the_result_is_the_same(mode):
    case = make_case(tokens=64)
    saved = []
    with open_runtime(case) as runtime, torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        leaves = leaves_of(case)
        args = (leaves[0], case.topk_ids, *leaves[1:])
        expected = mega_moe(*args, runtime=runtime)
        assert len(saved) > 0
        saved.clear()
        with mode():
            y = mega_moe(*args, runtime=runtime)
        assert saved == []
        assert not y.requires_grad
        assert torch.equal(y, expected)


def test_the_inputs_mode_saves_no_rows():
    case = make_case(tokens=64)
    sizes = {}
    with open_runtime(case) as runtime:
        leaves = leaves_of(case)
        for save in ("inputs", "preact", "full"):
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                mega_moe(leaves[0], case.topk_ids, *leaves[1:], runtime=runtime, save=save)
            sizes[save] = sum(tensor.nbytes for tensor in kept)
    rows = 64 * 2
    assert sizes["preact"] - sizes["inputs"] == rows * 2 * 128 * 2
    assert sizes["full"] - sizes["preact"] == rows * 64 * 2


def test_differentiating_twice_raises():
    case = make_case(dtype=torch.float32)
    with open_runtime(case) as runtime:
        x, topk_weights, w_gate_up, w_down = leaves_of(case)
        y = mega_moe(x, case.topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            dx.sum().backward()
        y, *_ = torch.ops.prime_kernels.mega_moe_fwd(
            x, case.topk_ids, topk_weights, w_gate_up, None, w_down, [], runtime.id
        )
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(UnsupportedConfig, match="differentiated twice"):
            dx.sum().backward()


def test_an_expanded_upstream_gradient_is_accepted():
    case = make_case(dtype=torch.float32)
    with open_runtime(case) as runtime:
        x, topk_weights, w_gate_up, w_down = leaves_of(case)
        y = mega_moe(x, case.topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime)
        y.sum().backward()
        actual = result_of(y, x, topk_weights, w_gate_up, w_down)
    assert_close(actual, dense_oracle(case.change(dy=torch.ones_like(case.dy))), 5e-6)


def test_many_reruns_are_bitwise_equal():
    case = make_case(tokens=77, topk=3)
    with open_runtime(case) as runtime:
        first = run(case, runtime)
        for _ in range(30):
            assert_same_bits(run(case, runtime), first)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_autocast_and_default_devices_do_not_reach_into_the_layer(precision):
    case = quantizable_case(dtype=torch.float32 if precision == "bf16" else torch.bfloat16)
    with open_runtime(case, precision=precision) as runtime:
        expected = run(case, runtime)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert (case.x.float() @ case.x.float().t()).dtype == torch.bfloat16, "autocast is on"
                assert_same_bits(run(case, runtime), expected)
            with torch.device("meta"):
                assert torch.zeros(1).is_meta
                assert_same_bits(run(case, runtime), expected)


@pytest.mark.parametrize("how", ["process", "backend"])
def test_reduced_matmul_precision_does_not_reach_into_the_reference(how):
    case = make_case(dtype=torch.float32)
    with open_runtime(case) as runtime:
        expected = run(case, runtime)
        switch = torch.backends.mkldnn.matmul
        before = switch.fp32_precision
        try:
            if how == "process":
                torch.set_float32_matmul_precision("medium")
            else:
                switch.fp32_precision = "bf16"
            for _ in range(3):
                assert_same_bits(run(case, runtime), expected)
                assert switch.fp32_precision == "bf16", "the setting of the process is back"
        finally:
            if how == "process":
                torch.set_float32_matmul_precision("highest")
            switch.fp32_precision = before


def test_backward_can_run_twice_on_a_retained_graph():
    case = make_case(dtype=torch.float32)
    with open_runtime(case) as runtime:
        x, topk_weights, w_gate_up, w_down = leaves_of(case)
        y = mega_moe(x, case.topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime)
        y.backward(case.dy, retain_graph=True)
        once = x.grad.clone()
        y.backward(case.dy)
        assert torch.equal(x.grad, once + once)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward(case.dy)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    experts=st.integers(1, 9),
    topk=st.integers(1, 5),
    tokens=st.integers(0, 40),
    seed=st.integers(0, 2**16),
    skipped=st.sampled_from([0.0, 0.3, 0.9]),
    hot=st.booleans(),
)
def test_any_routing_matches_the_oracle(experts, topk, tokens, seed, skipped, hot):
    case = make_case(tokens=tokens, intermediate=64, experts=max(experts, topk), topk=topk, dtype=torch.float32)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1 if hot else experts, (tokens, topk), generator=g)
    ids[torch.rand(tokens, topk, generator=g) < skipped] = -1
    case = case.change(topk_ids=ids, topk_weights=torch.randn(tokens, topk, generator=g))
    with open_runtime(case) as runtime:
        actual, expected = run(case, runtime), dense_oracle(case)
    assert max(worst_errors(actual, expected).values()) <= 2e-5
    assert float(actual.dtopk_weights[ids < 0].abs().sum()) == 0
