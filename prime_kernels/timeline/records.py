# SPDX-License-Identifier: Apache-2.0
"""The buffer that a profile build records into, and the intervals that are read from it.

The layout is that of kernels_src/profile/timeline.cuh: a head, then for every CTA and lane its own head and a fixed
number of records of 16 bytes. A lane is one thread that records for its warp or warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prime_kernels.errors import LaunchError

HEAD_BYTES, LANE_BYTES, RECORD_BYTES = 32, 32, 16
LANES = ("load", "schedule", "copy 0", "copy 1", "math 0", "math 1")
ROLES = ("load", "schedule", "copy", "copy", "math", "math")
WAIT, MULTIPLY, SKIP, EPILOGUE, COPY, PUSH = 1, 2, 3, 4, 5, 6  # Event
TILE_FULL, TILE_FREE, STAGE_FULL, STAGE_FREE, INPUT = 1, 2, 3, 4, 5  # Wait of kernels_src/common/fault.cuh
PEER_READY, PEER_DONE, FIRST_COPY = 8, 9, 10
COPY_ROWS = 8  # of one COPY record
LOADER, SCHEDULER, COPIERS, MATH = 0, 1, (2, 3), (4, 5)  # lanes
WAITS = {
    TILE_FULL: "the next tile",
    TILE_FREE: "room in the tile list",
    STAGE_FULL: "operands",
    STAGE_FREE: "a free stage",
    INPUT: "saved activations",
    6: "the counts of a peer",
    7: "the rows of a peer",
    PEER_READY: "a peer to be ready",
    PEER_DONE: "a peer to be done",
    FIRST_COPY: "the first copy of a row",
}
# What INPUT means to the loader and the scheduler, and to the warps that send rows to peers.
ROWS, RESULTS = "rows being copied", "rows to send"


def wait_name(role: str, wait: int) -> str:
    """What a role waits for, in words."""
    if wait == INPUT and role != "math":
        return RESULTS if role == "copy" else ROWS
    return WAITS.get(wait, f"event {wait}")


def buffer_bytes(ctas: int, capacity: int) -> int:
    """Bytes of a buffer for `ctas` CTAs with `capacity` records a lane."""
    return HEAD_BYTES + ctas * len(LANES) * (LANE_BYTES + capacity * RECORD_BYTES)


def clear(buffer: Tensor, ctas: int, capacity: int) -> None:
    """Make a buffer ready for a launch.

    Args:
        buffer: [buffer_bytes] uint8 on any device.
        ctas: CTAs that it has room for.
        capacity: Records of a lane.
    """
    words = buffer.view(torch.int32)
    words.zero_()
    words[:2] = torch.tensor([capacity, ctas], dtype=torch.int32)


class Tiles(NamedTuple):
    """The tiles of the intervals that multiply or skip one, [tiles] each: index of the interval, first row, first
    column (indices of tiles in a weight gradient), expert, steps of 64, rows that exist."""

    interval: Tensor
    row: Tensor
    column: Tensor
    expert: Tensor
    k_steps: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Timeline:
    """One launch as its lanes recorded it; times in ns since the launch's first stamp, int64.

    Attributes:
        sm: [CTAs] SM that a CTA ran on.
        begin: [CTAs, lanes] entry of the kernel.
        end: [CTAs, lanes] end of the role.
        lost: Records that found no room.
        start_ns: %globaltimer at time 0.
        lane: [intervals] CTA * lanes + lane; ascending, and within a lane in order of the ends.
        event: [intervals] WAIT to PUSH.
        detail: [intervals] what was waited for; the first row / 8 of a COPY or PUSH; which operands of a tile.
        since: [intervals] begin.
        until: [intervals] end.
        tiles: Of the intervals that are tiles.
        remote: [intervals] rows of a COPY or PUSH that went from one rank to another.
    """

    sm: Tensor
    begin: Tensor
    end: Tensor
    lost: int
    start_ns: int
    lane: Tensor
    event: Tensor
    detail: Tensor
    since: Tensor
    until: Tensor
    tiles: Tiles
    remote: Tensor

    @property
    def ctas(self) -> int:
        """CTAs of the launch."""
        return int(self.sm.numel())

    @property
    def span_ns(self) -> int:
        """From the first entry to the last end of a role."""
        return int(self.end.max())

    def where(self) -> tuple[Tensor, Tensor]:
        """CTA and lane of every interval."""
        return self.lane // len(LANES), self.lane % len(LANES)


class Raw(NamedTuple):
    """What is kept of a buffer: [CTAs * lanes, 4] int64 heads (begin, end, SM and count, what only
    kernels read), and the records in use, [records, 4] int32, lane after lane."""

    heads: Tensor
    records: Tensor


def used(buffer: Tensor) -> Raw:
    """The part of a buffer that a launch wrote, on the CPU.

    Args:
        buffer: [buffer_bytes] uint8.

    Raises:
        LaunchError: Its head is not one (E43).
    """
    capacity, ctas = (int(value) for value in buffer[:8].view(torch.int32).cpu())
    if buffer.numel() != buffer_bytes(ctas, capacity):
        raise _refuse(f"{buffer.numel()} bytes for {ctas} CTAs of {capacity} records")
    lanes = buffer[HEAD_BYTES:].view(ctas * len(LANES), -1)
    heads = lanes[:, :LANE_BYTES].contiguous().view(torch.int64)
    records = lanes[:, LANE_BYTES:].contiguous().view(torch.int32).view(len(lanes), capacity, 4)
    kept = _counts(heads).clamp(max=capacity)
    mask = torch.arange(capacity, device=buffer.device) < kept[:, None]
    return Raw(heads.cpu(), records[mask].cpu())


def _refuse(what: str) -> LaunchError:
    return LaunchError(
        f"the records of a timeline make no sense: {what}.",
        facts={"problem": what},
        remedy="Report it with `prime-kernels doctor --json`: kernels and package are of two builds.",
    )


def _counts(heads: Tensor) -> Tensor:
    """Records that a lane made, those without room too."""
    return heads[:, 2] >> 32


def _tile_places(lane: Tensor, what: Tensor) -> Tensor:
    """[records] bool: the record is a tile, and the next one holds its numbers.

    Those numbers may look like a tile themselves; in a run of records that do, every second one is.
    """
    event = what & 255
    alike = (event == MULTIPLY) | (event == SKIP)
    index = torch.arange(len(what))
    first_of_lane = torch.ones_like(alike)
    first_of_lane[1:] = lane[1:] != lane[:-1]
    breaks = torch.where(~alike, index, torch.where(first_of_lane, index - 1, -1))
    run = index - torch.cummax(breaks, 0).values if len(what) else index
    return alike & (run % 2 == 1)


def parse(raw: Raw) -> Timeline:
    """Intervals of one launch.

    Args:
        raw: What `used` returned.

    Raises:
        LaunchError: No lane recorded, or something ends before it begins (E43).
    """
    heads = raw.heads
    counts = _counts(heads)
    if not len(heads) or not bool((heads[:, 0] > 0).all()):
        raise _refuse("a lane has no begin")
    kept, total = len(raw.records), int(counts.sum())
    # Only full lanes lose records, so the room of a lane is that of the fullest.
    room = counts if kept == total else counts.clamp(max=_capacity(counts, kept))
    lane = torch.repeat_interleave(torch.arange(len(heads)), room)
    if len(lane) != kept:
        raise _refuse(f"{kept} records, the heads count {len(lane)}")
    words = raw.records.to(torch.int64)
    what = words[:, 2] & 0xFFFFFFFF
    tile = _tile_places(lane, what)
    cut = tile.clone()  # a tile whose numbers found no room
    cut[:-1] &= lane[1:] != lane[:-1]
    numbers = torch.zeros_like(tile)
    numbers[1:] = (tile & ~cut)[:-1]
    keep = ~(numbers | cut)
    start = int(heads[:, 0].min())
    # A record has the lower half of its begin; the head of its lane has all of an earlier time.
    entry = heads[lane, 0]
    since = (entry + ((words[:, 0] - entry) & 0xFFFFFFFF))[keep] - start
    until = since + (words[:, 1] & 0xFFFFFFFF)[keep]
    ends = heads[:, :2].view(-1, len(LANES), 2) - start
    if bool((since < 0).any()) or bool((ends[..., 1] < ends[..., 0]).any()):
        raise _refuse("something ends before it begins")
    place = (tile & ~cut).nonzero().squeeze(1)
    rest = words[place + 1]
    tiles = Tiles(
        (torch.cumsum(keep, 0) - 1)[place],
        rest[:, 0], rest[:, 1], rest[:, 2], (rest[:, 3] & 0xFFFFFFFF) >> 8, rest[:, 3] & 255,
    )  # fmt: skip
    sm = (heads[:, 2] & 0xFFFFFFFF).view(-1, len(LANES))[:, 0]
    return Timeline(
        sm, ends[..., 0], ends[..., 1], total - kept + int(cut.sum()), start,
        lane[keep], (what & 255)[keep], (what >> 8)[keep], since, until, tiles, words[:, 3][keep],
    )  # fmt: skip


def _capacity(counts: Tensor, kept: int) -> int:
    """The capacity with which lanes of these counts keep so many records."""
    low, high = 0, int(counts.max())
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if int(counts.clamp(max=middle).sum()) < kept else (low, middle)
    return low


def tick_ns(timelines: list[Timeline]) -> int:
    """Smallest step of the clock that the stamps show, in ns; 0 without two different stamps."""
    steps = [0]
    for timeline in timelines:
        stamps = torch.unique(torch.cat([timeline.since, timeline.until, timeline.begin.flatten()]))
        if len(stamps) > 1:
            steps.append(int((stamps[1:] - stamps[:-1]).min()))
    return min((step for step in steps if step), default=0)
