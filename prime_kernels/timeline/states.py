# SPDX-License-Identifier: Apache-2.0
"""What every SM did at every moment of a launch: one state at a time, so that times add up.

The tensor cores of an SM multiply while one of its two math warpgroups is inside a tile and does not wait. At any other
moment something else kept both of them, and the state says what.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_kernels.timeline import records as rec
from prime_kernels.timeline.records import LANES, Timeline

# States of the tensor cores, in the order in which one hides another.
STATES = (
    "multiply", "peers", "rows", "operands", "activations", "epilogue", "tile list", "start", "sending", "last peer",
    "tail", "no rows", "other",
)  # fmt: skip
(
    MULTIPLY, PEERS, ROWS, OPERANDS, ACTIVATIONS, EPILOGUE, TILE_LIST, START, SENDING, LAST_PEER, TAIL, NO_ROWS, OTHER,
) = range(len(STATES))  # fmt: skip
# States of the warps that load and copy.
HELPERS = ("waits for a peer", "waits for rows", "copies", "sends", "waits for a free stage", "idle")

_TILE, _STALL, _STORE, _INPUT, _LIST, _SKIP = range(6)  # of a math warpgroup
_LOADER_ROWS, _LOADER_FREE, _COPYING, _SCHEDULE_ROWS, _PEER, _SENDING = range(12, 18)
_FLAGS = 18


@dataclass(frozen=True)
class Sweep:
    """Stretches of time of all CTAs, in which nothing changes; times in ns.

    Attributes:
        ctas: CTAs of the launch.
        span_ns: Length of the launch.
        at: [stretches] CTA * stride + begin, ascending.
        length: [stretches] ns; the stretches of a CTA fill the launch.
        state: [stretches] index into STATES.
        helper: [stretches] index into HELPERS.
        stride: Between two CTAs in `at`.
    """

    ctas: int
    span_ns: int
    at: Tensor
    length: Tensor
    state: Tensor
    helper: Tensor
    stride: int

    def total_ns(self) -> Tensor:
        """[states] ns that an SM spent in each on average."""
        sums = torch.zeros(len(STATES), dtype=torch.float64)
        return sums.index_add_(0, self.state, self.length.double()) / self.ctas

    def binned(self, which: Tensor, index: int, edges: Tensor) -> Tensor:
        """[CTAs, bins] ns that a CTA spent in a state between neighbouring edges.

        Args:
            which: `state` or `helper`.
            index: The state.
            edges: [bins + 1] ns since the launch began, ascending.
        """
        inside = (which == index).to(torch.int64)
        before = torch.cumsum(inside * self.length, 0) - inside * self.length
        asked = torch.arange(self.ctas)[:, None] * self.stride + edges.clamp(0, self.span_ns)[None, :]
        place = (torch.searchsorted(self.at, asked.contiguous(), right=True) - 1).clamp(min=0)
        until = before[place] + inside[place] * torch.minimum(asked - self.at[place], self.length[place])
        return until[:, 1:] - until[:, :-1]


def _flags(timeline: Timeline) -> tuple[Tensor, Tensor]:
    """[marked intervals] their index, and the flag that they raise."""
    lane = timeline.where()[1]
    event, detail = timeline.event, timeline.detail
    waits = event == rec.WAIT
    index, flag = [], []

    def mark(mask: Tensor, number: int) -> None:
        found = mask.nonzero().squeeze(1)
        index.append(found)
        flag.append(torch.full_like(found, number))

    for which, math in enumerate(rec.MATH):
        mine, base = lane == math, 6 * which
        mark(mine & (event == rec.MULTIPLY), base + _TILE)
        mark(mine & waits & (detail == rec.STAGE_FULL), base + _STALL)
        mark(mine & (event == rec.EPILOGUE), base + _STORE)
        mark(mine & waits & (detail == rec.INPUT), base + _INPUT)
        mark(mine & waits & (detail == rec.TILE_FULL), base + _LIST)
        mark(mine & (event == rec.SKIP), base + _SKIP)
    loader = (lane == rec.LOADER) & waits
    mark(loader & (detail == rec.INPUT), _LOADER_ROWS)
    mark(loader & (detail == rec.STAGE_FREE), _LOADER_FREE)
    mark((lane == rec.SCHEDULER) & waits & (detail == rec.INPUT), _SCHEDULE_ROWS)
    mark(event == rec.COPY, _COPYING)
    mark(event == rec.PUSH, _SENDING)
    mark(waits & ((detail == rec.PEER_READY) | (detail == rec.PEER_DONE)), _PEER)
    return torch.cat(index), torch.cat(flag)


def _busy_bounds(timeline: Timeline) -> tuple[Tensor, Tensor]:
    """[CTAs] begin of the first and end of the last interval in which a math warpgroup works on a tile; zeros for a CTA
    without one."""
    cta, lane = timeline.where()
    work = (lane >= rec.MATH[0]) & (timeline.event != rec.WAIT)
    first = torch.full((timeline.ctas,), timeline.span_ns)
    last = torch.zeros(timeline.ctas, dtype=torch.int64)
    first.scatter_reduce_(0, cta[work], timeline.since[work], "amin")
    last.scatter_reduce_(0, cta[work], timeline.until[work], "amax")
    return torch.where(last > 0, first, 0), last


def _peer_done(timeline: Timeline) -> tuple[int, int]:
    """When the launch's last CTA waited for peers to be done; equal where it did not."""
    mask = (timeline.event == rec.WAIT) & (timeline.detail == rec.PEER_DONE)
    if not bool(mask.any()):
        return 0, 0
    return int(timeline.since[mask].min()), int(timeline.until[mask].max())


def _state(up: Tensor, time: Tensor, bounds: tuple[Tensor, Tensor], done: tuple[int, int]) -> Tensor:
    """[stretches] state, from the flags that are up, the time, the CTA's first and last work, and the time in which
    the launch waited for peers to be done."""
    first, last = bounds
    one, two = up[:, 0:6], up[:, 6:12]
    product = (one[:, _TILE] & ~one[:, _STALL]) | (two[:, _TILE] & ~two[:, _STALL])
    stall = (one[:, _TILE] & one[:, _STALL]) | (two[:, _TILE] & two[:, _STALL])
    either = one | two
    state = torch.full((len(up),), OTHER)
    for mask, name in (
        (either[:, _SKIP], NO_ROWS),
        (time >= last, TAIL),
        ((time >= last) & up[:, _SENDING], SENDING),
        ((time >= last) & (time >= done[0]) & (time < done[1]), LAST_PEER),
        (time < first, START),
        (either[:, _LIST] & (time >= first) & (time < last), TILE_LIST),
        (either[:, _STORE], EPILOGUE),
        (either[:, _STORE] & either[:, _INPUT], ACTIVATIONS),
        # The scheduler is some tiles ahead: its wait keeps nobody until the list is empty.
        (either[:, _LIST] & up[:, _SCHEDULE_ROWS], ROWS),
        (stall, OPERANDS),
        (stall & up[:, _LOADER_ROWS], ROWS),
    ):
        state[mask] = name
    # Nothing has come yet, and what this CTA itself is to bring is not to be had.
    state[((state == START) | (state == ROWS)) & up[:, _PEER]] = PEERS
    state[product] = MULTIPLY
    return state


def sweep(timeline: Timeline) -> Sweep:
    """Cut a launch into stretches.

    Args:
        timeline: One launch.
    """
    span, ctas = timeline.span_ns, timeline.ctas
    stride = span + 1
    index, flag = _flags(timeline)
    cta = timeline.lane[index] // len(LANES)
    since, until = timeline.since[index].clamp(0, span), timeline.until[index].clamp(0, span)
    first, last = _busy_bounds(timeline)
    every = torch.arange(ctas) * stride
    done = _peer_done(timeline)
    # Marks of every CTA that raise no flag: its first and last work, the wait for peers' end; the first opens it.
    ends = (every + min(at, span) for at in done)
    cut = torch.cat([every, every + first, every + last.clamp(max=span), *ends])
    at = torch.cat([cta * stride + since, cta * stride + until, cut])
    nothing = torch.zeros(len(cut), dtype=torch.int64)
    change = torch.cat([torch.ones_like(flag), -torch.ones_like(flag), nothing])
    column = torch.cat([flag, flag, nothing])
    points, inverse = torch.unique(at, return_inverse=True)
    delta = torch.zeros(len(points) * _FLAGS, dtype=torch.int32)
    delta.index_add_(0, inverse * _FLAGS + column, change.to(torch.int32))
    up = torch.cumsum(delta.view(-1, _FLAGS), 0) > 0
    owner = points // stride
    time = points - owner * stride
    # The last stretch of a CTA ends with the launch.
    length = torch.minimum(torch.cat([points[1:], torch.tensor([ctas * stride])]), owner * stride + span) - points
    state = _state(up, time, (first[owner], last[owner]), done)
    helper = torch.full_like(state, HELPERS.index("idle"))
    helper[up[:, _LOADER_FREE]] = HELPERS.index("waits for a free stage")
    helper[up[:, _SCHEDULE_ROWS]] = HELPERS.index("waits for rows")
    helper[up[:, _SENDING]] = HELPERS.index("sends")
    helper[up[:, _COPYING]] = HELPERS.index("copies")
    helper[up[:, _LOADER_ROWS]] = HELPERS.index("waits for rows")
    helper[up[:, _PEER]] = HELPERS.index("waits for a peer")
    return Sweep(ctas, span, points, length, state, helper, stride)


def copied_bytes(timeline: Timeline, row_bytes: int, edges: Tensor) -> Tensor:
    """[bins] bytes that the copying warps moved (read once, written once: counted twice) between neighbouring edges.

    Args:
        timeline: One launch.
        row_bytes: Of one row.
        edges: [bins + 1] ns since the launch began, ascending.
    """
    copies = (timeline.event == rec.COPY).nonzero().squeeze(1)
    return _spread(timeline, copies, torch.full((len(copies),), 2.0 * rec.COPY_ROWS * row_bytes), edges)


def remote_bytes(timeline: Timeline, event: int, row_bytes: int, edges: Tensor) -> Tensor:
    """[bins] bytes that went from one rank to another between neighbouring edges.

    Args:
        timeline: One launch.
        event: COPY for what was pulled, PUSH for what was sent.
        row_bytes: Of one row.
        edges: [bins + 1] ns since the launch began, ascending.
    """
    moves = ((timeline.event == event) & (timeline.remote > 0)).nonzero().squeeze(1)
    return _spread(timeline, moves, timeline.remote[moves].double() * row_bytes, edges)


def _spread(timeline: Timeline, moves: Tensor, amount: Tensor, edges: Tensor) -> Tensor:
    """[bins] bytes between neighbouring edges, of intervals that each move an amount evenly."""
    since, until = timeline.since[moves].double(), timeline.until[moves].double()
    rate = amount.double() / (until - since).clamp(min=1.0)
    order = torch.argsort(at := torch.cat([since, torch.maximum(until, since + 1)]))
    at, rates = at[order], torch.cumsum(torch.cat([rate, -rate])[order], 0)
    if not len(at):
        return torch.zeros(len(edges) - 1, dtype=torch.float64)
    moved = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumsum(rates[:-1] * (at[1:] - at[:-1]), 0)])
    place = torch.searchsorted(at, edges.double(), right=True) - 1
    inside = place.clamp(min=0)
    until_edge = torch.where(place < 0, 0.0, moved[inside] + rates[inside] * (edges.double() - at[inside]))
    return until_edge[1:] - until_edge[:-1]
