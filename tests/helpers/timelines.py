# SPDX-License-Identifier: Apache-2.0
"""Buffers as a recording build writes them, made by hand: every stamp is known, so that every result is."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prime_kernels.moe.config import MegaMoEConfig
from prime_kernels.timeline import records as rec
from prime_kernels.timeline.call import Launch, Pass

BASE = 1_790_000_000_000_000_000  # ns; as of the clock of a GPU
LAYER = MegaMoEConfig(num_experts=4, topk=2, hidden=512, intermediate=256, max_tokens_per_rank=1024)


@dataclass
class Lane:
    """What one lane recorded; times in ns since BASE."""

    begin: int = 0
    end: int = 0
    rows: list[bytes] = field(default_factory=list)

    def put(self, since: int, until: int, event: int, detail: int = 0, remote: int = 0) -> Lane:
        self.rows.append(struct.pack("<IIII", BASE + since & 0xFFFFFFFF, until - since, event | detail << 8, remote))
        self.end = max(self.end, until)
        return self

    def wait(self, since: int, until: int, what: int) -> Lane:
        return self.put(since, until, rec.WAIT, what)

    def tile(self, since: int, until: int, event: int = rec.MULTIPLY, **numbers: int) -> Lane:
        self.put(since, until, event, numbers.get("kind", 0))
        row, column, expert = (numbers.get(name, 0) for name in ("row", "column", "expert"))
        last = numbers.get("k_steps", 8) << 8 | numbers.get("valid", 128)
        self.rows.append(struct.pack("<IIII", row, column, expert, last))
        return self


def buffer(ctas: list[list[Lane]], *, capacity: int = 512, sms: list[int] | None = None) -> Tensor:
    """[bytes] uint8: the buffer of a launch with these lanes of every CTA."""
    parts = [struct.pack("<II", capacity, len(ctas)).ljust(rec.HEAD_BYTES, b"\0")]
    for number, lanes in enumerate(ctas):
        assert len(lanes) == len(rec.LANES)
        sm = number if sms is None else sms[number]
        for lane in lanes:
            head = struct.pack("<QQII", BASE + lane.begin, BASE + lane.end, sm, len(lane.rows))
            rows = b"".join(lane.rows[:capacity])
            parts.append(head.ljust(rec.LANE_BYTES, b"\0") + rows.ljust(capacity * rec.RECORD_BYTES, b"\0"))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def lanes(begin: int, end: int) -> list[Lane]:
    """Six lanes that did nothing."""
    return [Lane(begin, end) for _ in rec.LANES]


def busy_cta(start: int, tiles: int, seed: int, tick: int = 32) -> list[Lane]:
    """A CTA that starts `start` ticks late and with so many tiles and waits of all kinds."""
    rng, made = random.Random(seed), lanes(start * tick, 0)
    load, schedule, copy, _, *math = made
    for which, lane in enumerate(math):
        now = start + 20 + 150 * which
        lane.wait(start * tick, now * tick, rec.TILE_FULL)
        for index in range(tiles):
            stop = now + 300 + rng.randrange(40)
            stall = now + 40 + rng.randrange(60)
            lane.wait(stall * tick, (stall + rng.randrange(1, 30)) * tick, rec.STAGE_FULL)
            lane.tile(now * tick, stop * tick, row=index * 128, expert=index % 4, column=256 * index)
            now = stop + 60 + rng.randrange(20)
            lane.put(stop * tick, now * tick, rec.EPILOGUE)
    end = max(lane.end for lane in math)
    for at in range(start, end // tick - 60, 25):
        load.wait(at * tick, (at + 18) * tick, rec.STAGE_FREE)
    load.wait((end // tick - 30) * tick, (end // tick - 10) * tick, rec.INPUT)
    schedule.wait((start + 30) * tick, end - tick, rec.TILE_FREE)
    for number, at in enumerate(range(start, start + 200, 20)):
        copy.put(at * tick, (at + 20) * tick, rec.COPY, number * 8)
    for lane in made:
        lane.end = max(lane.end, end)
    return made


def busy_launch(
    name: str, start: int, *, ctas: int = 6, tiles: int = 5, tick: int = 32, ms: float | None = None
) -> Launch:
    """A launch of such CTAs, on SMs in an order of their own."""
    every = [busy_cta(start + 7 * number, tiles, start + number, tick) for number in range(ctas)]
    raw = rec.used(buffer(every, sms=[(5 * number + 2) % ctas for number in range(ctas)]))
    span_ms = rec.parse(raw).span_ns * 1e-6
    ms = span_ms + 0.002 if ms is None else ms
    return Launch(name, ms, ms * 0.98, ms, raw)


def busy_pass(direction: str = "forward", **options: int) -> Pass:
    """A pass of two launches with records and two without."""
    plain = (Launch("plan", 0.01, 0.01, 0.01, None), Launch("combine", 0.02, 0.02, 0.02, None))
    first = busy_launch("gate_up", 100, **options)
    second = busy_launch("down", 4000, **options)
    sms = int(first.raw.heads.shape[0]) // len(rec.LANES) if first.raw is not None else 0
    counts = (300, 0, 500, 224)
    return Pass(direction, "a GPU", sms, LAYER, 512, counts, (plain[0], first, second, plain[1]))


def busy_ranks(direction: str = "forward", ranks: int = 2, pacing_gb_s: float | None = 50.0) -> Pass:
    """A pass of virtual ranks, in which copying warps pull from peers, wait for them, and send."""
    launches = []
    for rank in range(ranks):
        start = 100 + 40 * rank
        launches.append(Launch("plan_peers", 0.01, 0.01, 0.01, None, rank))
        for name, at in (("gate_up_peers", start), ("down_peers", start + 4000)):
            made = [busy_cta(at + 7 * number, 5, at + number) for number in range(3)]
            for cta in made:
                end = cta[4].end
                cta[3].wait(at * 32, (at + 30) * 32, rec.PEER_READY)
                cta[3].put((at + 30) * 32, (at + 80) * 32, rec.COPY, 1, remote=6)
                cta[3].put(end - 64, end + 320, rec.PUSH, 2, remote=5)
            if name == "down_peers":
                made[0][0].wait(end + 320, end + 640, rec.PEER_DONE)
            raw = rec.used(buffer(made, sms=[2 * number + rank for number in range(3)]))
            ms = rec.parse(raw).span_ns * 1e-6 + 0.002
            launches.append(Launch(name, ms, ms * 0.98, ms, raw, rank))
        launches.append(Launch("combine", 0.02, 0.02, 0.02, None, rank))
    each = len(launches) // ranks
    whole = max(sum(it.ms for it in launches[rank * each :][:each]) for rank in range(ranks)) + 0.003
    facts = {"ranks": ranks, "pacing_gb_s": pacing_gb_s, "link_bytes": 10_000_000, "whole_ms": (whole, whole * 0.98)}
    return Pass(direction, "a GPU", 3 * ranks, LAYER, 512, (300, 0, 500, 224), tuple(launches), **facts)
