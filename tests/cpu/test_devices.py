# SPDX-License-Identifier: Apache-2.0
"""`--device` names a device or says what it could have named."""

from __future__ import annotations

import pytest

from prime_kernels.devices import choose_device
from prime_kernels.errors import BackendUnavailable, UnsupportedConfig


@pytest.fixture(params=[0, 2], ids=["no GPU", "two GPUs"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    return count


def test_auto_takes_a_gpu_where_there_is_one(gpus: int) -> None:
    assert choose_device("auto").type == ("cuda" if gpus else "cpu")


def test_the_cpu_is_always_there(gpus: int) -> None:
    assert str(choose_device("cpu")) == "cpu"


def test_a_gpu_is_taken_by_index_or_refused_by_count(gpus: int) -> None:
    for name, index in (("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:2", 2)):
        if index < gpus:
            assert str(choose_device(name)) == name
        else:
            with pytest.raises(BackendUnavailable, match=f"'{name}' and torch finds {gpus} CUDA devices"):
                choose_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "mps"])
def test_anything_else_is_bad_usage(name: str) -> None:
    with pytest.raises(UnsupportedConfig, match="need auto, cpu, cuda or cuda:N"):
        choose_device(name)
