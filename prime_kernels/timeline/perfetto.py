# SPDX-License-Identifier: Apache-2.0
"""A traced pass in the JSON form of Chrome traces, which ui.perfetto.dev and its trace processor load.

Every SM of every rank is a process with a thread per lane; the pass is one more process with, for each rank, a thread
of launches and counters.
Times are microseconds since the first launch with records began.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import torch

from prime_kernels.timeline import records as rec
from prime_kernels.timeline.records import LANES, ROLES
from prime_kernels.timeline.states import MULTIPLY, copied_bytes, remote_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from prime_kernels.timeline.call import Launch, Pass
    from prime_kernels.timeline.records import Timeline

PLAIN_BYTES = 10_000_000  # a longer file is compressed; Perfetto opens that as it is
CALL_PID = 1
FIRST_SM_PID = 100
RANK_PIDS = 1000  # from an SM of one rank to the same SM of the next
COUNTER_NS = 5000  # between two values of a counter
# Waits of one lane for the same thing that lie closer than this become one slice: the loader has one for every stage.
JOIN_NS = 2000
JOINED_LANES = (0, 1)
MOST_SLICES = 400_000  # of one launch; the shortest waits are left out of the trace first, never of the summary
_EVENTS = {rec.MULTIPLY: "multiply", rec.SKIP: "no rows", rec.EPILOGUE: "epilogue"}
_EVENTS |= {rec.COPY: "copy rows", rec.PUSH: "send rows"}


def _joined(timeline: Timeline, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the intervals in `order`: those that open a slice, where each slice ends, and how many intervals it holds."""
    lane, since, until = timeline.lane[order], timeline.since[order], timeline.until[order]
    event, detail = timeline.event[order], timeline.detail[order]
    joins = torch.zeros(len(order), dtype=torch.bool)
    loader = torch.isin(lane % len(LANES), torch.tensor(JOINED_LANES)) & (event == rec.WAIT)
    same = (lane[1:] == lane[:-1]) & loader[1:] & loader[:-1] & (detail[1:] == detail[:-1])
    joins[1:] = same & (since[1:] - until[:-1] < JOIN_NS)
    heads = (~joins).nonzero().squeeze(1)
    stops = torch.cat([heads[1:], torch.tensor([len(order)])])
    return order[heads], until[stops - 1], stops - heads


def _long_enough(timeline: Timeline, heads: Tensor, until: Tensor, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same without the shortest waits, where there are more slices than a viewer takes."""
    length = until - timeline.since[heads]
    waits = timeline.event[heads] == rec.WAIT
    many = len(heads) - MOST_SLICES
    least = int(torch.sort(length[waits]).values[many - 1]) if 0 < many <= int(waits.sum()) else -1
    keep = ~waits | (length > least)
    return heads[keep], until[keep], parts[keep]


def _slices(timeline: Timeline, offset_ns: int, sm_pids: list[int]) -> Iterator[str]:
    """Lines of the intervals of one launch, a slice before those inside it."""
    # By lane, begin, and then the longest first.
    order = torch.argsort(timeline.until, descending=True, stable=True)
    order = order[torch.argsort(timeline.since[order], stable=True)]
    order = order[torch.argsort(timeline.lane[order], stable=True)]
    heads, until, parts = _long_enough(timeline, *_joined(timeline, order))
    tile_of = {int(at): row for row, at in enumerate(timeline.tiles.interval)}
    numbers = [column.tolist() for column in timeline.tiles[1:]]
    columns = (timeline.lane, timeline.event, timeline.detail, timeline.since, timeline.remote)
    rows = zip(heads.tolist(), until.tolist(), parts.tolist(), *(c[heads].tolist() for c in columns), strict=True)
    for index, end, count, lane, event, detail, since, remote in rows:
        if end <= since:
            continue  # shorter than the clock's tick
        cta, number = divmod(lane, len(LANES))
        name = _EVENTS.get(event) or f"wait: {rec.wait_name(ROLES[number], detail)}"
        args = ""
        if index in tile_of:
            row, column, expert, steps, valid = (values[tile_of[index]] for values in numbers)
            args = (
                f',"args":{{"expert":{expert},"row":{row},"column":{column},"steps":{steps},"rows":{valid},'
                f'"operands":{detail}}}'
            )
        elif event in (rec.COPY, rec.PUSH):
            args = f',"args":{{"row":{detail * rec.COPY_ROWS},"remote":{remote}}}'
        elif count > 1:
            args = f',"args":{{"waits":{count}}}'
        yield (
            f'{{"ph":"X","pid":{sm_pids[cta]},"tid":{number + 1},"ts":{(offset_ns + since) / 1000:.3f},'
            f'"dur":{(end - since) / 1000:.3f},"name":"{name}"{args}}}'
        )


def _of_rank(call: Pass, rank: int, text: str) -> str:
    return text if call.ranks == 1 else f"rank {rank}: {text}"


def _counters(launch: Launch, offset_ns: int, call: Pass) -> Iterator[str]:
    timeline, sweep = launch.timeline, launch.sweep
    assert timeline is not None
    assert sweep is not None
    edges = torch.arange(0, sweep.span_ns + COUNTER_NS, COUNTER_NS)
    share, row_bytes = call.sms // call.ranks, 2 * call.config.hidden
    busy = sweep.binned(sweep.state, MULTIPLY, edges).sum(0).double() / (COUNTER_NS * share) * 100
    curves = {"tensor cores busy %": busy, "rows copied GB/s": copied_bytes(timeline, row_bytes, edges) / COUNTER_NS}
    if call.ranks > 1:
        curves["from peers GB/s"] = remote_bytes(timeline, rec.COPY, row_bytes, edges) / COUNTER_NS
        curves["to peers GB/s"] = remote_bytes(timeline, rec.PUSH, row_bytes, edges) / COUNTER_NS
    for text, values in curves.items():
        name = _of_rank(call, launch.rank, text)
        for at, value in zip(edges.tolist(), values.tolist(), strict=False):
            when = f'"pid":{CALL_PID},"ts":{(offset_ns + at) / 1000:.3f}'
            yield f'{{"ph":"C",{when},"name":"{name}","args":{{"value":{value:.2f}}}}}'


def _names(call: Pass) -> Iterator[str]:
    def name(kind: str, pid: int, tid: int, text: str) -> str:
        return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": text}})

    yield name("process_name", CALL_PID, 0, f"{call.direction} on {call.device}")
    for rank in range(call.ranks):
        yield name("thread_name", CALL_PID, 1 + rank, _of_rank(call, rank, "launches"))
        mine = [it.timeline for it in call.launches if it.timeline is not None and it.rank == rank]
        for sm in sorted({int(sm) for timeline in mine for sm in timeline.sm}):
            pid = FIRST_SM_PID + RANK_PIDS * rank + sm
            yield name("process_name", pid, 0, _of_rank(call, rank, f"SM {sm:03}"))
            for number, lane in enumerate(LANES, 1):
                yield name("thread_name", pid, number, lane)


def events(call: Pass) -> Iterator[str]:
    """Every event of the trace as a line of JSON.

    Args:
        call: The pass.
    """
    yield from _names(call)
    for launch, offset in zip(call.launches, call.start_ns(), strict=True):
        if launch.timeline is None or offset is None:
            continue
        args = {"normal ms": round(launch.normal_ms, 4), "recording ms": round(launch.profile_ms, 4)}
        span = {"ph": "X", "pid": CALL_PID, "tid": 1 + launch.rank, "ts": offset / 1000}
        span["dur"] = launch.timeline.span_ns / 1000
        yield json.dumps({**span, "name": launch.name, "args": args})
        pids = [FIRST_SM_PID + RANK_PIDS * launch.rank + sm for sm in launch.timeline.sm.tolist()]
        yield from _slices(launch.timeline, offset, pids)
        yield from _counters(launch, offset, call)


def write(path: Path, call: Pass) -> Path:
    """Write the trace.

    Args:
        path: The file, ending in .json; its folder exists.
        call: The pass.

    Returns:
        The file written: `path`, or with .gz behind it where that is shorter than `PLAIN_BYTES` no longer.
    """
    body = ",\n".join(events(call))
    other = json.dumps({name: getattr(call, name) for name in ("device", "direction", "tokens", "ranks")})
    data = f'{{"displayTimeUnit":"ns","otherData":{other},"traceEvents":[\n{body}\n]}}\n'.encode()
    if len(data) <= PLAIN_BYTES:
        path.write_bytes(data)
        return path
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(data, compresslevel=6, mtime=0))
    return packed
