# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the benchmark harness: statistics, work formulas, routers, records and the ratio rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench, cost, records, routing, telemetry, timing
from build_tools.tomlfile import read_toml

ANCHORS = read_toml(Path(bench.__file__).parent / "anchors.toml")
SMALL = cost.Shape("small", hidden=4, intermediate=3, num_experts=2, topk=1)


def make_record(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "op": "forward", "shape": "qwen3-30b-a3b", "ep": 1, "tokens": 16384, "precision": "bf16", "routing": "uniform",
        "save": "preact", "ms": 2.31, "p10": 2.30, "p90": 2.33, "baseline": "unfused-torch", "baseline_ms": 7.4,
        "ratio": 3.2, "tflops": 530.0, "rel_err": {"y": 3e-3}, "peak_mib": 900.5, "gpu": "NVIDIA H200",
        "driver": "580.95", "torch": "2.11.0+cu130", "cubin": None, "commit": "0123456789abcdef", "dirty": False,
        "n": 30, "time": "2026-11-29T12:00:00+00:00", "backend": "cuda", "engine": None, "ablation": None,
        "main_grad": False, "wgrad_dtype": "bfloat16", "reserve_sms": None, "num_sms": None, "host_us": 45.0,
        "clock_mhz": 1755.0, "power_w": 640.2, "sustained_ms": 2.5, "dense_tflops": 765.0,
    }  # fmt: skip
    return {**record, **changes}


def test_percentiles_interpolate_between_order_statistics() -> None:
    assert timing.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert timing.percentile([1.0, 2.0], 0.5) == 1.5
    assert timing.percentile([10.0, 0.0], 0.1) == 1.0
    assert timing.percentile([7.0], 0.9) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        timing.percentile([], 0.5)


@given(st.lists(st.floats(0.01, 1e3), min_size=1, max_size=50))
def test_a_summary_is_ordered_and_within_its_samples(samples: list[float]) -> None:
    summary = timing.summarize(samples, samples)
    assert min(samples) <= summary.p10 <= summary.ms <= summary.p90 <= max(samples)
    assert summary.n == len(samples)
    assert summary.spread >= 0


def test_rotation_puts_every_variant_first_equally_often() -> None:
    firsts = [timing.rotate("abc", index)[0] for index in range(9)]
    assert {name: firsts.count(name) for name in "abc"} == {"a": 3, "b": 3, "c": 3}
    assert sorted(timing.rotate("abc", 2)) == ["a", "b", "c"]


def test_flops_are_those_of_three_products_forward_and_six_backward() -> None:
    rows = 5
    product = 2 * rows * 4 * 3
    assert cost.flops("forward", SMALL, rows) == 3 * product
    assert cost.flops("backward", SMALL, rows) == 6 * product
    assert cost.flops("forward+backward", SMALL, rows) == 9 * product
    assert cost.flops("forward", SMALL, 0) == 0


def test_the_known_figure_of_a_known_layer() -> None:
    shape = bench.read_shapes()["qwen3-30b-a3b"]
    # 16384 tokens to 8 experts each: 1.237 TFLOP forward, so 2.475 ms is 500 TFLOP/s.
    assert cost.flops("forward", shape, 16384 * 8) == pytest.approx(1.237e12, rel=1e-3)
    assert cost.tflops("forward", shape, 16384 * 8, 2.474) == pytest.approx(500, rel=1e-3)


def test_least_bytes_counts_every_tensor_once() -> None:
    tokens, rows, experts = 7, 7, 2
    x = tokens * 4 * 2
    weights = experts * 3 * 4 * 3 * 2
    z = rows * 2 * 3 * 2
    scores = tokens * 4
    common: dict[str, Any] = {"tokens": tokens, "rows": rows, "local_experts": experts}
    assert cost.least_bytes("forward", SMALL, save_preact=True, **common) == 2 * x + weights + z + scores
    assert cost.least_bytes("forward", SMALL, save_preact=False, **common) == 2 * x + weights + scores
    assert cost.least_bytes("backward", SMALL, save_preact=True, **common) == 3 * x + 2 * weights + z + 2 * scores


@pytest.mark.parametrize("kind", routing.KINDS)
def test_routers_name_distinct_experts_with_weights_that_sum_to_one(kind: str) -> None:
    ids, weights = routing.draw_routes(kind, 200, 4, 16, torch.Generator().manual_seed(0))
    assert ids.min() >= 0
    assert ids.max() < 16
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.allclose(weights.sum(1), torch.ones(200))


def test_routers_are_as_uneven_as_they_say() -> None:
    def load(kind: str) -> float:
        ids, _ = routing.draw_routes(kind, 4000, 2, 64, torch.Generator().manual_seed(1))
        return routing.imbalance(torch.bincount(ids.reshape(-1), minlength=64))

    assert load("uniform") < 1.4
    assert 2.0 < load("skew") < 5.0
    assert load("zipf") > 5.0
    assert load("hot") == pytest.approx(32.0, rel=0.01)  # half of all rows
    with pytest.raises(ValueError, match="need one of"):
        routing.expert_shares("fair", 8)


def test_a_full_record_fits_the_schema() -> None:
    assert records.schema_problems(make_record()) == []
    assert records.schema_problems(make_record(virtual_ranks=4, pacing_GBs=82.5)) == []
    assert records.schema_problems(make_record(local_baseline_ms=5.6, grouped_ms=6)) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ms": None}, "ms is None"),
        ({"n": True}, "n is True"),
        ({"dirty": 0}, "dirty is 0"),
        ({"op": "sideways"}, "op is 'sideways'"),
        ({"note": "fast"}, "note is not a field"),
        ({"baseline_ms": None}, "ratio without baseline_ms"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in records.schema_problems(make_record(**changes)))


def test_every_field_is_required() -> None:
    for name in records.FIELDS:
        record = make_record()
        del record[name]
        assert f"{name} is missing" in records.schema_problems(record)


def test_records_are_appended_below_the_gpus_name(tmp_path: Path) -> None:
    first = records.append_record(tmp_path, make_record())
    records.append_record(tmp_path, make_record(op="backward"))
    assert first == tmp_path / "nvidia-h200" / "2026-11-29-0123456789ab.jsonl"
    assert [record["op"] for record in records.read_records(tmp_path)] == ["forward", "backward"]
    assert json.loads(first.read_text().splitlines()[0]) == make_record()
    with pytest.raises(ValueError, match="tokens is missing"):
        records.append_record(tmp_path, {name: value for name, value in make_record().items() if name != "tokens"})


CASE: dict[str, Any] = {"shape": "qwen3-30b-a3b", "ep": 1, "op": "forward", "tokens": 16384, "routing": "uniform"}


@pytest.mark.parametrize(
    ("changes", "baseline_ms", "problem"),
    [
        ({}, 7.403, None),
        ({}, 7.403 * 1.09, None),
        ({}, 7.403 * 0.91, None),
        ({}, 7.403 * 1.11, "+11% from its anchor 7.40 ms (a slower baseline would flatter the ratio)"),
        ({}, 7.403 * 0.80, "-20% from its anchor 7.40 ms (faster than when the targets were set"),
        ({"ep": 2, "op": "backward"}, 10.198, None),
        ({"op": "forward+backward"}, 7.403 + 9.124, None),
        ({"tokens": 8192}, 3.7, "no anchor"),
        ({"shape": "mixtral-8x7b"}, 7.4, "no anchor"),
        ({"routing": "zipf"}, 7.4, "uniform routing"),
    ],
)
def test_a_ratio_needs_a_baseline_near_its_anchor(
    changes: dict[str, Any], baseline_ms: float, problem: str | None
) -> None:
    found = records.ratio_problem(ANCHORS, baseline_ms=baseline_ms, **{**CASE, **changes})
    assert found is None if problem is None else (found is not None and problem in found)


def test_driver_queries_that_are_not_supported_become_unknown() -> None:
    known = telemetry.parse_smi("1755, 642.10, 580.95.05\n")
    assert known == {"clock_mhz": 1755.0, "power_w": 642.1, "driver": "580.95.05"}
    assert telemetry.parse_smi("[N/A], [N/A], 580.95.05\n")["power_w"] is None


def test_recording_is_refused_off_the_gpu_and_for_unknown_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["forward", "--device", "cpu", "--record"], ["forward", "--shapes", "small"], ["sideways"]):
        with pytest.raises(SystemExit) as stop:
            bench.parse(argv)
        assert stop.value.code == 2
    assert "--record needs --device cuda" in capsys.readouterr().err
