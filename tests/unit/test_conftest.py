# SPDX-License-Identifier: Apache-2.0
"""Skips cannot hide: a gpu test without a GPU says why, and fails where a GPU was promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.gpu
def test_on_the_gpu():
    pass

@pytest.mark.gpu
def test_that_skips_itself():
    pytest.skip("needs two GPUs")

def test_elsewhere():
    pass
"""


def run_pytest(folder: Path, *options: str, gpu: bool) -> subprocess.CompletedProcess[str]:
    source = (ROOT / "tests" / "conftest.py").read_text()
    reason = "None" if gpu else "'torch finds no CUDA device'"
    (folder / "conftest.py").write_text(f"{source}\n\ndef gpu_skip_reason():\n    return {reason}\n")
    (folder / "test_things.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n")
    command = [sys.executable, "-m", "pytest", "-rA", "--strict-markers", "-p", "no:cacheprovider", *options, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=60)


def test_without_a_gpu_its_tests_are_skipped_with_the_reason(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, gpu=False)
    assert run.returncode == 0
    assert "1 passed, 2 skipped" in run.stdout
    assert "torch finds no CUDA device" in run.stdout


def test_require_gpu_turns_skips_into_failures(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "--require-gpu", gpu=False)
    assert run.returncode == 1
    assert "skipped" not in run.stdout.splitlines()[-1]
    assert "--require-gpu: torch finds no CUDA device" in run.stdout


@pytest.mark.parametrize(
    ("options", "outcome"), [((), "2 passed, 1 skipped"), (("--require-gpu",), "1 failed, 2 passed")]
)
def test_with_a_gpu_a_test_may_skip_itself_unless_it_is_required(
    tmp_path: Path, options: tuple[str, ...], outcome: str
) -> None:
    run = run_pytest(tmp_path, *options, gpu=True)
    assert outcome in run.stdout
    assert run.returncode == (1 if options else 0)
