# SPDX-License-Identifier: Apache-2.0
"""Tests in processes of their own: one that hangs or spoils its CUDA context costs no other."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from benchmarks.watchdog import run_watched

ROOT = Path(__file__).resolve().parents[2]
_P = ParamSpec("_P")


def own_process(limit_s: float, **environment: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Run the decorated test in a new process; a failure shows the end of what that printed.

    Args:
        limit_s: Seconds after which it is stopped, with the stacks of its threads.
        environment: Variables that the process gets besides this one's.

    Arguments of the test must survive JSON; fixtures cannot be used.
    """

    def decorate(test: Callable[_P, None]) -> Callable[_P, None]:
        module = ".".join(Path(test.__code__.co_filename).relative_to(ROOT).with_suffix("").parts)

        @functools.wraps(test)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
            command = [sys.executable, "-m", "tests.helpers.child", module, test.__name__, json.dumps([args, kwargs])]
            env = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
            with tempfile.TemporaryDirectory(prefix="prime-child-") as folder:
                found = run_watched(command, log=Path(folder) / "log", limit_s=limit_s, env=env, cwd=ROOT)
            assert found.rc == 0, "\n".join([found.ending(), *found.tail(60)])

        return run

    return decorate


def main(module: str, name: str, arguments: str) -> None:
    """The other process: call the undecorated test."""
    args, kwargs = json.loads(arguments)
    test: Any = getattr(importlib.import_module(module), name)
    test.__wrapped__(*args, **kwargs)


if __name__ == "__main__":
    main(*sys.argv[1:])
