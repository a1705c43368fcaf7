# SPDX-License-Identifier: Apache-2.0
"""One traced pass: its launches, their times and records; and the file that keeps it."""

from __future__ import annotations

import gzip
import io
import pickle
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe.config import MegaMoEConfig
from prime_kernels.timeline import floor
from prime_kernels.timeline.records import Raw, Timeline, parse
from prime_kernels.timeline.states import Sweep, sweep

if TYPE_CHECKING:
    from prime_kernels.timeline.floor import Floor

SCHEMA = 2
READABLE = (1, 2)  # 1: of one rank
_RANKS = ("ranks", "pacing_gb_s", "link_bytes", "whole_ms")


@dataclass(frozen=True)
class Launch:
    """One launch of the traced pass; times in ms.

    Attributes:
        name: "plan", "gate_up", ...
        ms: Between the device's events around it, in the traced pass.
        normal_ms: Median of the same in passes of the normal build.
        profile_ms: Median of the same in passes of the recording build, which this launch is of if it has records.
        raw: Its records; None for a launch that has no recording build.
        rank: Whose launch it is.
    """

    name: str
    ms: float
    normal_ms: float
    profile_ms: float
    raw: Raw | None
    rank: int = 0

    @cached_property
    def timeline(self) -> Timeline | None:
        """Intervals of the launch."""
        return None if self.raw is None else parse(self.raw)

    @cached_property
    def sweep(self) -> Sweep | None:
        """What every SM did at every moment."""
        return None if self.timeline is None else sweep(self.timeline)


@dataclass(frozen=True)
class Pass:
    """One forward or backward.

    Attributes:
        direction: "forward" or "backward".
        device: Name of the GPU.
        sms: Its SMs.
        config: The layer.
        tokens: T, of every rank.
        counts: Rows of every expert, rank after rank.
        launches: In order, rank after rank; the `ms` of one rank add up to its time.
        ranks: Virtual ranks that shared the GPU, each its part of the SMs.
        pacing_gb_s: GB/s that each might send, and receive; None: unpaced.
        link_bytes: What the busiest link moved.
        whole_ms: From the moment at which every rank could begin to the end of the last one: in the traced pass, and
            the median of the normal build. None with one rank: the sum of its launches.
    """

    direction: str
    device: str
    sms: int
    config: MegaMoEConfig
    tokens: int
    counts: tuple[int, ...]
    launches: tuple[Launch, ...]
    ranks: int = 1
    pacing_gb_s: float | None = None
    link_bytes: int = 0
    whole_ms: tuple[float, float] | None = None

    @property
    def ms(self) -> float:
        """From the event before the first launch to the one behind the last."""
        return self.whole_ms[0] if self.whole_ms else sum(launch.ms for launch in self.launches)

    @property
    def normal_ms(self) -> float:
        """The same in the normal build."""
        return self.whole_ms[1] if self.whole_ms else sum(launch.normal_ms for launch in self.launches)

    @property
    def floor(self) -> Floor:
        """What the pass cannot be faster than."""
        ops = [it.name for it in self.launches if it.rank == 0]
        of_chip = floor.floor_of(self.direction, self.config, self.tokens * self.ranks, self.counts, ops)
        pace = self.pacing_gb_s
        return replace(of_chip, transport_ms=self.link_bytes / pace / 1e6) if pace else of_chip

    def flops(self, launch: Launch) -> float:
        """Padded FLOP of one launch."""
        local = len(self.counts) // self.ranks
        return floor.padded_flops(launch.name, self.config, self.counts[launch.rank * local :][:local])

    def start_ns(self) -> list[int | None]:
        """When each launch with records began, since the first of them; None for the others."""
        starts = [launch.timeline.start_ns if launch.timeline else None for launch in self.launches]
        first = min((start for start in starts if start is not None), default=0)
        return [None if start is None else start - first for start in starts]


def _planes(records: Tensor) -> Tensor:
    """[4, 4, records] uint8: of every word the change from record to record, byte by byte, which compresses well."""
    words = records.t().contiguous()
    words[:, 1:] -= words[:, :-1].clone()
    return words.view(torch.uint8).view(4, -1, 4).permute(0, 2, 1).contiguous()


def _records(planes: Tensor) -> Tensor:
    """What `_planes` was given."""
    words = planes.permute(0, 2, 1).contiguous().view(torch.int32).view(4, -1)
    return torch.cumsum(words, 1).to(torch.int32).t().contiguous()  # 64-bit sums, cut to the 32 bits that they had


def save(path: Path, call: Pass) -> None:
    """Write a pass into one compressed file that `load` reads.

    Args:
        path: The file; its folder exists.
        call: The pass.
    """
    config = call.config
    layer = {name: getattr(config, name) for name in ("num_experts", "topk", "hidden", "intermediate")}
    launches = [
        {
            "name": it.name,
            "ms": [it.ms, it.normal_ms, it.profile_ms],
            "rank": it.rank,
            "raw": None if it.raw is None else [it.raw.heads, _planes(it.raw.records)],
        }
        for it in call.launches
    ]
    facts: dict[str, object] = {
        "direction": call.direction,
        "device": call.device,
        "sms": call.sms,
        "tokens": call.tokens,
    }
    facts["ranks"] = {name: getattr(call, name) for name in _RANKS}
    kept = {"schema": SCHEMA, **facts, "layer": layer, "counts": list(call.counts), "launches": launches}
    stream = io.BytesIO()
    torch.save(kept, stream)
    path.write_bytes(gzip.compress(stream.getvalue(), compresslevel=4, mtime=0))


def _launch(name: str, times: list[float], raw: list[Tensor] | None, rank: int) -> Launch:
    ms, normal_ms, profile_ms = times
    return Launch(name, ms, normal_ms, profile_ms, None if raw is None else Raw(raw[0], _records(raw[1])), rank)


def _none(path: Path, why: str) -> UnsupportedConfig:
    return UnsupportedConfig(
        f"--records is {path}, which holds no traced pass ({why}).",
        facts={"path": str(path)},
        remedy="Give a file that `prime-kernels trace --keep-records` wrote.",
    )


def load(path: Path) -> Pass:
    """Read what `save` wrote.

    Args:
        path: The file.

    Raises:
        UnsupportedConfig: It is no such file.
    """
    try:
        kept = torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), weights_only=True)
        if kept["schema"] not in READABLE:
            raise _none(path, f"schema {kept['schema']}, need {' or '.join(map(str, READABLE))}")
        launches = tuple(_launch(it["name"], it["ms"], it["raw"], it.get("rank", 0)) for it in kept["launches"])
        config = MegaMoEConfig(**kept["layer"], max_tokens_per_rank=kept["tokens"])
    except (OSError, EOFError, KeyError, TypeError, pickle.UnpicklingError, RuntimeError) as error:
        raise _none(path, str(error)) from error
    counts = tuple(kept["counts"])
    facts = (kept["direction"], kept["device"], kept["sms"], config, kept["tokens"], counts, launches)
    return Pass(*facts, **kept.get("ranks", {}))
