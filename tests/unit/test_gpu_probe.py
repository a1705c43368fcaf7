# SPDX-License-Identifier: Apache-2.0
"""What the launch probe of one_gpu.py times, on a loader without a driver."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_probe
from prime_kernels import MegaMoEConfig
from prime_kernels.loader.prepared import Prepared
from prime_kernels.moe import cuda_calls
from prime_kernels.moe.cuda import CudaBackend
from tests.helpers.fake_loader import FakeLoader


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> FakeLoader:
    made = FakeLoader()
    made.stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def forward() -> object:
    config = MegaMoEConfig(num_experts=4, topk=2, hidden=64, intermediate=64, max_tokens_per_rank=8, backend="cuda")
    fields = {"config": config, "device": torch.device("cpu"), "peers": None, "num_local_experts": 4}
    runtime = type("Runtime", (), fields)()
    backend = CudaBackend()
    backend._faults[runtime] = torch.zeros(8, dtype=torch.int32)
    zeros = [torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((8, 64), (4, 128, 64), (4, 64, 64))]
    ids, scores = torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, 2)
    return backend.forward(runtime, zeros[0], ids, scores, zeros[1], zeros[2], save="preact")


def test_the_launch_that_is_timed_has_five_maps_or_more_and_waits_for_no_other(loader: FakeLoader) -> None:
    found = gpu_probe.prepared_launch(forward)
    assert (found["key"].split("|")[0], found["maps"]) == ("down", 6)
    assert 0 < found["median"] <= found["p90"]
    assert cuda_calls.Prepared is Prepared
    call, timed = loader.seen[:4], loader.seen[4:]
    assert len(timed) == 2 * gpu_probe.LAUNCHES
    assert {seen[:4] for seen in timed} == {call[2][:4]}, "the launch of the call, with its arguments"
    moved, stayed = ([seen.encoded for seen in part] for part in (timed[: len(timed) // 2], timed[len(timed) // 2 :]))
    assert set(moved) == {6}
    assert set(stayed) == {0}
