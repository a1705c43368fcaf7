# SPDX-License-Identifier: Apache-2.0
"""The command that compiles every kernel with one NVRTC: what it asks for, and when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from build_tools import jit_check
from prime_kernels.loader import nvrtc, warmup

COMPILER, _ = nvrtc.find(None)


@pytest.mark.parametrize(
    ("version", "requirement"),
    [("12.8.93", "nvidia-cuda-nvrtc-cu12==12.8.93"), ("13.0.88", "nvidia-cuda-nvrtc==13.0.88")],
)
def test_each_major_has_its_package(version: str, requirement: str) -> None:
    assert jit_check.package_of(version) == requirement


def test_a_library_that_was_fetched_before_is_taken(tmp_path: Path) -> None:
    library = tmp_path / "1.2.3" / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert jit_check.fetch("1.2.3", tmp_path) == library
    with pytest.raises(jit_check.CheckError, match="no usable NVRTC"):
        jit_check.check(library, 1)


def test_nothing_compiled_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jit_check, "fetch", lambda *_: tmp_path)
    for found, code in (((3, []), 0), ((0, []), 1), ((3, ["x"]), 1)):
        monkeypatch.setattr(jit_check, "check", lambda *_, found=found: found)
        assert jit_check.main([]) == code


@pytest.mark.skipif(COMPILER is None, reason="no NVRTC here")
def test_a_kernel_is_compiled_from_the_shipped_sources_without_any_pack(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert COMPILER is not None
    real = warmup.todo

    def one(*args: Any) -> Any:
        wanted = real(*args)
        assert len(wanted) >= 30
        return [item for item in wanted if item[0].startswith("gather_rows")][:1]

    monkeypatch.setattr(warmup, "todo", one)
    assert jit_check.check(Path(COMPILER.path), 1) == (1, [])
    assert "1 kernels for sm_90a, sm_100a, sm_103a, 0 failed" in capfd.readouterr().out
