# SPDX-License-Identifier: Apache-2.0
"""fp8, fp8_bwd and mxfp8 of the reference: against an oracle with its own quantiser, and prepared weights."""

from __future__ import annotations

import pytest
import torch

from prime_kernels import MegaMoERuntime, mega_moe, plan_memory, prepare_weights
from prime_kernels.errors import StaleWeightsError, UnsupportedConfig
from prime_kernels.moe import quantize as q
from prime_kernels.moe.recipe import Operands
from tests.helpers.cases import Result, assert_close, dense_oracle, make_case, relative_error, worst_errors
from tests.helpers.layer import assert_same_bits, config_of, leaves_of, open_runtime, result_of, run
from tests.helpers.quantized import e4m3_values, nearest_e4m3, quantized, quantized_oracle

QUANTIZED = ["fp8", "fp8_bwd", "mxfp8"]


def case_of(**fields):
    return make_case(**{"hidden": 128, "intermediate": 256, **fields})


def test_the_oracles_quantiser_knows_every_code():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(e4m3_values(), codes)
    values = torch.linspace(-448, 448, 20001, dtype=torch.float64).float()
    assert torch.equal(nearest_e4m3(values.double()).float(), values.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32), (128, 1), (32, 1)], ids=str)
def test_codes_and_scales_match_an_independent_quantiser(block):
    g = torch.Generator().manual_seed(0)
    values = torch.randn(200, 256, generator=g) * torch.logspace(-20, 15, 200)[:, None]
    values[3] = 0
    values[4, :200] = 0
    got = q.fake_quantize(values, q.Block(*block))
    want = quantized(values, *block)
    assert torch.equal(got.double(), want)
    assert 0 < relative_error(got, values) < 0.05
    scales = q.quantize(values, q.Block(*block)).sf
    assert bool((torch.frexp(scales).mantissa == 0.5).all()), "powers of two"
    # Quantising twice changes nothing: the second scale is the first or smaller.
    assert torch.equal(q.fake_quantize(got, q.Block(*block)), got)
    e8m0 = q.quantize(values, q.Block(*block), sf_dtype=torch.float8_e8m0fnu)
    assert torch.equal(e8m0.sf.float(), scales)


def test_scales_are_the_least_that_fit():
    edges = torch.tensor([448.0, 448.0001, 447.9999, 0.4375, 1.0, 2.0**-100, 3e38])[:, None]
    reach = 448 * q.quantize(edges, q.Block(1, 1)).sf.double()
    assert bool((edges <= reach).all())
    assert bool((edges > reach / 2).all())


def test_non_finite_values_spoil_only_themselves():
    values = torch.randn(4, 128)
    values[1, 5], values[2, 6], values[2, 7] = torch.nan, torch.inf, -torch.inf
    got = q.fake_quantize(values, q.Block(128, 128))
    assert torch.equal(got.isnan(), ~values.isfinite())
    assert relative_error(got[values.isfinite()], values[values.isfinite()]) < 0.05


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("tokens", [40, 300])
def test_every_tensor_matches_the_quantised_oracle(precision, tokens):
    case = case_of(tokens=tokens, experts=4)
    case.topk_ids[::9, 0] = -1
    expected = quantized_oracle(case, precision)
    with open_runtime(case, precision=precision) as runtime:
        for _ in range(3):
            actual = run(case, runtime)
            assert_close(actual, expected, 8e-3)
    # As far from the exact result as the recipe itself: 3 mantissa bits on both operands of each GEMM, 7e-2 here.
    exact = dense_oracle(case)
    for name in Result._fields:
        floor = relative_error(getattr(expected, name), getattr(exact, name))
        assert floor > 1e-3, f"{name}: the recipe does not quantise anything"
        assert relative_error(getattr(actual, name), getattr(exact, name)) <= 1.02 * floor + 4e-3


@pytest.mark.parametrize("precision", QUANTIZED)
def test_each_gemm_operand_has_the_block_of_its_reduced_axis(precision):
    values = torch.randn(200, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    # Every 32 x 32 tile has a range of its own, far enough apart for a shared scale to lose the small ones.
    tile = torch.randint(-12, 12, (7, 8), generator=torch.Generator().manual_seed(1))
    values *= torch.exp2(tile.float()).repeat_interleave(32, 0).repeat_interleave(32, 1)[:200]
    weight = values[:128].clone()
    operands = Operands(precision, weight[None], weight[None])
    block = 32 if precision == "mxfp8" else 128
    plain, square = values.double(), quantized(weight, 128, 128)
    forward, dgrad = (square, square) if block == 128 else (quantized(weight, 1, 32), quantized(weight, 32, 1))
    if precision == "fp8_bwd":
        forward = weight.double()
    assert torch.equal(operands.rows(values).double(), plain if precision == "fp8_bwd" else quantized(values, 1, block))
    assert torch.equal(operands.rows_backward(values).double(), quantized(values, 1, block))
    assert torch.equal(operands.tokens(values).double(), quantized(values, block, 1))
    for of_expert in (operands.gate_up, operands.down):
        assert torch.equal(of_expert(0).double(), forward)
        assert torch.equal(of_expert(0, dgrad=True).double(), dgrad)
    shapes = [(1, 32), (1, 128), (32, 1), (128, 1), (128, 128)]
    assert len({quantized(values, *shape).sum().item() for shape in shapes}) == len(shapes), "blocks would not show"


def test_block_shapes_matter_where_the_range_is_wide():
    case = case_of(tokens=64, experts=4)
    # Columns 32..63 are so small that only a scale of their own keeps them.
    case.x[:, 32:64] *= 2.0**-24
    case.w_gate[:, :, 32:64] *= 2.0**12
    case.w_up[:, :, 32:64] *= 2.0**12
    results = {}
    for precision in QUANTIZED:
        expected = quantized_oracle(case, precision)
        with open_runtime(case, precision=precision) as runtime:
            results[precision] = run(case, runtime)
        assert max(worst_errors(results[precision], expected).values()) <= 8e-3
    assert not torch.equal(results["fp8"].y, results["mxfp8"].y)


def test_fp8_bwd_has_the_forward_of_bf16_bit_for_bit():
    case = case_of(tokens=200)
    with open_runtime(case) as bf16, open_runtime(case, precision="fp8_bwd") as fp8_bwd:
        for save in ("preact", "inputs"):
            expected, actual = run(case, bf16, save=save), run(case, fp8_bwd, save=save)
            assert torch.equal(actual.y, expected.y)
            assert not torch.equal(actual.dx, expected.dx)
        x, scores, gate_up, down = leaves_of(case)
        prepared = prepare_weights(gate_up, down, runtime=fp8_bwd)
        y = mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=fp8_bwd, precision="fp8_bwd", prepared=prepared)
        assert torch.equal(y, expected.y)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_zero_rows_gradients_and_blocks_stay_finite(precision):
    case = case_of(tokens=256, experts=4)
    case.x[:128] = 0
    case.dy[(case.topk_ids == 2).any(1)] = 0
    case.w_gate[1, :128, :128] = 0
    case.w_down[3, :128, :128] = 0
    with open_runtime(case, precision=precision) as runtime:
        for _ in range(3):
            actual = run(case, runtime)
            assert all(bool(tensor.isfinite().all()) for tensor in actual)
            assert float(actual.y[:128].abs().max()) == 0
            assert float(actual.dw_down[2].abs().max()) == 0
            assert float(actual.dw_gate[2].abs().max()) == 0
            assert max(worst_errors(actual, quantized_oracle(case, precision)).values()) <= 8e-3


@pytest.mark.parametrize("precision", QUANTIZED)
def test_extreme_magnitudes_of_one_expert_leave_the_others_alone(precision):
    case = case_of(tokens=100, experts=4, topk=1)
    with open_runtime(case, precision=precision) as runtime:
        normal = run(case, runtime)
        extreme = case.change(w_gate=case.w_gate.clone(), w_up=case.w_up.clone(), w_down=case.w_down.clone())
        for weight in (extreme.w_gate, extreme.w_up, extreme.w_down):
            weight[1] *= 1e-30
        actual = run(extreme, runtime)
    on_one = (case.topk_ids == 1).any(1)
    assert 0 < int(on_one.sum()) < 100
    assert all(bool(tensor.isfinite().all()) for tensor in actual)
    assert float(actual.y[on_one].abs().max()) < 1e-20
    for name in ("y", "dx"):
        assert torch.equal(getattr(actual, name)[~on_one], getattr(normal, name)[~on_one])
    for name in ("dw_gate", "dw_up", "dw_down"):
        others = [0, 2, 3]
        assert torch.equal(getattr(actual, name)[others], getattr(normal, name)[others])


@pytest.mark.parametrize("precision", QUANTIZED)
def test_routing_weights_are_applied_after_quantisation(precision):
    # A sweep through powers of two: y / weight must not jump there.
    case = case_of(tokens=1, topk=1)
    near = [s * (1 + d) for s in (0.125, 0.25, 0.5, 1.0, 2.0) for d in (-1e-4, 0.0, 1e-4)]
    sweep = torch.cat([torch.linspace(0.1, 2.0, 49), torch.tensor(near)])[:, None]
    case = case.change(
        x=case.x.repeat(64, 1), topk_ids=case.topk_ids.repeat(64, 1), topk_weights=sweep, dy=case.dy.repeat(64, 1)
    )
    with open_runtime(case, precision=precision) as runtime:
        ratio = run(case, runtime).y.double() / sweep
    assert float(((ratio - ratio[0]).norm(dim=1) / ratio[0].norm()).max()) <= 2.0**-8


@pytest.mark.parametrize("pair", [False, True], ids=["packed", "pair"])
@pytest.mark.parametrize("precision", QUANTIZED)
def test_prepared_weights_change_no_bits(precision, pair):
    case = case_of()
    with open_runtime(case, precision=precision) as runtime:
        expected = run(case, runtime)
        gate_up = (case.w_gate, case.w_up) if pair else case.w_gate_up
        prepared = prepare_weights(gate_up, case.w_down, runtime=runtime)
        assert prepared.is_current(runtime)
        plan = plan_memory(runtime.config)
        assert prepared.nbytes == plan.prepared_bytes_per_layer
        for _ in range(3):
            assert_same_bits(run(case, runtime, prepared=prepared), expected)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_stale_prepared_weights_raise_until_refreshed_in_place(precision):
    case = case_of()
    with open_runtime(case, precision=precision) as runtime:
        x, scores, gate_up, down = leaves_of(case)
        prepared = prepare_weights(gate_up, down, runtime=runtime)
        addresses = [tensor.data_ptr() for tensor in prepared.tensors]
        optimizer = torch.optim.SGD([gate_up, down], lr=0.01)
        handle = runtime.attach_optimizer(optimizer)

        def step(current=prepared):
            y = mega_moe(
                x, case.topk_ids, scores, gate_up, down, runtime=runtime, precision=precision, prepared=current
            )
            y.backward(case.dy)
            return y

        seen = []
        for generation in range(3):
            assert runtime.weight_generation == generation
            seen.append(step().detach())
            optimizer.step()
            assert not prepared.is_current(runtime)
            with pytest.raises(StaleWeightsError, match=f"generation {generation}; the runtime is at {generation + 1}"):
                step()
            assert prepare_weights(gate_up, down, runtime=runtime, out=prepared) is prepared
            assert [tensor.data_ptr() for tensor in prepared.tensors] == addresses
        assert not torch.equal(seen[0], seen[1])
        fresh = mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime, precision=precision)
        assert torch.equal(step(), fresh)
        handle.remove()
        optimizer.step()
        assert runtime.weight_generation == 3


def test_forgetting_the_generation_is_caught_under_debug():
    case = case_of()
    with open_runtime(case, precision="fp8", debug=True) as runtime:
        x, scores, gate_up, down = leaves_of(case)
        prepared = prepare_weights(gate_up, down, runtime=runtime)
        args = (x, case.topk_ids, scores, gate_up, down)
        mega_moe(*args, runtime=runtime, precision="fp8", prepared=prepared)
        with torch.no_grad():
            down *= 1.01
        with pytest.raises(StaleWeightsError, match=r"w_down changed since it was prepared.*still 0") as caught:
            mega_moe(*args, runtime=runtime, precision="fp8", prepared=prepared)
        assert caught.value.code == "E61"
        assert caught.value.facts == {"argument": "w_down", "generation": 0}
        assert "advance_weight_generation" in caught.value.remedy


def test_refreshing_prepared_weights_before_backward_is_caught():
    case = case_of()
    with open_runtime(case, precision="fp8") as runtime:
        x, scores, gate_up, down = leaves_of(case)
        prepared = prepare_weights(gate_up, down, runtime=runtime)
        args = (x, case.topk_ids, scores, gate_up, down)
        y = mega_moe(*args, runtime=runtime, precision="fp8", prepared=prepared)
        # The same generation again is harmless: codes of the same weights.
        prepare_weights(gate_up, down, runtime=runtime, out=prepared)
        y.backward(case.dy)
        assert_same_bits(result_of(y, x, scores, gate_up, down), run(case, runtime))
        y = mega_moe(*args, runtime=runtime, precision="fp8", prepared=prepared)
        runtime.advance_weight_generation()
        prepare_weights(gate_up, down, runtime=runtime, out=prepared)
        with pytest.raises(StaleWeightsError, match="generation 0 in forward and are of 1 in backward"):
            y.backward(case.dy)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_bf16_storage_can_be_freed(precision):
    case = case_of()
    with open_runtime(case, precision=precision) as runtime:
        expected = run(case, runtime)
        x, scores, gate_up, down = leaves_of(case)
        prepared = prepare_weights(gate_up, down, runtime=runtime, free_bf16=True)
        assert gate_up.untyped_storage().nbytes() == down.untyped_storage().nbytes() == 0
        y = mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime, precision=precision, prepared=prepared)
        y.backward(case.dy)
        assert_same_bits(result_of(y, x, scores, gate_up, down), expected)


def test_preparing_for_the_wrong_runtime_is_refused():
    case = case_of()
    gate_up, down = case.w_gate_up, case.w_down
    with open_runtime(case) as bf16, open_runtime(case, precision="fp8_bwd") as fp8_bwd:
        with pytest.raises(UnsupportedConfig, match='precision "bf16", which reads the weights as they are'):
            prepare_weights(gate_up, down, runtime=bf16)
        with pytest.raises(UnsupportedConfig, match="free_bf16=True"):
            prepare_weights(gate_up, down, runtime=fp8_bwd, free_bf16=True)
        prepared = prepare_weights(gate_up, down, runtime=fp8_bwd)
        with open_runtime(case, precision="mxfp8") as mxfp8:
            with pytest.raises(UnsupportedConfig, match="out holds 'fp8_bwd' weights"):
                prepare_weights(gate_up, down, runtime=mxfp8, out=prepared)
            with pytest.raises(UnsupportedConfig, match="prepared weights are 'fp8_bwd'"):
                run(case, mxfp8, prepared=prepared)


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_fused_backend_refuses_recipes_it_does_not_have(precision, device):
    config = config_of(case_of(), precision=precision, backend="cuda")
    with pytest.raises(UnsupportedConfig, match=f"precision='{precision}' has no fused CUDA kernel"):
        MegaMoERuntime.create(config, device=device)


def test_quantised_recipes_take_bf16_only():
    case = case_of(dtype=torch.float32)
    with open_runtime(case, precision="fp8") as runtime, pytest.raises(TypeError, match=r"x is torch.float32"):
        run(case, runtime)
