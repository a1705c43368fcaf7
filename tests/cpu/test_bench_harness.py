# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness end to end on a CPU: it times what is right and prints no number for what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import baselines, bench, numerics, one_gpu_reports, records, timing
from benchmarks.place import Place, process_group

PLACE = Place(torch.device("cpu"), None, 0, 1)
SHAPE = bench.read_shapes()["tiny"]
ARMS = ("grouped", "unfused-torch", "unfused-torch-local")


@pytest.fixture
def with_exchange(tmp_path: Path) -> Iterator[Place]:
    """The place of a run with a baseline: alone in a process group."""
    with process_group(PLACE.device, tmp_path) as group:
        yield Place(PLACE.device, None, 0, 1, group)


def arguments(*extra: str) -> Any:
    return bench.parse(
        ["forward", "backward", "--device", "cpu", "--shapes", "tiny", "--tokens", "48", "--rounds", "3",
         "--warmups", "1", "--sustain", "0", "--backend", "grouped", *extra]
    )  # fmt: skip


def test_target_and_baseline_are_checked_timed_and_reported(
    with_exchange: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench.run_shape(arguments(), SHAPE, 48, with_exchange)
    assert [record["op"] for record in found] == ["forward", "backward"]
    rest = {
        "gpu": "none",
        "driver": None,
        "torch": "2.9",
        "commit": "0" * 40,
        "dirty": True,
        "time": "2026-11-29T00:00",
    }
    for record in found:
        assert records.schema_problems({**record, **rest}) == []
        assert record["n"] == 3
        assert 0 < record["p10"] <= record["ms"] <= record["p90"]
        assert set(record["rel_err"]) == {"y", "dx", "dtopk_weights", "dw_gate_up", "dw_down"}
        assert all(0 < error < numerics.BOUND for error in record["rel_err"].values())
        assert record["baseline"] == baselines.RECIPE
        assert record["baseline_ms"] > 0
        assert record["local_baseline_ms"] > 0
        assert record["ratio"] is None, "no anchor, no ratio"
    printed = capsys.readouterr().out
    for op in ("numerics", "forward", "backward"):
        for arm in ARMS:
            words = (arm, op) if op == "numerics" else (op, arm)
            assert any(line.split()[:2] == [*words] for line in printed.splitlines()), words
    assert printed.count("no ratio: no anchor") == 2
    for op, line in zip(("forward", "backward"), one_gpu_reports.bench_lines(printed, target="grouped"), strict=True):
        assert line.startswith(f"{op} ")
        assert " ms (" in line
        assert "  unfused-torch-local " in line
        assert "  no ratio: no anchor" in line
    assert printed.count("; the recipe without its exchange: ") == 2


def test_the_recipe_is_not_the_recipe_without_an_exchange() -> None:
    with pytest.raises(ValueError, match="process group"):
        bench.run_shape(arguments(), SHAPE, 48, PLACE)


def test_on_one_rank_the_exchange_changes_no_bit_but_happens(
    with_exchange: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.make_batches(SHAPE, 48, "zipf", with_exchange)[0]
    calls = []
    exchange = torch.distributed.all_to_all_single

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape)
        return exchange(*args, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", count)
    results = []
    for arm in (baselines.recipe_arm(SHAPE, group=with_exchange.exchange), baselines.local_recipe_arm(SHAPE)):
        y = bench.call_forward(arm, batch)
        results.append([y, *torch.autograd.grad(y, bench.leaves_of(batch), batch.dy)])
    rows, experts = (48 * SHAPE.topk, SHAPE.hidden), (SHAPE.num_experts,)
    assert calls == [experts, rows, rows, rows, rows], "counts, rows there and back, gradients there and back"
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_command_line_makes_its_own_group_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["forward", "--device", "cpu", "--shapes", "tiny", "--tokens", "16", "--backend", "grouped"]
    assert bench.main([*command, "--rounds", "1", "--warmups", "0", "--sustain", "0"]) == 0
    assert "unfused-torch-local" in capsys.readouterr().out
    assert not torch.distributed.is_initialized()


def test_a_ratio_is_that_to_the_recipe_with_its_exchange() -> None:
    medians = {"cuda": 2.0, "unfused-torch": 7.4, "unfused-torch-local": 5.0, "grouped": 6.0}
    shape, args = bench.read_shapes()["qwen3-30b-a3b"], arguments()
    assert bench.judge_ratio(args, "forward", shape, 16384, PLACE, medians, "cuda") == (3.7, None)
    assert bench.compared(medians, "cuda") == {
        "ms": 2.0,
        "baseline": "unfused-torch",
        "baseline_ms": 7.4,
        "grouped_ms": 6.0,
        "local_baseline_ms": 5.0,
    }
    # Without the exchange it is more than 10 % below the anchor: no ratio, and the words say which way it is off.
    ratio, problem = bench.judge_ratio(args, "forward", shape, 16384, PLACE, medians | {"unfused-torch": 5.0}, "cuda")
    assert ratio is None
    assert problem is not None
    assert "-32% from its anchor" in problem
    assert "faster than when the targets were set" in problem


@pytest.mark.parametrize("kind", ["zipf", "hot"])
def test_uneven_routing_passes_the_gate_too(kind: str) -> None:
    args = arguments("--routing", kind, "--no-baseline")
    found = bench.run_shape(args, SHAPE, 48, PLACE)
    assert len(found) == 2
    assert found[0]["baseline_ms"] is None


def test_a_wrong_layer_gets_no_time(
    with_exchange: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench.package_arm

    def wrong(*args: Any, **kwargs: Any) -> baselines.Arm:
        arm = right(*args, **kwargs)

        def layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            # Experts 0 and 1 swapped: shapes fit, and most rows are right.
            swapped = torch.where(topk_ids == 0, 1, torch.where(topk_ids == 1, 0, topk_ids))
            return arm.layer(x, swapped, topk_weights, w_gate_up, w_down)

        return baselines.Arm("swapped", layer, arm.backend, arm.engine, arm.runtime)

    monkeypatch.setattr(bench, "package_arm", wrong)
    assert bench.run_shape(arguments(), SHAPE, 48, with_exchange) == []
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert " ms " not in printed


def check_with(change: Any) -> list[str]:
    """Problems found after `change(outputs)` on right outputs."""
    batch = bench.make_batches(SHAPE, 300, "uniform", PLACE)[0]
    arm = baselines.package_arm("reference", SHAPE, tokens=300, device=PLACE.device, group=None)
    y = bench.call_forward(arm, batch)
    outputs = numerics.Outputs(y.detach(), *torch.autograd.grad(y, bench.leaves_of(batch), batch.dy))
    change(outputs)
    with torch.no_grad():
        return numerics.check_layer(batch, outputs).problems


def test_the_gate_finds_faults_in_one_corner_of_one_tensor() -> None:
    assert check_with(lambda outputs: None) == []
    for name, corner in {
        "y": (slice(256, 300), slice(0, 16)),
        "dx": (slice(0, 128), slice(112, 128)),
        "dtopk_weights": (slice(250, 260), slice(0, 2)),
        "dw_gate_up": (3, slice(64, 128), slice(0, 128)),
        "dw_down": (7, slice(0, 128), slice(48, 64)),
    }.items():

        def shrink(outputs: numerics.Outputs, name: str = name, corner: Any = corner) -> None:
            getattr(outputs, name)[corner] *= 0.9

        problems = check_with(shrink)
        assert problems, name
        assert all(problem.startswith(name) for problem in problems)


def test_the_gate_finds_a_single_nan() -> None:
    def spoil(outputs: numerics.Outputs) -> None:
        outputs.dw_down[2, 5, 7] = float("nan")

    assert check_with(spoil)


def test_rounds_visit_every_input_set_and_order() -> None:
    seen: list[tuple[str, int]] = []
    variants = [
        timing.Variant(name, lambda index: index, lambda index, name=name: seen.append((name, index)))  # type: ignore[misc]
        for name in "ab"
    ]
    times = timing.measure(variants, device=torch.device("cpu"), rounds=4, warmups=2, group=None)
    assert seen[:4] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert len(seen) == 12
    assert all(took.n == 4 for took in times.values())


def test_the_longest_operators_of_a_call_are_listed(with_exchange: Place, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run_shape(arguments("--kernels", "3"), SHAPE, 48, with_exchange)
    printed = capsys.readouterr().out
    assert printed.count("ms on the device") == 2 * len(ARMS)
    assert "aten::" in printed


def test_sustained_calls_go_on_for_the_time_asked() -> None:
    calls = []
    variant = timing.Variant("a", lambda index: index, calls.append)
    ms, number = timing.sustain(variant, device=torch.device("cpu"), seconds=0.05, group=None)
    assert number == len(calls)
    assert number % 10 == 0
    assert ms >= 0
