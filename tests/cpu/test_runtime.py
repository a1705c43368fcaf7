# SPDX-License-Identifier: Apache-2.0
"""Creating, selecting, sharing and describing runtimes on one rank; the module around the op."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from prime_kernels import MegaMoEConfig, MegaMoEExperts, MegaMoERuntime, mega_moe, plan_memory, unsupported_reason
from prime_kernels.errors import BackendUnavailable, UnsupportedConfig
from prime_kernels.moe import auto, backends
from prime_kernels.moe.backend import preact_rows
from tests.helpers.cases import make_case
from tests.helpers.layer import assert_same_bits, config_of, leaves_of, open_runtime, result_of, run

CASE = make_case(tokens=24)


@pytest.fixture
def no_auto_runtimes(monkeypatch):
    monkeypatch.setattr(auto, "_runtimes", {})


def test_auto_takes_the_reference_on_a_cpu():
    with open_runtime(CASE, backend="auto") as runtime:
        assert runtime.backend == "reference"
        assert runtime.device == torch.device("cpu")
        assert (runtime.ep_rank, runtime.ep_size, runtime.num_local_experts) == (0, 1, 8)
        assert runtime.stats().backend == "reference"
        assert runtime.stats().precision == "bf16"


def test_auto_on_a_gpu_never_falls_back_unless_asked(monkeypatch, caplog):
    monkeypatch.setattr(backends, "_HOME", {**backends._HOME, "cuda": ("no_such_module", "CudaBackend")})
    backends.get_backend.cache_clear()
    backends.log_fallback.cache_clear()
    config = config_of(CASE, backend="auto")
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="no 'cuda' backend of mega_moe") as caught:
            MegaMoERuntime.create(config, device="cuda:0")
    assert caught.value.code == "E09"
    assert "allow_fallback=True" in caught.value.remedy
    assert unsupported_reason(config, device="cuda:0") == str(caught.value)
    with caplog.at_level(logging.WARNING, logger="prime_kernels"):
        for _ in range(3):
            with MegaMoERuntime.create(config.replace(allow_fallback=True), device="cuda:0") as runtime:
                assert runtime.backend == "reference"
    warnings = [record for record in caplog.records if "allow_fallback" in record.getMessage()]
    assert len(warnings) == 1
    assert "no 'cuda' backend" in warnings[0].getMessage()
    # A named backend is never replaced.
    with pytest.raises(BackendUnavailable):
        MegaMoERuntime.create(config.replace(backend="cuda", allow_fallback=True), device="cuda:0")
    backends.get_backend.cache_clear()


def test_the_fused_backend_refuses_a_cpu():
    with pytest.raises(BackendUnavailable, match='backend="cuda" got device cpu'):
        MegaMoERuntime.create(config_of(CASE, backend="cuda"), device="cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_the_loaders_reason_keeps_its_code(device, monkeypatch):
    reason = "no NVIDIA driver library on this host. Install the driver. [E01]"
    fused = type(backends.get_backend("cuda"))
    asked = []
    monkeypatch.setattr(fused, "unavailable_reason", lambda self, device, config: asked.append(device) or reason)
    config = config_of(CASE, backend="auto")
    with pytest.raises(BackendUnavailable) as caught:
        MegaMoERuntime.create(config, device=device)
    assert str(caught.value) == reason
    assert caught.value.code == "E01"
    assert unsupported_reason(config, device=device) == reason
    assert asked == [torch.device("cuda", 0)] * 2


def test_reasons_are_pure_and_equal_what_create_raises():
    config = config_of(CASE)
    assert unsupported_reason(config) is None
    assert unsupported_reason(config, device="cpu") is None
    assert "num_experts=8 is not divisible by ep_size=3" in unsupported_reason(config, ep_size=3)
    assert "ep_size is 0" in unsupported_reason(config, ep_size=0)
    quantised = config_of(make_case(hidden=128), precision="fp8", backend="auto")
    assert unsupported_reason(quantised, device="cpu") is None
    assert "no fused CUDA kernel" in unsupported_reason(quantised, device="cuda")
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_the_memory_plan_follows_its_formula(ep_size):
    t, k, h, i, e = 1000, 4, 256, 512, 64
    config = MegaMoEConfig(num_experts=e, topk=k, hidden=h, intermediate=i, max_tokens_per_rank=t, capacity_factor=1.5)
    plan = plan_memory(config, ep_size=ep_size)
    # Experts start at multiples of 64 rows; a group's pool holds all that all ranks can send.
    rows = (ep_size * t * k + 63 * (e // ep_size) + 63) // 64 * 64
    parts = (4 * 8 * 128, 8 * e * 4, rows * 16, 2 * t * h, 2 * t * h, 2 * t * k * h, 4 * t * k)
    arena = 4096 + sum(-(-part // 256) * 256 for part in parts)
    assert plan.pool_rows == rows
    assert plan.symmetric_bytes == (0 if ep_size == 1 else arena)
    assert plan.max_recv_rows == ep_size * t * k
    assert plan.prepared_bytes_per_layer == 0
    results = rows * (2 * h + 4) + rows * 4 * 2
    counters = (2 if ep_size == 1 else 3) * rows // 16  # a group also counts rows of dx that may be sent
    assert plan.workspace_bytes == rows * 2 * (2 * h + 3 * i) + results + counters
    saved = {save: plan_memory(config.replace(save=save), ep_size=ep_size) for save in ("inputs", "preact", "full")}
    assert saved["preact"].saved_bytes_per_layer - saved["inputs"].saved_bytes_per_layer == rows * 4 * i
    assert saved["full"].saved_bytes_per_layer - saved["preact"].saved_bytes_per_layer == rows * 2 * h
    assert f"{plan.pool_rows}" in plan.explain()
    assert plan_memory(config.replace(backend="grouped"), ep_size=ep_size).symmetric_bytes == 0
    with pytest.raises(UnsupportedConfig, match="not divisible"):
        plan_memory(config, ep_size=3)


def test_the_pool_scales_with_its_factor_and_not_with_skew():
    config = config_of(CASE)
    assert preact_rows(config, num_tokens=100, ep_size=1) == 200
    rows = [
        preact_rows(config.replace(capacity_factor=factor), num_tokens=1000, ep_size=2) for factor in (1.0, 2.0, 4.0)
    ]
    # 2000 routes times the factor, rounded up to 128, and a block of 128 for each of 4 local experts.
    assert rows == [2048 + 512, 4096 + 512, 8064 + 512]


def test_statistics_count_launches():
    with open_runtime(CASE) as runtime:
        for step in range(3):
            run(CASE, runtime)
            assert (runtime.stats().forwards, runtime.stats().backwards) == (step + 1, step + 1)
        runtime.check()
        runtime.synchronize()
        runtime.warmup((1, 24))
        assert runtime.stats().forwards == 3
        assert "reference" in repr(runtime)


def test_a_runtime_holds_no_tensor_and_dies_with_its_last_reference():
    runtime = MegaMoERuntime.create(config_of(CASE), device="cpu")
    alive = weakref.ref(runtime)
    x, scores, gate_up, down = leaves_of(CASE)
    y = mega_moe(x, CASE.topk_ids, scores, gate_up, down, runtime=runtime)
    graph = weakref.ref(y.grad_fn)
    del runtime
    gc.collect()
    assert alive() is not None, "the graph still needs it"
    y.backward(CASE.dy)
    del y
    gc.collect()
    assert graph() is None
    assert alive() is None


def test_memory_is_flat_over_many_calls_and_layers():
    layers = [make_case(tokens=8, seed=seed) for seed in range(6)]
    with open_runtime(CASE) as runtime:
        counts = []
        for repeat in range(4):
            for case in layers * 5:
                run(case, runtime)
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
            assert runtime.stats().forwards == 30 * (repeat + 1)
    assert counts[1] == counts[2] == counts[3]


@pytest.mark.usefixtures("no_auto_runtimes")
def test_without_a_runtime_one_is_made_per_shape_and_kept():
    with open_runtime(CASE) as runtime:
        expected = run(CASE, runtime)
    for _ in range(3):
        x, scores, gate_up, down = leaves_of(CASE)
        y = mega_moe(x, CASE.topk_ids, scores, gate_up, down)
        y.backward(CASE.dy)
        assert_same_bits(result_of(y, x, scores, gate_up, down), expected)
    assert len(auto._runtimes) == 1
    wider = make_case(tokens=4, hidden=128)
    mega_moe(wider.x, wider.topk_ids, wider.topk_weights, wider.w_gate_up, wider.w_down)
    assert len(auto._runtimes) == 2


@pytest.mark.usefixtures("no_auto_runtimes")
def test_the_runtime_made_on_first_use_grows_with_the_batch():
    case = make_case(tokens=5000, intermediate=64, experts=2, topk=1)
    x, scores, gate_up, down = leaves_of(CASE)
    small = make_case(tokens=10, intermediate=64, experts=2, topk=1)
    x, scores, gate_up, down = leaves_of(small)
    y = mega_moe(x, small.topk_ids, scores, gate_up, down)
    mega_moe(case.x, case.topk_ids, case.topk_weights, gate_up, down)
    (runtime,) = auto._runtimes.values()
    assert runtime.config.max_tokens_per_rank == 8192
    y.backward(small.dy)
    assert float(x.grad.norm()) > 0


@pytest.mark.usefixtures("no_auto_runtimes")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_call_needs_a_runtime(use_reentrant):
    x, scores, gate_up, down = leaves_of(CASE)
    for _ in range(2):
        with pytest.raises(UnsupportedConfig, match=r"MegaMoERuntime.create") as caught:
            checkpoint(mega_moe, x, CASE.topk_ids, scores, gate_up, down, use_reentrant=use_reentrant)
        assert caught.value.facts["argument"] == "runtime"
        # One that exists by now changes nothing: the rule is the same on every rank and in every step.
        mega_moe(x, CASE.topk_ids, scores, gate_up, down)
    # torch 2.9 leaves its saved-tensor hooks in force until the frames of an error inside a checkpoint are gone.
    del caught
    gc.collect()


def experts_of(case, config, **arguments):
    module = MegaMoEExperts(config, **arguments)
    with torch.no_grad():
        module.w_gate_up.copy_(case.w_gate_up)
        module.w_down.copy_(case.w_down)
    return module


def test_the_module_is_the_op_with_its_weights():
    config = config_of(CASE)
    module = experts_of(CASE, config)
    assert set(module.state_dict()) == {"w_gate_up", "w_down"}
    with pytest.raises(UnsupportedConfig, match="has no runtime"):
        module(CASE.x, CASE.topk_ids, CASE.topk_weights)
    with MegaMoERuntime.create(config, device="cpu") as runtime:
        module.bind(runtime)
        assert module.last_stats is None
        expected = run(CASE, runtime)
        for _ in range(3):
            module.zero_grad()
            x, scores, *_ = leaves_of(CASE)
            y = module(x, CASE.topk_ids, scores)
            y.backward(CASE.dy)
            assert_same_bits(result_of(y, x, scores, module.w_gate_up, module.w_down), expected)
        assert int(module.last_stats.tokens_per_expert.sum()) == 48
        assert set(module.state_dict()) == {"w_gate_up", "w_down"}


@pytest.mark.parametrize("policy", ["per_step", "per_gather", "on_call"])
@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "fp8_bwd"])
def test_every_weights_policy_trains_alike(precision, policy):
    case = make_case(tokens=24, hidden=128)
    config = config_of(case, precision=precision)
    losses = []
    with MegaMoERuntime.create(config, device="cpu") as runtime, MegaMoERuntime.create(config, device="cpu") as other:
        pair = [experts_of(case, config, weights_policy=policy), experts_of(case, config, weights_policy="on_call")]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in pair]
        for module, run_on, optimizer in zip(pair, (runtime, other), optimizers, strict=True):
            module.bind(run_on)
            run_on.attach_optimizer(optimizer)
        for _ in range(3):
            outputs = []
            for module, optimizer in zip(pair, optimizers, strict=True):
                optimizer.zero_grad()
                # Two microbatches in flight, as in a pipeline.
                ys = [module(case.x, case.topk_ids, case.topk_weights) for _ in range(2)]
                for y in ys:
                    y.backward(case.dy)
                optimizer.step()
                outputs.append(ys[0].detach())
            assert torch.equal(*outputs)
            losses.append(outputs[0])
    assert not torch.equal(losses[0], losses[1])


def test_the_module_refuses_what_does_not_fit():
    config = config_of(CASE)
    with pytest.raises(UnsupportedConfig, match="not divisible"):
        MegaMoEExperts(config, ep_size=3)
    with pytest.raises(UnsupportedConfig, match="weights_policy is 'never'"):
        MegaMoEExperts(config, weights_policy="never")
    module = MegaMoEExperts(config, ep_size=2, device="meta")
    assert module.w_down.shape == (4, 64, 128)
    with open_runtime(CASE) as runtime:
        with pytest.raises(UnsupportedConfig, match="ep_size 1; this module was made with 2"):
            module.bind(runtime)
        with pytest.raises(UnsupportedConfig, match="topk=2; this module was made with 3"):
            MegaMoEExperts(config.replace(topk=3)).bind(runtime)


def test_fresh_parameters_follow_their_fan_in():
    module = MegaMoEExperts(config_of(CASE), dtype=torch.float32)
    for weight, fan_in in ((module.w_gate_up, 64), (module.w_down, 128)):
        values = weight.detach()
        assert float(values.abs().max()) <= fan_in**-0.5
        assert float(values.std()) == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.05)
