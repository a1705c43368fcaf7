# SPDX-License-Identifier: Apache-2.0
"""What the cuda backend launches, without a GPU: kernels that exist, arguments that their structs have."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from prime_kernels import MegaMoEConfig, SwiGLU, plan_memory
from prime_kernels.loader import kernels
from prime_kernels.moe.backend import Needs
from prime_kernels.moe.cuda import CudaBackend
from prime_kernels.moe.cuda_variants import kept_rows, pool_rows
from tests.helpers.fake_loader import FakeLoader

ALL = Needs(True, True, True, True)


class Launches(FakeLoader):
    """Every launch with its arguments as the kernel would read them."""

    def names(self) -> list[str]:
        return [seen.name for seen in self.seen]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    spy = Launches()
    spy.stand_in(monkeypatch)
    return spy


def step(
    config: MegaMoEConfig, tokens: int, *, save: str = "preact", needs: Needs = ALL, pair: bool = False
) -> tuple[Any, Any]:
    e, h, i = config.num_experts, config.hidden, config.intermediate
    x, ids = torch.zeros(tokens, h, dtype=torch.bfloat16), torch.zeros(tokens, config.topk, dtype=torch.int64)
    weights = torch.zeros(tokens, config.topk)
    packed, down = torch.zeros(e, 2 * i, h, dtype=torch.bfloat16), torch.zeros(e, h, i, dtype=torch.bfloat16)
    gate_up: Any = tuple(t.contiguous() for t in packed.chunk(2, 1)) if pair else packed
    runtime: Any = type("Runtime", (), {})()
    runtime.config, runtime.device, runtime.peers = config, torch.device("cpu"), None
    runtime.num_local_experts = e
    backend = CudaBackend()
    backend._faults[runtime] = torch.zeros(8, dtype=torch.int32)
    forward = backend.forward(runtime, x, ids, weights, gate_up, down, save=save)
    backward = backend.backward(
        runtime, x, x, ids, weights, gate_up, down, forward.plan, forward.preact, needs=needs, wgrad_dtype=None
    )
    return forward, backward


def config_of(**fields: Any) -> MegaMoEConfig:
    sizes = {"num_experts": 5, "topk": 2, "hidden": 192, "intermediate": 320, "max_tokens_per_rank": 64}
    return MegaMoEConfig(**{**sizes, "backend": "cuda", **fields})


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 64])
@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
def test_every_launch_packs_against_the_kernels_own_structs(
    launches: Launches, save: str, tokens: int, pair: bool
) -> None:
    config = config_of()
    forward, backward = step(config, tokens, save=save, pair=pair)
    forward_names = ["pk_plan", "pk_gate_up", "pk_down", "pk_combine"]
    again = ["pk_gate_up"] if save == "inputs" else []
    backward_names = ["pk_prepare", *again, "pk_down_grad", "pk_gate_up_grad", "pk_wgrad", "pk_combine"]
    assert launches.names() == forward_names + backward_names
    assert forward.y.shape == backward.dx.shape == (tokens, 192)
    assert backward.dtopk_weights.shape == (tokens, 2)
    assert (forward.preact is None) == (save == "inputs")


def test_activation_class_and_gradient_type_choose_the_kernel(launches: Launches) -> None:
    step(config_of(activation=SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0)), 8)
    clamped = [seen.values() for seen in launches.seen if seen.name in ("pk_gate_up", "pk_down_grad")]
    assert [(a["clamp"], a["alpha"], a["up_offset"]) for a in clamped] == [(7.0, pytest.approx(1.702), 1.0)] * 2


@pytest.mark.parametrize(
    ("needs", "absent"),
    [
        (Needs(False, True, True, True), "pk_gate_up_grad"),
        (Needs(True, True, False, False), "pk_wgrad"),
        (Needs(False, False, True, True), "pk_combine"),
    ],
)
def test_gradients_that_are_not_needed_are_not_computed(launches: Launches, needs: Needs, absent: str) -> None:
    _, backward = step(config_of(), 8, needs=needs)
    assert absent not in launches.names()[4:]
    results = (backward.dx, backward.dtopk_weights, backward.dw_gate_up, backward.dw_down)
    assert [r is not None for r in results] == list(needs)


def test_rows_of_x_are_copied_again_only_where_they_are_read(launches: Launches) -> None:
    def copied(save: str, needs: Needs) -> str | None:
        launches.seen.clear()
        step(config_of(), 8, save=save, needs=needs)
        pulling = [seen.name for seen in launches.seen[4:] if seen.values().get("pull_src")]
        pulling += [name for name in launches.names() if name == "pk_gather_rows"]
        pulling.remove("pk_down_grad")  # rows of dy
        assert len(pulling) <= 1
        return pulling[0] if pulling else None

    frozen_gate_up, frozen_x = Needs(True, True, False, True), Needs(False, True, True, True)
    assert copied("preact", ALL) == "pk_gate_up_grad"
    assert copied("full", ALL) is None
    assert copied("preact", frozen_gate_up) is None
    assert copied("inputs", frozen_gate_up) == "pk_gate_up"
    assert copied("preact", frozen_x) == "pk_gather_rows"


def test_grids_are_even_and_stay_within_num_sms(launches: Launches) -> None:
    step(config_of(num_sms=7), 8)
    grids = {seen.name: seen.grid for seen in launches.seen}
    assert grids["pk_gate_up"] == grids["pk_wgrad"] == 6
    assert grids["pk_plan"] == 8  # one cluster, whatever the SMs


def test_the_pool_holds_every_route_however_the_experts_fill() -> None:
    config = config_of()
    for counts in ([128, 0, 0, 0, 0], [1, 1, 1, 1, 124], [25, 26, 27, 25, 25], [65, 1, 1, 1, 60]):
        assert sum((c + 63) // 64 * 64 for c in counts) <= pool_rows(config, 64)
    preact = torch.empty(CudaBackend().preact_shape(config, num_tokens=4, ep_size=1, save="full"))
    kept = kept_rows(preact, pool_rows(config, 4), config)
    assert kept is not None
    assert kept.shape == (pool_rows(config, 4), 192)
    assert kept.data_ptr() + kept.numel() * 4 == preact.data_ptr() + preact.numel() * 4


@pytest.mark.parametrize(
    ("fields", "ep_size", "words"),
    [
        ({"precision": "fp8", "hidden": 256, "intermediate": 256}, 1, "fp8"),
        ({"num_experts": 16}, 16, "at most 8 ranks"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(fields: dict[str, Any], ep_size: int, words: str) -> None:
    reason = CudaBackend().unsupported_reason(config_of(**fields), ep_size=ep_size, device=torch.device("cuda"))
    assert reason is not None
    assert words in reason


def test_the_digest_of_a_measurement_names_every_kernel_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    seen = set()
    for loaded in ({}, {"a": "1"}, {"a": "2"}, {"a": "1", "b": "1"}):
        monkeypatch.setattr(kernels, "_digests", dict(loaded))
        seen.add(backend.cubin_digest)
        assert re.fullmatch(r"[0-9a-f]{16}", backend.cubin_digest)
    assert len(seen) == 4


@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
def test_the_memory_plan_is_what_a_call_allocates(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, save: str
) -> None:
    config = config_of(max_tokens_per_rank=512, num_experts=8, save=save)
    taken: list[int] = []
    empty = torch.empty

    def spy(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        taken.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", spy)
    forward, _ = step(config, 512, save=save)
    plan = plan_memory(config)
    kept = [forward.plan] + ([] if forward.preact is None else [forward.preact])
    inputs = 512 * 192 * 2 + 512 * 2 * (8 + 4)
    assert plan.saved_bytes_per_layer == inputs + sum(t.numel() * t.element_size() for t in kept)
    # Forward and backward together take what is saved, counts, and both workspaces; the larger is the backward's.
    results = 2 * 4 * 8 + 512 * 2 * 4  # counts twice, score gradients
    pool = forward.plan.numel() - 2 * 8 - 1 - 512 * 2
    forward_workspace = pool * (2 * 192 * (1 if save == "full" else 2) + 2 * 320 + 4) + 4 * pool // 64
    rest = sum(taken) - (plan.saved_bytes_per_layer - inputs) - results - forward_workspace
    assert abs(rest - plan.workspace_bytes) <= 0.02 * plan.workspace_bytes
