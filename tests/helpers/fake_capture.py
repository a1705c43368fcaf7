# SPDX-License-Identifier: Apache-2.0
"""A GPU for `prime_kernels.timeline.capture`: launches of the recording build fill their buffers, events count."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from typing import Any

import pytest
import torch

from prime_kernels.timeline import capture
from prime_kernels.timeline import records as rec
from tests.helpers.fake_loader import FakeLoader, Seen

BASE = 5_000_000_000


class Recorder(FakeLoader):
    """Launches of the recording build fill their buffers: one tile on every CTA, 1 ms long."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[tuple[str, int, int, int]] = []
        self.gives_up = ""

    def trace_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the loader and the GPU of a capture; stream 7 is the current one."""
        self.stand_in(monkeypatch)
        monkeypatch.setattr(capture, "load_kernel", self.load_kernel)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        here = Stream(7)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: here)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    def _launch(self, address: int) -> int:
        status = super()._launch(address)
        seen = self.seen[-1]
        if self.gives_up and seen.kernel.spec.key.startswith(self.gives_up):
            ctypes.c_uint32.from_address(seen.values()["fault"]).value = 1
        if seen.kernel.spec.key.endswith("|profile"):
            self._record(seen)
        return status

    def _record(self, seen: Seen) -> None:
        fault = seen.values()["fault"]
        at = ctypes.c_uint64.from_address(fault + 24).value
        if at == 0:
            return
        room, ctas = (ctypes.c_uint32.from_address(at + offset).value for offset in (0, 4))
        self.rooms.append((seen.kernel.spec.key, at, room, ctas))
        for index in range(ctas * len(rec.LANES)):
            lane = at + rec.HEAD_BYTES + index * (rec.LANE_BYTES + room * rec.RECORD_BYTES)
            cta, number = divmod(index, len(rec.LANES))
            data = struct.pack("<QQIIQ", BASE, BASE + 1_000_000, cta, 2 * (number == 4), 0)
            if number == 4:
                data += struct.pack("<8I", BASE & 0xFFFFFFFF, 1_000_000, rec.MULTIPLY, 0, 0, 0, 0, 8 << 8 | 128)
            ctypes.memmove(lane, data, len(data))


class Event:
    """Counts instead of measuring: an event is 2 ms behind the one before."""

    now = 0

    def __init__(self, **_: Any) -> None:
        self.at = 0

    def record(self) -> None:
        Event.now += 2
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)


class Stream:
    """A number, and what it waited for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)
