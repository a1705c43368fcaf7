# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks, each in its own process, under a watchdog.

Processes are forked from a server that has imported torch and nothing else, so a rank starts in milliseconds and
inherits no threads or state of the test session.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.functional"]
GRACE_S = 8.0  # after the first failure: time for the other ranks to report theirs


def run_ranks(
    world: int, target: Callable[..., Any], *args: Any, timeout_s: float = 60.0, may_die: tuple[int, ...] = ()
) -> list[Any]:
    """Call `target(rank, world, *args)` on `world` ranks with a gloo default group; return what each returned.

    `target` is a module-level function. Ranks in `may_die` may end without a result (None in the list).

    Raises:
        AssertionError: a rank raised, died or did not finish in time. The text starts with the rank that failed first
            and holds every report; ranks that hang are killed and add the stacks of their threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="prime-ranks-") as folder:
        failures: dict[int, str] = {}
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank_main, args=(rank, world, folder, pipes[rank][1], target, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            results, failures = _collect([receiver for receiver, _ in pipes], timeout_s, may_die)
            late = [r for r in range(world) if r not in results and r not in failures]
            for rank in late:
                failures[rank] = f"did not finish in {timeout_s:.0f} s\n{_stacks(ranks[rank], Path(folder), rank)}"
        finally:
            for process in ranks:
                process.join(0.0 if failures else GRACE_S)
                if process.is_alive():
                    process.kill()
                    process.join(5.0)
        if failures:
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
    return [results[rank] for rank in range(world)]


def _collect(
    receivers: list[Connection], timeout_s: float, may_die: tuple[int, ...]
) -> tuple[dict[int, Any], dict[int, str]]:
    """(results, failures in order of arrival)."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_ends = {receiver: rank for rank, receiver in enumerate(receivers)}
    deadline = time.monotonic() + timeout_s
    while open_ends and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(open_ends), timeout=left):
            rank = open_ends.pop(receiver)  # type: ignore[arg-type]
            try:
                good, value = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                good, value = rank in may_die, None if rank in may_die else "process ended without a report"
            if good:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return results, failures


def _stacks(process: Any, folder: Path, rank: int) -> str:
    if not process.is_alive():
        return "(its process is gone)"
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return (folder / f"stacks-{rank}").read_text()


def _rank_main(
    rank: int, world: int, folder: str, sender: Connection, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    stacks = open(Path(folder) / f"stacks-{rank}", "w")  # noqa: SIM115 (faulthandler keeps it to the end)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        dist.barrier()  # connections are complete; a rank may end at once
        report = (True, target(rank, world, *args))
    except BaseException:
        report = (False, traceback.format_exc())
    # Plain bytes: multiprocessing would pass tensors as shared memory of a process that is about to end.
    sender.send_bytes(pickle.dumps(report))
    sender.close()
    # No clean-up: after a failure the peers may be gone, and waiting for them here would hide the report's cause.
    os._exit(0 if report[0] else 1)
