# SPDX-License-Identifier: Apache-2.0
"""The training-step benchmark on a CPU: arms that differ only in their experts, checked before they are timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import baselines, bench, records, step
from benchmarks.place import Place

PLACE = Place(torch.device("cpu"), None, 0, 1)
SHAPE = bench.read_shapes()["tiny"]
REST = {"gpu": "none", "driver": None, "torch": "2.9", "commit": "0" * 40, "dirty": True, "time": "2026-11-29T00:00"}


def arguments() -> Any:
    return bench.parse(
        ["step", "--device", "cpu", "--shapes", "tiny", "--tokens", "32", "--arms", "grouped,reference",
         "--rounds", "2", "--warmups", "1", "--sustain", "0"]
    )  # fmt: skip


def test_every_arm_but_identity_has_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    found = step.run_step(arguments(), SHAPE, 32, PLACE)
    assert [record["arm"] for record in found] == ["grouped", "reference"]
    for record in found:
        assert records.schema_problems({**record, **REST}) == []
        assert record["identity_ms"] > 0
        assert record["moe_share"] == pytest.approx(1 - record["identity_ms"] / record["ms"], abs=1e-3)
        assert record["ratio"] is None
    assert "identity" in capsys.readouterr().out


def test_a_step_moves_every_parameter_and_releases_gradients() -> None:
    steps = step.Steps(arguments(), SHAPE, 32, PLACE)
    arm = baselines.package_arm("grouped", SHAPE, tokens=32, device=PLACE.device, group=None)
    steps.model.use(arm.layer)
    before = [master.clone() for master in steps.optimizer._masters]
    steps.run()
    assert all((master != old).any() for master, old in zip(steps.optimizer._masters, before, strict=True))
    assert all(parameter.grad is None for parameter in steps.model.parameters())


def test_a_probe_leaves_the_parameters_alone_and_repeats() -> None:
    steps = step.Steps(arguments(), SHAPE, 32, PLACE)
    arm = baselines.package_arm("grouped", SHAPE, tokens=32, device=PLACE.device, group=None)
    assert steps.probe(arm) == steps.probe(arm)


def test_an_arm_with_another_loss_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    steps = step.Steps(arguments(), SHAPE, 32, PLACE)
    right = baselines.package_arm("grouped", SHAPE, tokens=32, device=PLACE.device, group=None)

    def layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        return -right.layer(x, topk_ids.roll(1, 0), topk_weights, w_gate_up, w_down)

    wrong = baselines.Arm("rolled", layer, None, None)
    assert step.agree({"a": steps.probe(right), "b": steps.probe(right)}, PLACE)
    assert not step.agree({"a": steps.probe(right), "rolled": steps.probe(wrong)}, PLACE)
    assert "WRONG rolled" in capsys.readouterr().out
