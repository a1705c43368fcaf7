# SPDX-License-Identifier: Apache-2.0
"""CUDA does not survive fork(): the child's first driver call would fail far from its cause, so it is told here."""

from __future__ import annotations

import os

from prime_kernels.errors import BackendUnavailable

used = False
"""Whether this package has initialised the driver in this process or in the one it was forked from."""
forked = False
"""Whether this process was forked after that; the launch path reads it, a function call would cost it 50 ns."""


def _in_child() -> None:
    global forked
    forked = used


os.register_at_fork(after_in_child=_in_child)


def mark() -> None:
    """Say that the driver is initialised from now on."""
    global used
    used = True


def error(why: str) -> BackendUnavailable:
    """The error for a forked process (E60)."""
    return BackendUnavailable(
        f"process {os.getpid()} was forked from process {os.getppid()} after CUDA was initialised: {why}.",
        code="E60",
        facts={"pid": os.getpid(), "parent": os.getppid()},
        remedy='Start worker processes with multiprocessing.set_start_method("spawn").',
    )


def check() -> None:
    """Refuse to go on in a child that was forked after `mark`.

    Raises:
        BackendUnavailable: This process is such a child (E60).
    """
    if forked:
        raise error("kernels cannot be loaded or launched in it")
