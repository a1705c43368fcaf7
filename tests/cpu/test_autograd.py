# SPDX-License-Identifier: Apache-2.0
"""How gradients reach the trainer: microbatches, checkpointing, main_grad, DTensors, dtypes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from prime_kernels import mega_moe
from prime_kernels.errors import ConfigMismatch, ShapeError, UnsupportedConfig
from prime_kernels.moe import checkpoint as moe_checkpoint
from tests.helpers.cases import assert_close, dense_oracle, make_case
from tests.helpers.layer import assert_same_bits, leaves_of, open_runtime, result_of, run

KEEPS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # from torch 2.10 on


@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
def test_three_microbatches_in_flight_equal_one_by_one(save):
    cases = [make_case(tokens=tokens, seed=tokens) for tokens in (40, 0, 65)]
    with open_runtime(cases[0], save=save) as runtime:
        expected = [run(case, runtime) for case in cases]
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            leaves = [leaves_of(case) for case in cases]
            ys = [
                mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime)
                for case, (x, scores, gate_up, down) in zip(cases, leaves, strict=True)
            ]
            for index in order:
                ys[index].backward(cases[index].dy)
            for y, case_leaves, want in zip(ys, leaves, expected, strict=True):
                assert_same_bits(result_of(y, *case_leaves), want)


def test_gradients_accumulate_over_microbatches():
    cases = [make_case(tokens=20, seed=seed, dtype=torch.float32) for seed in range(3)]
    x, scores, gate_up, down = leaves_of(cases[0])
    with open_runtime(cases[0]) as runtime:
        shared = [case.change(w_gate=cases[0].w_gate, w_up=cases[0].w_up, w_down=cases[0].w_down) for case in cases]
        for case in shared:
            mega_moe(case.x, case.topk_ids, case.topk_weights, gate_up, down, runtime=runtime).backward(case.dy)
        singles = [run(case, runtime) for case in shared]
    assert torch.equal(down.grad, singles[0].dw_down + singles[1].dw_down + singles[2].dw_down)
    assert x.grad is None
    assert scores.grad is None


def wrap(kind, layer):
    if kind == "none":
        return layer
    if kind == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, moe_checkpoint.policy())
        return functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    return functools.partial(checkpoint, layer, use_reentrant=kind == "reentrant")


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_bwd", "mxfp8"])
@pytest.mark.parametrize("save", ["preact", "inputs"])
@pytest.mark.parametrize(
    ("kind", "forwards"), [("none", 1), ("full", 2), ("reentrant", 2), ("selective", 1)], ids=lambda v: str(v)
)
def test_checkpointing_runs_the_stated_forwards_and_changes_no_bits(kind, forwards, save, precision):
    case = make_case(tokens=24, hidden=128, experts=4)
    with open_runtime(case, save=save, precision=precision) as runtime:
        expected = run(case, runtime)
        for _ in range(3):
            x, scores, gate_up, down = leaves_of(case)

            def layer(x, scores, gate_up=gate_up, down=down):
                # Elementwise work on both sides, as in a block: the region saves more than the op's own tensors.
                y = mega_moe(x * 1, case.topk_ids, scores, gate_up, down, runtime=runtime, precision=precision)
                return y * 1

            before = runtime.stats()
            y = wrap(kind, layer)(x, scores)
            y.backward(case.dy)
            after = runtime.stats()
            assert after.forwards - before.forwards == forwards
            assert after.backwards - before.backwards == 1
            assert_same_bits(result_of(y, x, scores, gate_up, down), expected)


def test_a_save_list_of_the_ops_works_like_the_policy():
    case = make_case(tokens=24)
    assert {str(op) for op in moe_checkpoint.save_ops()} == {
        "prime_kernels.mega_moe_fwd.default",
        "prime_kernels.mega_moe_fwd_preact.default",
    }
    contexts = functools.partial(create_selective_checkpoint_contexts, list(moe_checkpoint.save_ops()))
    with open_runtime(case, save="inputs") as runtime:
        x, scores, gate_up, down = leaves_of(case)
        layer = functools.partial(mega_moe, runtime=runtime)
        y = checkpoint(layer, x, case.topk_ids, scores, gate_up, down, use_reentrant=False, context_fn=contexts)
        y.backward(case.dy)
        assert runtime.stats().forwards == 1
    with open_runtime(case) as runtime:
        assert_same_bits(result_of(y, x, scores, gate_up, down), run(case, runtime))


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_ids_that_change_in_recomputation_raise_or_are_right(kind):
    case = make_case(tokens=24)
    other = case.topk_ids.clone()
    other[7, 1] = (other[7].max() + 1) % 8 if (other[7].max() + 1) % 8 not in other[7] else (other[7].min() - 1) % 8
    draws = iter([case.topk_ids, other])
    with open_runtime(case, save="inputs") as runtime:
        x, scores, gate_up, down = leaves_of(case)

        def layer(x, scores):
            return mega_moe(x, next(draws), scores, gate_up, down, runtime=runtime)

        y = wrap(kind, layer)(x, scores)
        if kind == "selective":
            with pytest.raises(ConfigMismatch, match=r"topk_ids changed .* 1 of 48 .* token 7, slot 1"):
                y.backward(case.dy)
            return
        y.backward(case.dy)
        # Full recomputation takes the second routing for everything that backward uses.
        actual, expected = result_of(y, x, scores, gate_up, down), run(case.change(topk_ids=other), runtime)
        assert_same_bits(actual._replace(y=expected.y), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", [False, True], ids=["packed", "pair"])
def test_main_grad_accumulates_in_backward(pair, dtype):
    case = make_case(tokens=40)
    case.topk_ids[case.topk_ids >= 5] = 0
    with open_runtime(case) as runtime:
        x, scores, *_ = leaves_of(case)
        params = [t.detach().clone().requires_grad_() for t in (case.w_gate, case.w_up, case.w_down)]
        if not pair:
            params = [case.w_gate_up.requires_grad_(), params[2]]
        start = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(dtype) for p in params]
        for param, value in zip(params, start, strict=True):
            param.main_grad = value.clone()
        weights = (params[0], params[1]) if pair else params[0]
        steps = []
        for _ in range(3):
            before = [p.main_grad.clone() for p in params]
            y = mega_moe(x, case.topk_ids, scores, weights, params[-1], runtime=runtime, wgrad="main_grad")
            y.backward(case.dy)
            steps.append([p.main_grad - b for p, b in zip(params, before, strict=True)])
            assert all(p.grad is None for p in params)
        for param, value in zip(params, start, strict=True):
            assert torch.equal(param.main_grad[5:], value[5:]), "empty experts are untouched"
            assert not torch.equal(param.main_grad[:5], value[:5])
        expected = dense_oracle(case)
        wanted = [expected.dw_gate, expected.dw_up, expected.dw_down]
        wanted = wanted if pair else [torch.cat(wanted[:2], 1), wanted[2]]
        for got, want in zip(steps[0], wanted, strict=True):
            bound = 8e-3 if dtype is torch.float32 else 2e-1  # bf16 main_grad of order 1 swallows small gradients
            assert float((got.double() - want).norm() / want.norm()) <= bound


def test_main_grad_sets_the_flag_and_leaves_a_dummy_gradient():
    case = make_case(tokens=16)
    with open_runtime(case) as runtime:
        x, scores, gate_up, down = leaves_of(case)
        fired = []
        for param in (gate_up, down):
            param.main_grad = torch.zeros(param.shape)
            param.grad_added_to_main_grad = False
            param.register_post_accumulate_grad_hook(lambda p: fired.append(p.shape))
        mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime, wgrad="main_grad").backward(case.dy)
        assert len(fired) == 2
        for param in (gate_up, down):
            assert param.grad_added_to_main_grad
            assert float(param.main_grad.norm()) > 0
            assert float(param.grad.abs().max()) == 0
        assert float(x.grad.norm()) > 0


@pytest.mark.parametrize("kind", ["full", "reentrant", "selective"])
def test_main_grad_is_added_once_under_checkpointing(kind):
    case = make_case(tokens=16)
    totals = []
    for how in ("none", kind):
        with open_runtime(case) as runtime:
            x, scores, gate_up, down = leaves_of(case)
            for param in (gate_up, down):
                param.main_grad = torch.zeros(param.shape)

            def layer(x, scores, gate_up=gate_up, down=down, runtime=runtime):
                return mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime, wgrad="main_grad")

            wrap(how, layer)(x, scores).backward(case.dy)
            totals.append((gate_up.main_grad, down.main_grad))
    assert float(totals[0][0].norm()) > 0
    assert all(torch.equal(a, b) for a, b in zip(*totals, strict=True))


@pytest.mark.parametrize("frozen", ["w_gate_up", "w_down", "both"])
def test_frozen_weights_need_no_main_grad(frozen):
    case = make_case(tokens=16)
    with open_runtime(case, wgrad_dtype=torch.float32) as runtime:
        x, scores, gate_up, down = leaves_of(case)
        for name, param in (("w_gate_up", gate_up), ("w_down", down)):
            param.requires_grad_(frozen not in (name, "both"))
            if param.requires_grad:
                param.main_grad = torch.zeros(param.shape)
        y = mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime, wgrad="main_grad")
        y.backward(case.dy)
        expected = run(case, runtime) if KEEPS_GRAD_DTYPE else None
    assert float(x.grad.norm()) > 0
    if expected is not None and frozen == "w_gate_up":
        assert torch.equal(down.main_grad, expected.dw_down)
    if expected is not None and frozen == "w_down":
        assert torch.equal(gate_up.main_grad, torch.cat([expected.dw_gate, expected.dw_up], dim=1))


def test_bad_main_grad_buffers_are_named():
    case = make_case(tokens=16)
    with open_runtime(case) as runtime:
        x, scores, gate_up, down = leaves_of(case)
        call = functools.partial(mega_moe, x, case.topk_ids, scores, gate_up, down, runtime=runtime, wgrad="main_grad")
        with pytest.raises(ShapeError, match=r"w_gate_up.main_grad is missing"):
            call()
        gate_up.main_grad = torch.zeros(gate_up.shape)
        down.main_grad = torch.zeros(3)
        with pytest.raises(ShapeError, match=r"w_down.main_grad is \[3\]"):
            call()
        down.main_grad = torch.zeros(down.shape, dtype=torch.bfloat16)
        with pytest.raises(ShapeError, match="main_grad dtypes differ"):
            call()


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wgrad_dtype", [None, torch.float32] if KEEPS_GRAD_DTYPE else [None], ids=str)
def test_dtensor_leaves_get_dtensor_gradients_in_the_asked_dtype(mesh, wgrad_dtype):
    case = make_case(tokens=40)
    with open_runtime(case, wgrad_dtype=wgrad_dtype) as runtime, open_runtime(case) as plain:
        expected = run(case, plain)
        for _ in range(3):
            x, scores, *_ = leaves_of(case)
            weights = (case.w_gate_up, case.w_down)
            gate_up, down = (DTensor.from_local(w, mesh, [Shard(0)]).requires_grad_() for w in weights)
            y = mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime)
            y.backward(case.dy)
            for leaf in (gate_up, down):
                assert isinstance(leaf.grad, DTensor)
                assert leaf.grad.placements == (Shard(0),)
                assert leaf.grad.shape == leaf.shape
                assert leaf.grad.to_local().dtype == (wgrad_dtype or torch.bfloat16)
            rounded = [leaf.grad.to_local().to(torch.bfloat16) for leaf in (gate_up, down)]
            dw_gate, dw_up = rounded[0].chunk(2, dim=1)
            actual = expected._replace(y=y.detach(), dx=x.grad, dw_gate=dw_gate, dw_up=dw_up, dw_down=rounded[1])
            assert_same_bits(actual, expected)


def test_fp32_weight_gradients_are_not_rounded():
    case = make_case(tokens=40)
    with open_runtime(case, wgrad_dtype=torch.float32) as runtime:
        x, scores, gate_up, down = leaves_of(case)
        if not KEEPS_GRAD_DTYPE:
            with pytest.raises(UnsupportedConfig, match=r"no Tensor.grad_dtype use wgrad=\"main_grad\""):
                mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime)
            return
        mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime).backward(case.dy)
        assert gate_up.grad.dtype == down.grad.dtype == torch.float32
        assert not torch.equal(down.grad, down.grad.bfloat16().float())
        # A second microbatch adds in fp32 as well.
        first = down.grad.clone()
        mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime).backward(case.dy)
        assert torch.equal(down.grad, first + first)
    with open_runtime(case) as plain, open_runtime(case, wgrad_dtype=torch.float32) as runtime:
        assert torch.equal(run(case, plain).dw_down, first.bfloat16())
        x, scores, gate_up, down = leaves_of(case)
        mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=plain).backward(case.dy)
        with pytest.raises(UnsupportedConfig, match=r"holds a gradient of torch.bfloat16"):
            mega_moe(x, case.topk_ids, scores, gate_up, down, runtime=runtime)


def test_packed_pair_and_four_dimensional_weights_give_the_same_bits():
    case = make_case(tokens=40)
    with open_runtime(case) as runtime:
        expected = run(case, runtime)
        x, scores, _, down = leaves_of(case)
        gate, up = case.w_gate.clone().requires_grad_(), case.w_up.clone().requires_grad_()
        y = mega_moe(x, case.topk_ids, scores, (gate, up), down, runtime=runtime)
        y.backward(case.dy)
        assert_same_bits(expected, (y.detach(), x.grad, scores.grad, gate.grad, up.grad, down.grad))
        x, scores, gate_up, down = leaves_of(case)
        four = gate_up.detach().view(8, 2, 128, 64).requires_grad_()
        y = mega_moe(x, case.topk_ids, scores, four, down, runtime=runtime)
        y.backward(case.dy)
        assert four.grad.shape == four.shape
        assert_same_bits(expected, (y.detach(), x.grad, scores.grad, four.grad[:, 0], four.grad[:, 1], down.grad))
        # One frozen half of a pair.
        gate.grad, up = None, up.detach()
        mega_moe(x.detach(), case.topk_ids, scores.detach(), (gate, up), down.detach(), runtime=runtime).backward(
            case.dy
        )
        assert torch.equal(gate.grad, expected.dw_gate)


def test_a_chain_of_layers_trains():
    cases = [make_case(seed=seed, dtype=torch.float32) for seed in range(2)]
    leaves = [leaves_of(case) for case in cases]
    with open_runtime(cases[0]) as runtime:
        losses = []
        for _ in range(3):
            h = cases[0].x
            for case, (_, scores, gate_up, down) in zip(cases, leaves, strict=True):
                h = h + mega_moe(h, case.topk_ids, scores, gate_up, down, runtime=runtime)
            loss = (h - cases[0].dy).square().mean()
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for leaf in [leaf for group in leaves for leaf in group[1:]]:
                    leaf -= 0.5 * leaf.grad
                    leaf.grad = None
    assert losses[2] < losses[1] < losses[0]


def test_sharding_inside_experts_is_refused():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        case = make_case(tokens=16)
        with open_runtime(case) as runtime:
            x, scores, gate_up, down = leaves_of(case)
            for placement, word in ((Shard(1), r"Shard\(dim=1\)|S\(1\)"), (Replicate(), "Replicate|R")):
                local = down.detach()[:, :32].contiguous() if placement.is_shard() else down.detach()
                sharded = DTensor.from_local(local, mesh, [placement], run_check=False)
                with pytest.raises(UnsupportedConfig, match=f"w_down is a DTensor with placement ({word}) over 2"):
                    mega_moe(x, case.topk_ids, scores, gate_up, sharded, runtime=runtime)
            half = DTensor.from_local(down.detach()[:4], mesh, [Shard(0)], run_check=False)
            with pytest.raises(ShapeError, match=r"w_down is \[4, 64, 128\].*so that FSDP has gathered"):
                mega_moe(x, case.topk_ids, scores, gate_up, half, runtime=runtime)
    finally:
        torch.distributed.destroy_process_group()


def test_oracle_and_layer_agree_after_all_of_this():
    case = make_case(tokens=40, dtype=torch.float32)
    with open_runtime(case) as runtime:
        assert_close(run(case, runtime), dense_oracle(case), 5e-6)
