# SPDX-License-Identifier: Apache-2.0
"""Every bad input of a call: a typed error before anything runs, which says what, got, need and what to do."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from prime_kernels import MegaMoEConfig, MegaMoERuntime, mega_moe
from prime_kernels.errors import PrimeKernelsError, RuntimeClosedError, ShapeError, UnsupportedConfig
from tests.helpers.cases import make_case
from tests.helpers.layer import assert_same_bits, config_of, leaves_of, open_runtime, run

CASE = make_case(tokens=12)
X, SCORES, GATE_UP, DOWN = (tensor.detach() for tensor in leaves_of(CASE))
IDS = CASE.topk_ids
EXPERTS, HIDDEN, INTER = DOWN.shape


def shifted(tensor, elements=1):
    """The same values at a storage offset that breaks 16-byte alignment."""
    storage = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)
    out = storage[elements:].view(tensor.shape)
    out.copy_(tensor)
    return out


def strided(tensor):
    """The same values, last axis not contiguous."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def with_id(value):
    ids = IDS.clone()
    ids[3, 1] = value
    return ids


BAD = {
    "x in three dimensions": ({"x": X[None]}, ShapeError, ["x is [1, 12, 64]", "[T, 64]"]),
    "x of another width": ({"x": X[:, :32].contiguous()}, ShapeError, ["x is [12, 32]", "[T, 64]"]),
    "x is no tensor": ({"x": [1.0]}, ShapeError, ["x is a list"]),
    "x in integers": ({"x": X.int()}, TypeError, ["x is torch.int32", "torch.bfloat16"]),
    "x as a column slice": ({"x": torch.cat([X, X], 1)[:, :HIDDEN]}, UnsupportedConfig, ["x is", "strides [128, 1]"]),
    "x with padded rows": ({"x": torch.zeros(12, 80).bfloat16()[:, :64]}, UnsupportedConfig, ["strides [80, 1]"]),
    "x off alignment": ({"x": shifted(X)}, UnsupportedConfig, ["x starts 2 bytes past", "16-byte"]),
    "x over the cap": (
        {"x": X.repeat(6, 1), "topk_ids": IDS.repeat(6, 1), "topk_weights": SCORES.repeat(6, 1)},
        ShapeError,
        ["x has 72 tokens", "max_tokens_per_rank is 64", "model.moe.dispatch.max_tokens_per_rank"],
    ),
    "x on another device": ({"x": X.to("meta")}, ShapeError, ["x is on meta", "cpu"]),
    "ids of another topk": ({"topk_ids": IDS[:, :1].contiguous()}, ShapeError, ["topk_ids is [12, 1]", "[12, 2]"]),
    "ids of another length": ({"topk_ids": IDS[:5]}, ShapeError, ["topk_ids is [5, 2]"]),
    "ids in int16": ({"topk_ids": IDS.short()}, TypeError, ["topk_ids is torch.int16", "torch.int64"]),
    "ids in floats": ({"topk_ids": IDS.float()}, TypeError, ["topk_ids is torch.float32"]),
    "ids with strides": ({"topk_ids": IDS.t().contiguous().t()}, UnsupportedConfig, ["topk_ids is [12, 2]", "strides"]),
    "an id of E": ({"topk_ids": with_id(8)}, ShapeError, ["topk_ids[3, 1] is 8", "0..7", "1 of 24"]),
    "an id of -2": ({"topk_ids": with_id(-2)}, ShapeError, ["topk_ids[3, 1] is -2"]),
    "a huge id": ({"topk_ids": with_id(2**31 - 1)}, ShapeError, ["topk_ids[3, 1] is 2147483647"]),
    "weights of another length": ({"topk_weights": SCORES[:3]}, ShapeError, ["topk_weights is [3, 2]"]),
    "weights in float64": ({"topk_weights": SCORES.double()}, TypeError, ["topk_weights is torch.float64"]),
    "expanded weights": (
        {"topk_weights": SCORES[:, :1].expand(12, 2)},
        UnsupportedConfig,
        ["topk_weights is [12, 2]", "strides"],
    ),
    "half the experts": (
        {"w_gate_up": GATE_UP[:4]},
        ShapeError,
        ["w_gate_up is [4, 256, 64]", "[8, 256, 64]", "8 of 8"],
    ),
    "transposed gate/up": (
        {"w_gate_up": GATE_UP.transpose(1, 2).contiguous()},
        ShapeError,
        ["w_gate_up is [8, 64, 256]", "convert_gate_up"],
    ),
    "a strided gate/up": (
        {"w_gate_up": GATE_UP.transpose(1, 2).contiguous().transpose(1, 2)},
        UnsupportedConfig,
        ["w_gate_up"],
    ),
    "gate/up off alignment": ({"w_gate_up": shifted(GATE_UP)}, UnsupportedConfig, ["w_gate_up starts 2 bytes"]),
    "gate/up in fp32": ({"w_gate_up": GATE_UP.float()}, TypeError, ["w_gate_up is torch.float32", "torch.bfloat16"]),
    "three gate/up tensors": ({"w_gate_up": (GATE_UP,) * 3}, ShapeError, ["w_gate_up is a sequence of 3"]),
    "a pair of packed tensors": ({"w_gate_up": (GATE_UP, GATE_UP)}, ShapeError, ["w_gate_up[0] is [8, 256, 64]"]),
    "an up of another shape": (
        {"w_gate_up": (CASE.w_gate, CASE.w_up[:, :64].contiguous())},
        ShapeError,
        ["w_gate_up[1] is [8, 64, 64]"],
    ),
    "an up off alignment": (
        {"w_gate_up": (CASE.w_gate, shifted(CASE.w_up))},
        UnsupportedConfig,
        ["w_gate_up[1] starts"],
    ),
    "a transposed down": ({"w_down": DOWN.transpose(1, 2).contiguous()}, ShapeError, ["w_down is [8, 128, 64]"]),
    "a down in fp16": ({"w_down": DOWN.half()}, TypeError, ["w_down is torch.float16"]),
    "a strided down": ({"w_down": strided(DOWN)}, UnsupportedConfig, ["w_down is"]),
    "another precision": ({"precision": "fp8"}, UnsupportedConfig, ["precision is 'fp8'", "'bf16'"]),
    "an unknown save mode": ({"save": "all"}, UnsupportedConfig, ["save is 'all'", "'preact'"]),
    "an unknown wgrad": ({"wgrad": "fused"}, UnsupportedConfig, ["wgrad is 'fused'", "'main_grad'"]),
}


def call(runtime, **changes):
    arguments = {"x": X, "topk_ids": IDS, "topk_weights": SCORES, "w_gate_up": GATE_UP, "w_down": DOWN, **changes}
    return mega_moe(**arguments, runtime=runtime)


@pytest.mark.parametrize("fault", BAD)
def test_bad_arguments_raise_a_typed_error_that_names_them(fault):
    changes, kind, words = BAD[fault]
    with open_runtime(CASE, max_tokens_per_rank=64) as runtime:
        expected = run(CASE, runtime)
        for _ in range(3):
            with pytest.raises(kind) as caught:
                call(runtime, **changes)
            error = caught.value
            assert isinstance(error, PrimeKernelsError)
            assert isinstance(error, ValueError)
            for word in words:
                assert word in str(error), str(error)
            assert error.facts["argument"]
            assert error.remedy
            assert error.code in ("E41", "E42")
        before = runtime.stats().forwards
        with pytest.raises(kind):
            call(runtime, **changes)
        assert runtime.stats().forwards == before
        assert_same_bits(run(CASE, runtime), expected)


def test_the_good_call_of_the_table_works():
    with open_runtime(CASE, max_tokens_per_rank=64) as runtime:
        assert call(runtime).isfinite().all()
        assert call(runtime, w_gate_up=shifted(GATE_UP, 8)).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden": 96}, ["hidden=96", "64", "128"]),
        ({"hidden": 64, "precision": "fp8"}, ["hidden=64", "128", "'fp8'"]),
        ({"intermediate": 2881}, ["intermediate=2881", "2880"]),
        ({"intermediate": 0}, ["intermediate is 0"]),
        ({"num_experts": 0}, ["num_experts is 0"]),
        ({"num_experts": 70000}, ["num_experts is 70000", "65535"]),
        ({"topk": 33}, ["topk is 33", "1..32"]),
        ({"topk": 1.0}, ["topk is 1.0"]),
        ({"max_tokens_per_rank": 0}, ["max_tokens_per_rank is 0"]),
        ({"max_tokens_per_rank": 10**12}, ["max_tokens_per_rank=1000000000000", "bytes"]),
        ({"precision": "fp4"}, ["precision is 'fp4'", "'mxfp8'"]),
        ({"save": "none"}, ["save is 'none'", "'inputs'"]),
        ({"backend": "triton"}, ["backend is 'triton'", "'reference'"]),
        ({"engine": "cutlass"}, ["engine is 'cutlass'"]),
        ({"activation": "gelu"}, ["activation is 'gelu'", "SwiGLU"]),
        ({"capacity_factor": 0.0}, ["capacity_factor is 0.0"]),
        ({"capacity_factor": float("nan")}, ["capacity_factor is nan"]),
        ({"peer_timeout_s": -1}, ["peer_timeout_s is -1"]),
        ({"num_sms": 1}, ["num_sms is 1"]),
        ({"reserve_sms": -1}, ["reserve_sms is -1"]),
        ({"wgrad_dtype": torch.int32}, ["wgrad_dtype is torch.int32"]),
        ({"validate": 1}, ["validate is 1"]),
    ],
    ids=str,
)
def test_bad_config_fields_raise_on_construction(fields, words):
    good = {"num_experts": 8, "topk": 2, "hidden": 64, "intermediate": 128, "max_tokens_per_rank": 64}
    assert MegaMoEConfig(**good).replace(topk=3).topk == 3
    for build in (lambda: MegaMoEConfig(**{**good, **fields}), lambda: MegaMoEConfig(**good).replace(**fields)):
        with pytest.raises(UnsupportedConfig) as caught:
            build()
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert caught.value.facts["argument"] in fields or "activation" in fields


def test_an_unknown_config_field_is_named():
    with pytest.raises(UnsupportedConfig, match="no field 'top_k'"):
        config_of(CASE).replace(top_k=2)


def test_a_closed_runtime_refuses_calls_and_closes_twice():
    with open_runtime(CASE) as runtime:
        x, scores, gate_up, down = leaves_of(CASE)
        y = mega_moe(x, IDS, scores, gate_up, down, runtime=runtime)
        runtime.close()
        runtime.close()
        with pytest.raises(RuntimeClosedError, match=r"after close\(\)") as caught:
            call(runtime)
        assert caught.value.code == "E62"
        assert caught.value.facts == {"id": runtime.id}
        assert "MegaMoERuntime.create" in caught.value.remedy
        with pytest.raises(RuntimeClosedError):
            y.sum().backward()
        with pytest.raises(RuntimeClosedError):
            runtime.check()
        with pytest.raises(RuntimeClosedError):
            runtime.warmup()


def test_a_wrong_weight_gradient_dtype_is_refused():
    with (
        open_runtime(CASE, wgrad_dtype=torch.float16) as runtime,
        pytest.raises(UnsupportedConfig, match="wgrad_dtype"),
    ):
        call(runtime)


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    torch.distributed.destroy_process_group()


def test_distributed_tokens_are_refused(mesh):
    with open_runtime(CASE, max_tokens_per_rank=64) as runtime:
        with pytest.raises(ShapeError, match="x is a DTensor"):
            call(runtime, x=DTensor.from_local(X, mesh, [Replicate()]))
        # On a mesh of one rank every placement is a whole tensor.
        assert torch.equal(call(runtime, w_down=DTensor.from_local(DOWN, mesh, [Shard(1)])), call(runtime))


def test_a_group_beside_a_runtime_must_be_its_group(mesh):
    two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
    with pytest.raises(UnsupportedConfig, match="DeviceMesh with 2 dimensions"):
        MegaMoERuntime.create(config_of(CASE), group=two, device="cpu")
    with MegaMoERuntime.create(config_of(CASE), group=mesh, device="cpu") as runtime:
        assert runtime.ep_size == 1
        assert call(runtime, group=two["ep"]).shape == X.shape
        with pytest.raises(UnsupportedConfig, match="group is 'ep'"):
            call(runtime, group="ep")
