# SPDX-License-Identifier: Apache-2.0
"""The benchmark of single grouped GEMMs on a CPU: it times what is right and prints no number for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from benchmarks import bench_grouped_gemm as bench
from benchmarks import one_gpu_reports
from tests.helpers.groups import align_up

TINY = ["--device", "cpu", "--shapes", "tiny", "--tokens", "64", "--rounds", "3", "--warmups", "1"]


def rows_call(a: Tensor, b: Tensor, d: Tensor, ids: Tensor, *, wrong_expert: int = -1) -> None:
    for expert in range(b.shape[0]):
        taken = ids == expert
        d[taken] = (a[taken].float() @ b[max(expert, 1) if expert == wrong_expert else expert].float().t()).to(d.dtype)


def grads_call(a: Tensor, b: Tensor, d: Tensor, ks: list[int], sizes: Tensor, c: Tensor | None) -> None:
    assert sizes.tolist() == ks
    end = 0
    for group, rows in enumerate(ks):
        end += rows
        part = a[end - rows : end].float().t() @ b[end - rows : end].float()
        d[group] = part.to(d.dtype) if c is None else d[group] + part


def arms_of(rows: Any, grads: Any, align: int) -> tuple[dict[str, bench.Arm], list[str]]:
    module = SimpleNamespace(m_grouped_bf16_gemm_nt_contiguous=rows, k_grouped_bf16_gemm_tn_contiguous=grads)
    return {"prime_kernels": bench.module_arm(module, align), "torch": bench.torch_arm}, []


@pytest.mark.parametrize("align", [64, 128])
def test_every_arm_is_checked_timed_and_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], align: int
) -> None:
    seen: list[int] = []

    def rows(a: Tensor, b: Tensor, d: Tensor, ids: Tensor) -> None:
        seen.append(a.shape[0])
        starts = [int((ids == e).nonzero()[0]) for e in range(b.shape[0]) if (ids == e).any()]
        assert all(start % align == 0 for start in starts)
        rows_call(a, b, d, ids)

    monkeypatch.setattr(bench, "make_arms", lambda device: arms_of(rows, grads_call, align))
    out = tmp_path / "out.jsonl"
    assert bench.main([*TINY, "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["problem"], r["arm"]) for r in records] == [
        (problem.name, arm)
        for problem in bench.problems_of(bench.bench.read_shapes()["tiny"])
        for arm in ("prime_kernels", "torch")
    ]
    for record in records:
        assert record["rows"] == 128
        assert 0 < record["p10"] <= record["ms"] <= record["p90"]
        flops = 2 * record["rows"] * record["m"] * record["n"]
        assert record["tflops"] == pytest.approx(flops / record["ms"] / 1e9, rel=1e-2)
        assert record["rel_err"] < (1e-5 if record["arm"] != "torch" and "fp32" in record["problem"] else 3e-3)
    assert set(seen) == {seen[0]}
    assert seen[0] == align_up(seen[0], align) >= 128
    printed = capsys.readouterr().out
    assert "wgrad_gate_up_fp32_accumulate" in printed
    (line,), short = one_gpu_reports.gemm_rates(printed, 0.9)
    assert line.startswith("tiny: gate_up ")
    assert line.count(", ") == 3
    assert short == []


def test_an_arm_that_is_wrong_for_one_expert_has_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(a: Tensor, b: Tensor, d: Tensor, ids: Tensor) -> None:
        rows_call(a, b, d, ids, wrong_expert=0)

    def grads(a: Tensor, b: Tensor, d: Tensor, ks: list[int], sizes: Tensor, c: Tensor | None) -> None:
        grads_call(a, b, d, ks, sizes, None)

    monkeypatch.setattr(bench, "make_arms", lambda device: arms_of(rows, grads, 64))
    out = tmp_path / "out.jsonl"
    assert bench.main([*TINY, "--out", str(out)]) == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    timed = {(r["problem"], r["arm"]) for r in records}
    assert ("gate_up", "prime_kernels") not in timed
    assert ("wgrad_gate_up_fp32_accumulate", "prime_kernels") not in timed
    assert ("wgrad_gate_up", "prime_kernels") in timed
    assert ("gate_up", "torch") in timed
    printed = capsys.readouterr().out
    assert "WRONG expert 0: relative error" in printed
    assert len(one_gpu_reports.gemm_rates(printed, 0.9)[1]) == 3


def test_anchors_are_found_by_shape_arm_and_problem() -> None:
    assert bench.anchor_of("qwen3-30b-a3b", "deep_gemm", "gate_up") == 728
    assert bench.anchor_of("qwen3-235b-a22b", "deep_gemm", "wgrad_gate_up_fp32_accumulate") == 565
    assert bench.anchor_of("qwen3-235b-a22b", "torch", "wgrad_gate_up") == 694
    assert bench.anchor_of("tiny", "torch", "gate_up") is None


def test_an_unknown_shape_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["--shapes", "qwen9"])
    assert caught.value.code == 2
