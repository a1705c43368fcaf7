# SPDX-License-Identifier: Apache-2.0
"""Device headers, compiled by the host compiler and tested there: no GPU, no CUDA toolkit."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.host_cxx import compile

COMPILER = compile.find_compiler()
PROGRAMS = compile.programs()
CASES = [pytest.param(p, case, id=f"{p}: {case.replace('_', ' ')}") for p, cases in PROGRAMS.items() for case in cases]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here (tried $CXX, c++, g++, clang++)")


@pytest.mark.parametrize(("program", "case"), CASES)
def test_on_the_host(program: str, case: str) -> None:
    assert COMPILER is not None
    executable = compile.build(program, compiler=COMPILER)
    run = subprocess.run([executable, case], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"[1-9]\d* facts checked\n", run.stdout)


def test_every_program_has_cases_and_refuses_a_name_that_is_none() -> None:
    assert COMPILER is not None
    assert PROGRAMS
    assert all(PROGRAMS.values())
    executable = compile.build(next(iter(PROGRAMS)), compiler=COMPILER)
    assert subprocess.run([executable, "no_such_case"], capture_output=True, check=False).returncode == 2
