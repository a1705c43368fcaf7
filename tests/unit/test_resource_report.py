# SPDX-License-Identifier: Apache-2.0
"""What the build refuses to ship."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build_tools import resource_report as report
from tests.helpers.fake_cubin import launch_meta

CLEAN = """ptxas info    : 72 bytes gmem
ptxas info    : Compiling entry function 'pk_x' for 'sm_90a'
ptxas info    : Function properties for pk_x
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 1024 bytes smem
"""


def meta(**values: object) -> report.LaunchMeta:
    return report.LaunchMeta.unpack(launch_meta(**values))  # type: ignore[arg-type]


def test_a_clean_log_has_no_problem() -> None:
    usage = report.parse_log(CLEAN)
    assert usage == report.Usage(168, 0, 0, 0, 1024, ())
    assert report.problems(usage, meta(threads=384)) == []


def test_launch_meta_is_read_field_by_field() -> None:
    got = meta(
        threads=512, smem_bytes=7, cluster=2, min_ctas=1, protocol=5, args_bytes=448, roles=((128, 40), (384, 152))
    )
    assert got == report.LaunchMeta(1, 512, 7, 2, 1, 5, 448, "0000000000001234", ((128, 40), (384, 152)))
    with pytest.raises(ValueError, match="71 bytes, need 72"):
        report.LaunchMeta.unpack(launch_meta()[:-1])


def test_a_spill_is_a_problem() -> None:
    log = CLEAN.replace("0 bytes stack frame, 0 bytes spill stores", "8 bytes stack frame, 8 bytes spill stores")
    assert report.problems(report.parse_log(log), meta()) == ["spills 8 bytes of stores and 0 of loads"]


def test_stack_without_a_spill_is_a_problem() -> None:
    log = CLEAN.replace("0 bytes stack frame", "32 bytes stack frame")
    (problem,) = report.problems(report.parse_log(log), meta())
    assert "32 bytes of stack" in problem


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7602"])
def test_an_advisory_on_serialised_tensor_core_code_is_a_problem(code: str) -> None:
    line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    usage = report.parse_log(CLEAN + line + "\n")
    assert report.problems(usage, meta()) == [f"ptxas advises: {line}"]


def test_roles_may_not_want_more_registers_than_the_launch_grants() -> None:
    usage = report.parse_log(CLEAN)
    good = meta(threads=384, roles=((128, 24), (256, 240)))  # 64512 of 168 x 384 = 64512
    assert report.problems(usage, good) == []
    (problem,) = report.problems(usage, meta(threads=384, roles=((128, 32), (256, 240))))
    assert "want 65536 registers, the launch grants 168 x 384 = 64512" in problem


def test_a_cta_that_does_not_fit_the_register_file_is_a_problem() -> None:
    (problem,) = report.problems(report.parse_log(CLEAN), meta(threads=512))
    assert "168 registers x 512 threads x 1 CTAs exceed" in problem


def test_the_row_s_own_limit_holds() -> None:
    (problem,) = report.problems(report.parse_log(CLEAN), meta(), max_regs=64)
    assert "uses 168 registers, the row in variants.toml allows 64" in problem


def test_a_log_without_exactly_one_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="described 0 kernels"):
        report.parse_log("ptxas info    : 0 bytes gmem\n")
    with pytest.raises(ValueError, match="described 2 kernels"):
        report.parse_log(CLEAN + CLEAN)


def test_the_command_prints_the_table_and_fails_on_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = report.parse_log(CLEAN)
    good = report.row("a|b", "sm_90a", "cu130", usage, meta(), [])
    bad = report.row("a|c", "sm_90a", "cu130", usage, meta(), ["spills"])
    path, old = tmp_path / "new.json", tmp_path / "old.json"
    path.write_text(json.dumps([good]))
    assert report.main([str(path)]) == 0
    old.write_text(json.dumps([{**good, "registers": 160}]))
    assert report.main([str(path), "--against", str(old)]) == 0
    assert "a|b sm_90a/cu130: registers 160 -> 168" in capsys.readouterr().out
    path.write_text(json.dumps([good, bad]))
    assert report.main([str(path)]) == 1
    assert "PROBLEM a|c sm_90a/cu130: spills" in capsys.readouterr().out
    assert report.main([str(tmp_path / "absent.json")]) == 2
