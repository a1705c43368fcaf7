# SPDX-License-Identifier: Apache-2.0
"""Device headers, compiled by the host compiler and tested there: no GPU, no CUDA toolkit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.host_cxx import compile

COMPILER = compile.find_compiler()
CUTLASS = compile.cutlass_headers()
PROGRAMS = compile.programs()

needs_cutlass = pytest.mark.skipif(isinstance(CUTLASS, str), reason=str(CUTLASS))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here (tried $CXX, c++, g++, clang++)")


def cases(oracles: bool) -> list[object]:
    """Every case of the programs that are, or are not, compared with another project's headers."""
    found = [(p, case) for p, names in PROGRAMS.items() if p.startswith("oracle_") == oracles for case in names]
    return [pytest.param(p, case, id=f"{p}: {case.replace('_', ' ')}") for p, case in found]


@pytest.mark.parametrize(("program", "case"), cases(oracles=False))
def test_on_the_host(program: str, case: str) -> None:
    check(program, case)


@needs_cutlass
@pytest.mark.parametrize(("program", "case"), cases(oracles=True))
def test_against_cutlass(program: str, case: str) -> None:
    assert not isinstance(CUTLASS, str)
    check(program, case, CUTLASS)


def check(program: str, case: str, others: tuple[Path, ...] = ()) -> None:
    assert COMPILER is not None
    executable = compile.build(program, compiler=COMPILER, others=others)
    run = subprocess.run([executable, case], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"[1-9]\d* facts checked\n", run.stdout)


def test_every_program_has_cases_and_refuses_a_name_that_is_none() -> None:
    assert COMPILER is not None
    assert PROGRAMS
    assert all(PROGRAMS.values())
    executable = compile.build(next(iter(PROGRAMS)), compiler=COMPILER)
    assert subprocess.run([executable, "no_such_case"], capture_output=True, check=False).returncode == 2
