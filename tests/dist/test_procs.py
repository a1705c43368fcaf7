# SPDX-License-Identifier: Apache-2.0
"""The watchdog of the multi-process tests: it must fail when a rank fails, hangs or dies, and say which."""

from __future__ import annotations

import os
import time

import pytest

from tests.helpers.procs import run_ranks

pytestmark = pytest.mark.dist


def add(rank: int, world: int, more: int) -> int:
    return 10 * rank + world + more


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(3, add, 100) == [103, 113, 123]


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("nothing to see")
    time.sleep(30.0)


def test_the_first_failure_is_reported_and_the_others_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.procs.GRACE_S", 0.5)
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)^rank 1:.*nothing to see.*rank 0: did not finish.*fail_on_one"):
        run_ranks(2, fail_on_one)
    assert time.monotonic() - started < 15.0


def die_on_one(rank: int, world: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def test_a_process_that_ends_without_a_report_is_a_failure_unless_expected() -> None:
    with pytest.raises(AssertionError, match="rank 1: process ended without a report"):
        run_ranks(2, die_on_one)
    assert run_ranks(2, die_on_one, may_die=(1,)) == [0, None]
