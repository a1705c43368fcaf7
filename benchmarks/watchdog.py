# SPDX-License-Identifier: Apache-2.0
"""Commands that may hang or crash: each in a session of its own, with a log, a time limit, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GRACE_S = 3.0  # between asking for tracebacks and killing
_live: set[int] = set()
_lock = threading.Lock()
_stopping = False


@dataclass(frozen=True)
class Finished:
    """How a command ended. `rc` is None if it had to be stopped; a negative one is the signal that ended it."""

    rc: int | None
    seconds: float
    text: str

    def ending(self) -> str:
        """The end in words."""
        if self.rc is None:
            return f"stopped after {self.seconds:.0f} s"
        if self.rc < 0:
            return f"died of {signal.Signals(-self.rc).name}"
        return f"exit {self.rc}"

    def tail(self, lines: int) -> list[str]:
        """Last lines of the log that are not blank."""
        return [line for line in self.text.splitlines() if line.strip()][-lines:]


def run_watched(
    command: Sequence[str],
    *,
    log: Path,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run a command with its output in `log`; when this returns, its whole process group is gone.

    Args:
        command: Program and arguments.
        log: File for stdout and stderr together.
        limit_s: Seconds after which it is stopped: SIGABRT, so that Python prints where every thread is if
            PYTHONFAULTHANDLER is set, and SIGKILL soon after.
        env: Environment; None passes this process's on.
        cwd: Working directory.

    Raises:
        OSError: It cannot be started, or everything is being stopped.
    """
    began = time.monotonic()
    rc: int | None = None
    with log.open("wb") as file:
        process = _start(command, file, env, cwd)
        try:
            with suppress(subprocess.TimeoutExpired):
                rc = process.wait(limit_s)
            if rc is None:
                _signal(process.pid, signal.SIGABRT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        finally:
            # The group outlives its leader if it left children behind.
            _signal(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process in the driver may not die at once
                process.wait(GRACE_S)
            with _lock:
                _live.discard(process.pid)
    return Finished(rc, time.monotonic() - began, log.read_text(errors="replace"))


def stop_all() -> None:
    """Kill what is still running and start nothing more, for the end of a program that was interrupted."""
    global _stopping
    with _lock:
        _stopping = True
        for group in _live:
            _signal(group, signal.SIGKILL)


def allow() -> None:
    """Start commands again after `stop_all`."""
    global _stopping
    with _lock:
        _stopping = False


def _start(
    command: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None, cwd: Path | None
) -> subprocess.Popen[bytes]:
    with _lock:  # so that whatever was started is seen by `stop_all`
        if _stopping:
            raise InterruptedError("everything is being stopped")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        _live.add(process.pid)
    return process


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
