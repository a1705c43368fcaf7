# SPDX-License-Identifier: Apache-2.0
"""What makes the steps `wheel`, `jit` and `sanitizer` of one_gpu.py fail, on reports that no GPU had to make."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import one_gpu_steps as steps
from benchmarks.one_gpu_steps import Job, StepError
from benchmarks.watchdog import Finished

GATHER, GEMM = "gather_rows|b16|t256|l4", "rows_nt|bf16"
REPORT: dict[str, Any] = {
    "first_call_s": {GATHER: 0.02},
    "layer_s": {"create": 0.05, "forward": 0.03},
    "launch_us": {
        "key": "down|bf16",
        "median": 4.0,
        "p90": 5.0,
        "maps": 6,
        "moved": {"median": 7.0, "p90": 9.0},
        "general": {"key": GEMM, "median": 15.0, "p90": 17.0, "maps": 6},
    },
    "load_s": {GATHER: 0.3, GEMM: 1.2},
    "digests": {GATHER: "aa", "gemm": "bb"},
    "origins": {GATHER: "cu130/sm_90a", GEMM: "cu130/sm_90a"},
}


def changed(*path: str, to: Any) -> dict[str, Any]:
    """The report with one value replaced."""
    report = copy.deepcopy(REPORT)
    at = report
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = to
    return report


def with_origin(origin: str, report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "origins": dict.fromkeys(report["origins"], origin)}


def compiled(origin: str, *path: str, to: Any) -> dict[str, Any]:
    """The same for a package without packs."""
    return with_origin(origin, changed(*path, to=to))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("step", tmp_path, tmp_path, time.monotonic() + 60)


def finish(monkeypatch: pytest.MonkeyPatch, text: str, rc: int = 0) -> None:
    """Let every command of a step end like this."""
    monkeypatch.setattr(Job, "run", lambda *_, **__: Finished(rc, 1.0, text))


@pytest.mark.parametrize(
    ("report", "doctor", "problem"),
    [
        (REPORT, "ok", None),
        (REPORT, "degraded", "doctor: degraded"),
        (changed("first_call_s", GATHER, to=0.31), "ok", "0.31 s, at most 0.3"),
        (changed("layer_s", "create", to=0.28), "ok", "of the layer 0.31 s, at most 0.3"),
        (changed("launch_us", "median", to=10.4), "ok", "launch 10.4 us, at most 10"),
        (changed("origins", GEMM, to="built"), "ok", "rows_nt|bf16 came from built"),
    ],
)
def test_the_wheel_keeps_its_limits(
    job: Job, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], doctor: str, problem: str | None
) -> None:
    monkeypatch.setattr(steps, "install_wheel", lambda job: (job.scratch, "the wheel"))
    monkeypatch.setattr(steps, "probe", lambda *_, **__: report)
    finish(monkeypatch, f'{{"result": "{doctor}", "codes": []}}\n')
    if problem is None:
        lines = steps.wheel(job)
        assert "the wheel; doctor ok" in lines[0]
        launch = "launch of down 4.0 us (p90 5.0) with 6 maps, 7.0 us where all addresses are new"
        assert f"{launch}; general path: rows_nt 15.0 us with 6" in lines
        return
    with pytest.raises(StepError, match=problem) as failure:
        steps.wheel(job)
    assert any("launch" in line for line in failure.value.details), "the numbers are shown all the same"


def test_more_than_one_wheel_is_no_wheel(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ROOT", job.scratch)
    with pytest.raises(StepError, match="holds 0 wheels"):
        steps.install_wheel(job)


@pytest.mark.parametrize(
    ("what", "report", "problem"),
    [
        ("", REPORT, None),
        ("built", compiled("built", "load_s", GEMM, to=3.2), "rows_nt.bf16 3.2 s, at most 3"),
        ("built", compiled("built", "digests", "gemm", to="cc"), "gemm has other bits"),
        ("cached", compiled("cache", "digests", GATHER, to="cc"), "l4 has other bits"),
        ("built", REPORT, "built: gather_rows.* came from cu130"),
        ("cached", compiled("built", "load_s", GEMM, to=1.0), "cached: rows_nt.bf16 came from built"),
    ],
)
def test_compiled_kernels_are_quick_and_have_the_bits_of_the_packed_ones(
    job: Job, monkeypatch: pytest.MonkeyPatch, what: str, report: dict[str, Any], problem: str | None
) -> None:
    reports = {"packed": REPORT, "built": with_origin("built", REPORT), "cached": with_origin("cache", REPORT)}
    reports |= {what: report}
    monkeypatch.setattr(steps, "probe", lambda job, name, *_, **__: reports[name])
    if problem is None:
        assert "2 kernels compiled in 1.50 s, the slowest 1.20 s" in steps.jit(job)[0]
        return
    with pytest.raises(StepError, match=problem):
        steps.jit(job)


CLEAN = '{"launches": 24, "kernels": 8, "worst": 0.004, "unfiltered": []}\n========= ERROR SUMMARY: 0 errors\n'


@pytest.mark.parametrize(
    ("text", "rc", "problem"),
    [
        (CLEAN, 0, None),
        (CLEAN, 1, "0 errors; exit 1"),
        ("========= ERROR SUMMARY: 0 errors\n", 0, "0 errors"),
        (CLEAN.replace("0 errors", "3 errors"), 0, "3 errors"),
        ("========= Error: no such option\n", 255, "exit 255 without a summary"),
    ],
)
def test_only_a_clean_and_complete_run_under_the_sanitizer_counts(
    job: Job, monkeypatch: pytest.MonkeyPatch, text: str, rc: int, problem: str | None
) -> None:
    monkeypatch.setattr(steps.shutil, "which", lambda name: f"/somewhere/{name}")
    finish(monkeypatch, text, rc)
    if problem is None:
        assert steps.sanitizer_step("memcheck").work(job)[0].startswith("ERROR SUMMARY: 0 errors; 24 launches of 8")
        with pytest.raises(StepError, match="prove nothing"):
            steps.sanitizer_step("memcheck", expect_errors=True).work(job)
        return
    with pytest.raises(StepError, match=problem):
        steps.sanitizer_step("memcheck").work(job)
