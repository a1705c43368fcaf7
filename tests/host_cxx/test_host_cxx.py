# SPDX-License-Identifier: Apache-2.0
"""Device headers, compiled by the host compiler and tested there: no GPU, no CUDA toolkit."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.host_cxx import compile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Outcome = Callable[[str, str], "subprocess.CompletedProcess[str]"]

COMPILER = compile.find_compiler()
CUTLASS = compile.cutlass_headers()
PROGRAMS = compile.programs()

needs_cutlass = pytest.mark.skipif(isinstance(CUTLASS, str), reason=str(CUTLASS))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here (tried $CXX, c++, g++, clang++)")


def cases(oracles: bool) -> list[object]:
    """Every case of the programs that are, or are not, compared with another project's headers."""
    found = [(p, case) for p, names in PROGRAMS.items() if p.startswith("oracle_") == oracles for case in names]
    return [pytest.param(p, case, id=f"{p}: {case.replace('_', ' ')}") for p, case in found]


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """What a case said. All that were asked for are compiled and run ahead of their tests, one per processor."""
    times = str(request.config.getoption("--host-rounds"))
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = list(dict.fromkeys((c.params["program"], c.params["case"]) for c in calls if c is not None))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = {program: pool.submit(build, program) for program in dict.fromkeys(p for p, _ in asked)}
        ran = {(p, case): pool.submit(run, built[p], case, times) for p, case in asked}
        yield lambda program, case: ran[program, case].result()
        pool.shutdown(cancel_futures=True)


def build(program: str) -> Path:
    assert COMPILER is not None
    oracle = program.startswith("oracle_")
    assert not oracle or not isinstance(CUTLASS, str)
    return compile.build(program, compiler=COMPILER, others=CUTLASS if oracle else ())


def run(executable: Future[Path], case: str, times: str) -> subprocess.CompletedProcess[str]:
    limit_s = 120 * int(times)
    command = [executable.result(), case, times]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)


@pytest.mark.parametrize(("program", "case"), cases(oracles=False))
def test_on_the_host(program: str, case: str, outcome: Outcome) -> None:
    check(outcome(program, case))


@needs_cutlass
@pytest.mark.parametrize(("program", "case"), cases(oracles=True))
def test_against_cutlass(program: str, case: str, outcome: Outcome) -> None:
    check(outcome(program, case))


def check(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"[1-9]\d* facts checked\n", run.stdout)


def test_every_program_has_cases_and_refuses_a_name_that_is_none() -> None:
    assert COMPILER is not None
    assert PROGRAMS
    assert all(PROGRAMS.values())
    executable = compile.build(next(iter(PROGRAMS)), compiler=COMPILER)
    assert subprocess.run([executable, "no_such_case"], capture_output=True, check=False).returncode == 2
