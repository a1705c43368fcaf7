# SPDX-License-Identifier: Apache-2.0
"""What one_gpu.py reads out of the output of other programs."""

from __future__ import annotations

import pytest

from benchmarks import one_gpu_reports as reports

BENCH = """
qwen3-30b-a3b tokens=16384 ep=1 routing=uniform input sets=2
  cuda                   numerics y=3.5e-03 dx=3.0e-03 worst block 4.2e-03
  grouped                numerics y=3.5e-01 dx=3.0e-03 worst block 4.2e-01
    WRONG y: relative error 3.50e-01
  forward           cuda                      2.345 ms  p10 2.301  p90 2.402   527.3 TFLOP/s  host 45 us
  forward           unfused-torch             7.413 ms  p10 7.400  p90 7.502   166.8 TFLOP/s  host 4100 us
  forward           unfused-torch-local       5.801 ms  p10 5.700  p90 5.902   213.2 TFLOP/s  host 2100 us
  forward           ratio 3.161; the recipe without its exchange: 5.801 ms of 7.413
  forward           sustained 2.410 ms at 1755.0 MHz, 640.0 W; dense 765.0 TFLOP/s
  backward          cuda                      4.010 ms  p10 3.990  p90 4.050   617.0 TFLOP/s  host 61 us
  backward          unfused-torch             7.000 ms  p10 6.900  p90 7.100   353.4 TFLOP/s  host 900 us
  backward          no ratio: baseline took 7.00 ms, -23% from its anchor 9.12 ms (faster than); the recipe without it
"""

GEMM = """without deep_gemm: deep_gemm does not import

qwen3-30b-a3b tokens=16384 rows=131072 routing=uniform on NVIDIA H200
  gate_up              prime_kernels     1.100 ms  p10 1.000  p90 1.200   750.2 TFLOP/s  host   12 us  error 1.7e-03  deep_gemm's anchor 728
  gate_up              torch             1.200 ms  p10 1.000  p90 1.200   687.0 TFLOP/s  host   12 us  error 1.7e-03  anchor 687
  down                 prime_kernels     0.900 ms  p10 0.800  p90 0.950   500.0 TFLOP/s  host   12 us  error 1.7e-03  deep_gemm's anchor 646
  wgrad_gate_up        prime_kernels     1.100 ms  p10 1.000  p90 1.200   700.0 TFLOP/s  host   12 us  error 1.7e-03
qwen3-235b-a22b tokens=16384 rows=131072 routing=uniform on NVIDIA H200
  gate_up              prime_kernels  WRONG expert 3: relative error 2.0e-01, worst block 3.0e-01
"""  # noqa: E501


def test_a_benchmark_is_one_line_for_each_op() -> None:
    forward, backward = reports.bench_lines(BENCH)
    assert forward == (
        "forward 2.345 ms (2.301-2.402, host 45 us)  unfused-torch 7.413  unfused-torch-local 5.801  ratio 3.161"
        "  sustained 2.410 ms at 1755.0 MHz, 640.0 W; dense 765.0 TFLOP/s"
    )
    assert backward.startswith("backward 4.010 ms (3.990-4.050, host 61 us)  unfused-torch 7.000  no ratio: baseline")
    assert "-23% from its anchor 9.12 ms (faster than)" in backward
    assert reports.bench_wrongs(BENCH) == ["WRONG y: relative error 3.50e-01"]
    assert reports.bench_lines(BENCH, target="absent") == []


def test_rates_are_set_against_the_anchors_of_deep_gemm() -> None:
    lines, short = reports.gemm_rates(GEMM, 0.9)
    assert lines == ["qwen3-30b-a3b: gate_up 750.2/728 103%, down 500.0/646 77%, wgrad_gate_up 700.0 TFLOP/s"]
    assert len(short) == 2
    assert short[0] == "qwen3-30b-a3b down: 500.0 TFLOP/s is below 90% of 646"
    assert short[1].startswith("qwen3-235b-a22b gate_up")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error", 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= RACECHECK SUMMARY: 12 hazards displayed (12 errors, 0 warnings)", 12),
    ],
)
def test_the_sanitizers_summary_is_a_number(text: str, count: int) -> None:
    found = reports.sanitizer_summary(f"{text}\n")
    assert found is not None
    assert found[0] == count
    assert found[1] in text


def test_a_sanitizer_without_a_summary_is_not_clean() -> None:
    assert reports.sanitizer_summary("========= COMPUTE-SANITIZER\n========= Error: no such tool\n") is None
    findings = reports.sanitizer_findings("========= COMPUTE-SANITIZER\n========= Invalid read of size 16\nelse\n")
    assert findings == ["Invalid read of size 16"]


def test_json_is_found_among_other_lines() -> None:
    assert reports.last_json('{"a": 1}\nwarning\n{"b": 2}\nbye {"c": 3}\n') == {"b": 2}
    assert reports.last_json('{\n "a": 1\n}\n') == {"a": 1}
    assert reports.last_json("none {here}\n[1]\n") is None


def test_counts_of_tests_come_from_the_line_that_counts() -> None:
    assert reports.pytest_counts("3 failed to load\n== 2 failed, 25 passed, 1 skipped in 31.20s (0:00:31) ==\n") == (
        "2 failed, 25 passed, 1 skipped"
    )
    assert reports.pytest_counts("Segmentation fault\n") == ""
