# SPDX-License-Identifier: Apache-2.0
"""Times of interleaved variants: medians over rounds, device time by events, host time by the clock.

Every round runs each variant once, in an order that rotates, on the next of several input sets, so that no variant owns
the warm cache or the cool chip. On CUDA a spin kernel runs ahead of the timed region: the host's launches are queued
behind it and the events see the device's time only, unless the variant itself waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

BACKLOG_MS = 1.0
_ASSUMED_MHZ = 1980  # clock of the spin kernel's cycles; a lower clock only makes the backlog longer


@dataclass(frozen=True)
class Variant:
    """Something to time. `prepare(i)` is not timed; its result goes to `timed`, whose launches `backlog_ms` covers."""

    name: str
    prepare: Callable[[int], Any]
    timed: Callable[[Any], Any]
    backlog_ms: float = BACKLOG_MS


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: median, 10th and 90th percentile of n calls; host microseconds per call (median)."""

    ms: float
    p10: float
    p90: float
    n: int
    host_us: float

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.ms


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics; `fraction` in [0, 1]."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(samples_ms: Sequence[float], host_s: Sequence[float]) -> Timing:
    """Statistics of one variant's samples."""
    return Timing(
        ms=percentile(samples_ms, 0.5),
        p10=percentile(samples_ms, 0.1),
        p90=percentile(samples_ms, 0.9),
        n=len(samples_ms),
        host_us=percentile(host_s, 0.5) * 1e6,
    )


def rotate(items: Sequence[Any], by: int) -> list[Any]:
    """The items, starting at index `by` modulo their number."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def measure(
    variants: Sequence[Variant], *, device: torch.device, rounds: int, warmups: int, group: dist.ProcessGroup | None
) -> dict[str, Timing]:
    """Time the variants against each other.

    Args:
        variants: What to time.
        device: Where they run.
        rounds: Timed calls of each.
        warmups: Untimed calls of each before them.
        group: Ranks that call this together; a barrier precedes every call.

    Returns:
        `Timing` by name, of this rank.
    """
    samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
    hosts: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for index in range(warmups + rounds):
        for variant in rotate(variants, index):
            ms, host_s = time_once(variant, index, device, group)
            if index >= warmups:
                samples[variant.name].append(ms)
                hosts[variant.name].append(host_s)
    return {name: summarize(samples[name], hosts[name]) for name in samples}


def time_once(
    variant: Variant, index: int, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[float, float]:
    """(milliseconds of one call, seconds of the host in it)."""
    prepared = variant.prepare(index)
    if device.type != "cuda":
        started = time.perf_counter()
        variant.timed(prepared)
        took = time.perf_counter() - started
        return took * 1e3, took
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if group is not None:
        dist.barrier(group)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(variant.backlog_ms * _ASSUMED_MHZ * 1e3))
    start.record()
    began = time.perf_counter()
    result = variant.timed(prepared)
    host_s = time.perf_counter() - began
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end), host_s


def sustain(
    variant: Variant, *, device: torch.device, seconds: float, group: dist.ProcessGroup | None
) -> tuple[float, int]:
    """(mean milliseconds of the timed part, calls) over at least `seconds` of calls without a pause.

    Every rank of `group` makes the same number of calls: all stop when one has had enough.
    """
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    total_ms, calls = 0.0, 0
    began = time.perf_counter()
    going = True
    while going:
        for _ in range(10):
            prepared = variant.prepare(calls)
            calls += 1
            if device.type == "cuda":
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                variant.timed(prepared)
                pair[1].record()
                events.append(pair)
            else:
                started = time.perf_counter()
                variant.timed(prepared)
                total_ms += (time.perf_counter() - started) * 1e3
        if events:
            events[-1][1].synchronize()
        going = _all_agree(time.perf_counter() - began < seconds, device, group)
    total_ms += sum(start.elapsed_time(end) for start, end in events)
    return total_ms / calls, calls


def kernel_times(variant: Variant, device: torch.device) -> list[tuple[str, float, int]]:
    """(kernel or operator, microseconds on the device, calls) of one warm call's timed part, longest first."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    variant.timed(variant.prepare(0))
    prepared = variant.prepare(1)
    if on_gpu:
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        result = variant.timed(prepared)
        if on_gpu:
            torch.cuda.synchronize(device)
    del result
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = [(event.key, float(getattr(event, field)), int(event.count)) for event in profiler.key_averages()]
    return sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def _all_agree(going: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return going
    flag = torch.tensor([int(going)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
