# SPDX-License-Identifier: Apache-2.0
"""`prime-kernels bench` prints times of right kernels only, and says why where it prints none."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import Tensor

import prime_kernels
from prime_kernels import bench, cli

LAYER = ["--hidden", "64", "--intermediate", "64", "--num-experts", "4", "--topk", "2", "--tokens", "32"]
CPU = torch.device("cpu")


def config() -> prime_kernels.MegaMoEConfig:
    return prime_kernels.MegaMoEConfig(num_experts=4, topk=2, hidden=64, intermediate=64, max_tokens_per_rank=32)


def test_the_verb_times_the_backend_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *LAYER, "--device", "cpu", "--rounds", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["backend"] for row in report["rows"]] == ["reference", "grouped"]
    own = report["rows"][0]
    assert own["reason"] is None
    assert own["relative_error"] == 0
    assert own["forward_ms"] > 0
    assert own["backward_ms"] > 0


def test_the_table_has_a_line_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *LAYER, "--device", "cpu", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("reference")


@pytest.mark.parametrize("wrong", range(5), ids=["y", "dx", "d(topk_weights)", "dw_gate_up", "dw_down"])
def test_a_backend_with_one_wrong_tensor_prints_no_time(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench._Candidate.results

    def results(self: bench._Candidate, dy: Tensor) -> tuple[Tensor, ...]:
        found = list(right(self, dy))
        if self.runtime.config.backend == "grouped":
            found[wrong] = found[wrong] * 1.1
        return tuple(found)

    monkeypatch.setattr(bench._Candidate, "results", results)
    own, baseline = bench.measure(config(), 32, 1, CPU)
    assert own.forward_ms is not None
    assert (baseline.backend, baseline.forward_ms, baseline.backward_ms) == ("grouped", None, None)
    found = re.fullmatch(r"relative error (\S+) over 2e-02", baseline.reason or "")
    assert found is not None
    assert float(found[1]) == pytest.approx(0.1, rel=0.05)  # the two backends differ by rounding as well


def test_several_ranks_are_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *LAYER, "--ep-size", "2"]) == 3
    assert "--ep-size is 2; this verb runs one process" in capsys.readouterr().err


def test_a_layer_that_no_backend_supports_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *LAYER, "--hidden", "65", "--device", "cpu"]) == 3
    assert "hidden=65 is not a multiple of 64" in capsys.readouterr().err
