# SPDX-License-Identifier: Apache-2.0
"""Where the time of a traced pass went: shares of every role, what was waited for, and the distance to the floor.

The distance is split into causes. Inside a launch with records every moment of every SM has one state, so that the
states of an SM add up to the length of the launch; outside, the device's events around the launches give the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from prime_kernels.timeline import records as rec
from prime_kernels.timeline.floor import PEAK_FLOPS
from prime_kernels.timeline.states import STATES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prime_kernels.timeline.call import Launch, Pass
    from prime_kernels.timeline.records import Timeline

ALLOWED_REST = 0.05  # of the distance, that the causes may miss
TOP_WAITS = 5
_CAUSES = {
    "peers": "tensor cores idle: a peer is not ready",
    "rows": "tensor cores idle: rows still being copied",
    "operands": "tensor cores idle: operands on their way from memory",
    "activations": "tensor cores idle: saved activations for the epilogue",
    "epilogue": "tensor cores idle: both warpgroups in the epilogue",
    "tile list": "tensor cores idle: waiting for the next tile",
    "start": "start of launches: before an SM's first tile",
    "sending": "end of launches: results on their way to peers",
    "last peer": "end of launches: a peer is not done",
    "tail": "end of launches: an SM is done before the last one",
    "no rows": "tiles without rows for an SM",
    "other": "between recorded intervals",
}


class Share(NamedTuple):
    """Of the time of one role's lanes over all launches with records: parts at work, waiting, and not started or done;
    they add up to 1."""

    role: str
    working: float
    waiting: float
    idle: float


class Waited(NamedTuple):
    """One thing that a role waited for: ms of one lane on average, its part of the role's time, and how often."""

    role: str
    what: str
    ms: float
    share: float
    times: int


class Cause(NamedTuple):
    """One part of the distance to the floor, in ms; negative for what brings the pass closer."""

    name: str
    ms: float


@dataclass(frozen=True)
class Summary:
    """What `prime-kernels trace` says about one pass; ms.

    Attributes:
        ms: The traced pass.
        normal_ms: The same of the normal build, from medians.
        floor_ms: What it cannot be faster than.
        bound: "arithmetic", "memory" or "transport": which floor that is.
        causes: Parts of `ms - floor_ms`, the largest first.
        roles: Shares.
        waits: The things waited for longest, longest first.
        slowdown: Largest relative excess of a recording launch's median over that of the normal build.
        tick_ns: Step of %globaltimer.
        lost: Records without room.
    """

    ms: float
    normal_ms: float
    floor_ms: float
    bound: str
    causes: tuple[Cause, ...]
    roles: tuple[Share, ...]
    waits: tuple[Waited, ...]
    slowdown: float
    tick_ns: int
    lost: int

    @property
    def gap_ms(self) -> float:
        """Distance to the floor."""
        return self.ms - self.floor_ms

    @property
    def accounted(self) -> float:
        """What the causes add up to, as a part of the distance."""
        return self._explained(self.ms)

    @property
    def accounted_normal(self) -> float:
        """The same as a part of the distance that the normal build has: recording and chance are what lies between."""
        return self._explained(self.normal_ms)

    def _explained(self, ms: float) -> float:
        gap = ms - self.floor_ms
        return sum(cause.ms for cause in self.causes) / gap if gap else 1.0


def _roles(timelines: list[Timeline], ranks: int) -> tuple[tuple[Share, ...], tuple[Waited, ...]]:
    alive = dict.fromkeys(rec.ROLES, 0.0)
    whole, lanes = dict.fromkeys(rec.ROLES, 0.0), dict.fromkeys(rec.ROLES, 0.0)
    waited: dict[tuple[str, int], list[float]] = {}
    for timeline in timelines:
        lane = timeline.where()[1]
        length = (timeline.until - timeline.since).double()
        for number, role in enumerate(rec.ROLES):
            alive[role] += float((timeline.end - timeline.begin)[:, number].sum())
            whole[role] += float(timeline.span_ns) * timeline.ctas
            lanes[role] += timeline.ctas * ranks / len(timelines)
            waits = (lane == number) & (timeline.event == rec.WAIT)
            for what in torch.unique(timeline.detail[waits]).tolist():
                mine = waits & (timeline.detail == what)
                entry = waited.setdefault((role, what), [0.0, 0])
                entry[0] += float(length[mine].sum())
                entry[1] += int(mine.sum())
    shares = []
    for role in whole:
        waits_ns = sum(ns for (name, _), (ns, _) in waited.items() if name == role)
        total = whole[role] or 1.0
        shares.append(Share(role, (alive[role] - waits_ns) / total, waits_ns / total, 1 - alive[role] / total))
    things = [
        Waited(role, rec.wait_name(role, what), ns / lanes[role] * 1e-6, ns / whole[role], int(times))
        for (role, what), (ns, times) in waited.items()
    ]
    return tuple(shares), tuple(sorted(things, key=lambda thing: -thing.ms)[:TOP_WAITS])


def _launch_causes(launch: Launch, flops: float, ranks: int, into: dict[str, float]) -> None:
    """Add what one launch contributes; with the ideal time of its arithmetic it is the time between its events. Of
    several ranks each has its part of the SMs, and their mean is what counts."""

    def add(name: str, ms: float) -> None:
        into[name] = into.get(name, 0.0) + ms / ranks

    if launch.sweep is None:
        add(f"launches without products: {launch.name}", launch.ms)
        return
    spent = dict(zip(STATES, (launch.sweep.total_ns() * 1e-6).tolist(), strict=True))
    for state, name in _CAUSES.items():
        add(name, spent[state])
    add(
        "tensor cores busy, but slower than the floor's 700 TFLOP/s",
        spent["multiply"] - flops * ranks / PEAK_FLOPS * 1e3,
    )
    add("before and after launches: the device's own time for them", launch.ms - launch.sweep.span_ns * 1e-6)


def summarise(call: Pass) -> Summary:
    """The summary of a pass.

    Args:
        call: The pass; at least one launch has records.
    """
    causes: dict[str, float] = {}
    for launch in call.launches:
        _launch_causes(launch, call.flops(launch), call.ranks, causes)
    if call.whole_ms is not None:
        launched_ms = sum(launch.ms for launch in call.launches) / call.ranks
        causes["a rank is done before the last one, or begins later"] = call.ms - launched_ms
    floor = call.floor
    if floor.ms > floor.arithmetic_ms:
        causes[f"{floor.bound} floor above the arithmetic one"] = floor.arithmetic_ms - floor.ms
    timelines = [launch.timeline for launch in call.launches if launch.timeline is not None]
    roles, waits = _roles(timelines, call.ranks)
    slower = [it.profile_ms / it.normal_ms - 1 for it in call.launches if it.raw is not None and it.normal_ms]
    return Summary(
        ms=call.ms,
        normal_ms=call.normal_ms,
        floor_ms=floor.ms,
        bound=floor.bound,
        causes=tuple(sorted((Cause(*it) for it in causes.items()), key=lambda cause: -cause.ms)),
        roles=roles,
        waits=waits,
        slowdown=max(slower, default=0.0),
        tick_ns=rec.tick_ns(timelines),
        lost=sum(timeline.lost for timeline in timelines),
    )


def _group(call: Pass) -> tuple[str, str]:
    """What the heading and the line about the floor say about several ranks."""
    if call.ranks == 1:
        return "", ""
    pace = "" if call.pacing_gb_s is None else f" at {call.pacing_gb_s:g} GB/s"
    return f" on each of {call.ranks} virtual ranks{pace}", f", {call.link_bytes / 1e6:.0f} MB over the busiest link"


def _launch_lines(call: Pass) -> Iterator[str]:
    """The table of launches; times are means over ranks."""
    yield "  launch               normal ms  recording ms  slower   TFLOP/s (padded)"
    each = len(call.launches) // call.ranks
    for index, first in enumerate(call.launches[:each]):
        alike = call.launches[index::each]
        normal_ms = sum(it.normal_ms for it in alike) / call.ranks
        profile_ms = sum(it.profile_ms for it in alike) / call.ranks
        rate = sum(call.flops(it) for it in alike) / (normal_ms or 1) * 1e-9
        excess = profile_ms / (normal_ms or 1) - 1
        times = f"  {first.name:<20} {normal_ms:9.3f} {profile_ms:13.3f}"
        yield times + (f" {excess:+7.1%} {rate:10.0f}" if first.raw is not None else "")


def text(call: Pass, summary: Summary) -> str:
    """The summary as lines for people, without a last line break."""
    config = call.config
    ranks, link = _group(call)
    lines = [
        f"{call.direction} of {call.tokens} tokens{ranks}, {config.num_experts} experts of {config.hidden} x "
        f"{config.intermediate}, top-{config.topk}, on {call.device}",
        f"  {summary.ms:8.3f} ms traced; {summary.normal_ms:.3f} ms in the normal build; "
        f"slowest recording launch {summary.slowdown:+.1%}; clock tick {summary.tick_ns} ns",
        f"  {summary.floor_ms:8.3f} ms floor ({summary.bound}: padded FLOP at 700 TFLOP/s, bytes at 4.0 TB/s{link})",
        f"  {summary.gap_ms:8.3f} ms above it, of which the causes below explain {summary.accounted:.1%} "
        f"({summary.accounted_normal:.1%} of the normal build's {summary.normal_ms - summary.floor_ms:.3f} ms):",
    ]
    lines += [f"    {it.ms:8.3f} ms  {it.ms / (summary.gap_ms or 1):6.1%}  {it.name}" for it in summary.causes if it.ms]
    lines.append("  role       working  waiting     idle")
    lines += [f"  {it.role:<9} {it.working:8.1%} {it.waiting:8.1%} {it.idle:8.1%}" for it in summary.roles]
    lines.append(
        f"  waited for longest (a lane of the role, {sum(it.raw is not None for it in call.launches)} launches):"
    )
    lines += [
        f"    {it.ms:8.3f} ms  {it.share:6.1%}  {it.role} waits for {it.what} ({it.times} times)"
        for it in summary.waits
    ]
    lines += _launch_lines(call)
    if abs(summary.accounted - 1) > ALLOWED_REST:
        lines.append(f"  the causes miss the distance by more than {ALLOWED_REST:.0%}: do not trust them")
    if summary.lost:
        lines.append(f'  {summary.lost} records found no room; what they held counts as "{_CAUSES["other"]}"')
    return "\n".join(lines)
