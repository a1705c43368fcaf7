# SPDX-License-Identifier: Apache-2.0
"""No rank waits for a rank that will not come, and each error names the one that is to blame."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from prime_kernels.errors import ConfigMismatch, PeerAborted, PeerTimeout, PrimeKernelsError, ShapeError
from tests.helpers.procs import run_ranks

pytestmark = pytest.mark.dist

WORLD, LOCAL_EXPERTS, TIMEOUT_S = 3, 2, 3.0
BLAMED = 1


def open_channel(timeout_s: float = 30.0) -> Any:
    import torch.distributed as dist

    from prime_kernels.moe.abort import PeerChannel

    group = dist.group.WORLD
    assert group is not None
    channel = PeerChannel(group, num_local_experts=LOCAL_EXPERTS, timeout_s=timeout_s)
    dist.barrier()  # every rank is connected, so that one may end at once
    return channel


def start_call(channel: Any, phase: str = "forward") -> None:
    channel.exchange(torch.ones(WORLD, LOCAL_EXPERTS, dtype=torch.int64), phase=phase, tokens=3)


def swap_rows(channel: Any) -> None:
    rows = torch.zeros(WORLD, 8, dtype=torch.uint8)
    channel.all_to_all(torch.empty_like(rows), rows, [1] * WORLD, [1] * WORLD)


def error_of(call: Any, *args: Any) -> tuple[PrimeKernelsError | None, float]:
    """(the typed error that `call` raised or None, seconds it took)."""
    started = time.monotonic()
    try:
        call(*args)
    except PrimeKernelsError as error:
        return error, time.monotonic() - started
    return None, time.monotonic() - started


def refuse_arguments_then_call_again(rank: int, world: int) -> Any:
    channel = open_channel()

    def call() -> None:
        with channel.guard("forward"), channel.guard("forward"):
            if rank == BLAMED:
                raise ShapeError("x is [9, 4]; need at most 8 rows.")
            start_call(channel)

    first = error_of(call)
    with channel.guard("forward"):
        start_call(channel)
        swap_rows(channel)
    return first


def test_a_rank_that_refuses_its_arguments_stops_its_peers_and_the_next_call_works() -> None:
    reports = run_ranks(WORLD, refuse_arguments_then_call_again)
    for rank, (error, seconds) in enumerate(reports):
        assert seconds < 5.0
        if rank == BLAMED:
            assert isinstance(error, ShapeError)
            continue
        assert isinstance(error, PeerAborted)
        assert error.code == "E53"
        assert error.facts["peer"] == BLAMED
        assert "that rank's own error" in (error.remedy or "")
        assert "need at most 8 rows" in str(error)
        assert "ShapeError" in str(error)


def fail_between_headers_and_rows(rank: int, world: int) -> Any:
    channel = open_channel()

    def call() -> None:
        with channel.guard("forward"):
            start_call(channel)
            if rank == BLAMED:
                raise MemoryError("no room for the rows")
            swap_rows(channel)

    if rank == BLAMED:
        with pytest.raises(MemoryError):
            call()
        time.sleep(3.0)  # its process stays: only the notice can tell the others
    return error_of(call)


def test_a_rank_that_fails_in_the_middle_of_a_call_stops_peers_that_wait_for_its_rows() -> None:
    reports = run_ranks(WORLD, fail_between_headers_and_rows)
    for error, seconds in reports:
        assert seconds < 3.0
        assert isinstance(error, PeerAborted)
        assert "no room for the rows" in str(error)


def fail_after_the_rows(rank: int, world: int) -> Any:
    channel = open_channel()

    def call() -> None:
        with channel.guard("backward"):
            start_call(channel, "backward")
            swap_rows(channel)
            if rank == BLAMED:
                raise MemoryError("no room for the gradient")

    if rank == BLAMED:
        with pytest.raises(MemoryError):
            call()
        time.sleep(3.0)
    else:
        call()
    return error_of(call)


def test_a_rank_that_fails_after_the_rows_stops_peers_in_their_next_call() -> None:
    for error, seconds in run_ranks(WORLD, fail_after_the_rows):
        assert seconds < 3.0
        assert isinstance(error, PeerAborted)
        assert "no room for the gradient" in str(error)


def come_too_late(rank: int, world: int) -> Any:
    channel = open_channel(TIMEOUT_S)
    start_call(channel)
    if rank == BLAMED:
        time.sleep(TIMEOUT_S + 2.0)
    first = error_of(start_call, channel, "backward")
    return first, error_of(start_call, channel, "forward")


def test_a_missing_rank_is_named_after_the_time_out_and_learns_about_it_when_it_comes() -> None:
    reports = run_ranks(WORLD, come_too_late)
    for rank, ((error, seconds), (again, again_seconds)) in enumerate(reports):
        assert isinstance(again, PeerAborted), "a broken channel refuses calls"
        assert again_seconds < 0.5
        if rank == BLAMED:
            assert isinstance(error, PeerAborted)
            assert "waited" in str(error)
            assert seconds < 3.0
            continue
        assert isinstance(error, PeerTimeout)
        assert error.facts["peers"] == [BLAMED]
        assert error.facts["phase"] == "backward"
        assert TIMEOUT_S - 0.1 <= seconds < TIMEOUT_S + 2.0
        assert f"ep_rank {rank} waited" in str(error)


def stop_sending_rows(rank: int, world: int) -> Any:
    channel = open_channel(TIMEOUT_S)
    start_call(channel)
    if rank == BLAMED:
        time.sleep(TIMEOUT_S + 1.5)
        return None, 0.0
    return error_of(swap_rows, channel)


def test_a_rank_that_stops_before_its_rows_is_named_after_the_time_out() -> None:
    for rank, (error, seconds) in enumerate(run_ranks(WORLD, stop_sending_rows)):
        if rank != BLAMED:
            assert isinstance(error, PeerTimeout)
            assert error.facts["peers"] == [BLAMED]
            assert seconds < TIMEOUT_S + 1.5


def lose_a_process(rank: int, world: int) -> Any:
    channel = open_channel()
    start_call(channel)
    if rank == BLAMED:
        os._exit(7)
    return error_of(start_call, channel, "backward")


def test_a_rank_whose_process_ends_is_named_at_once() -> None:
    reports = run_ranks(WORLD, lose_a_process, may_die=(BLAMED,))
    for rank in (0, 2):
        error, seconds = reports[rank]
        assert isinstance(error, PeerAborted)
        assert error.facts["peer"] == BLAMED
        assert seconds < 5.0


def raise_and_end(rank: int, world: int) -> Any:
    channel = open_channel()
    if rank == BLAMED:
        with pytest.raises(ShapeError), channel.guard("forward"):
            raise ShapeError("x is [9, 4]; need at most 8 rows.")
        os._exit(1)
    time.sleep(1.0)  # its process is gone before anybody asks
    return error_of(start_call, channel)


def test_the_reason_outlives_the_process_that_raised() -> None:
    reports = run_ranks(WORLD, raise_and_end, may_die=(BLAMED,))
    for rank in (0, 2):
        error, seconds = reports[rank]
        assert isinstance(error, PeerAborted)
        assert error.facts["peer"] == BLAMED
        assert "need at most 8 rows" in str(error)
        assert seconds < 3.0


def run_different_phases(rank: int, world: int) -> Any:
    channel = open_channel()
    return error_of(start_call, channel, "backward" if rank == BLAMED else "forward")


def test_ranks_in_different_phases_are_told_so() -> None:
    for error, _ in run_ranks(WORLD, run_different_phases):
        assert isinstance(error, ConfigMismatch)
        assert "same layers" in str(error)
