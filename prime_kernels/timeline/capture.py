# SPDX-License-Identifier: Apache-2.0
"""Runs passes of the cuda backend on a GPU, in turns with the normal and with the recording build.

What is launched is what the backend launches (moe/cuda_calls.py), one prepared launch at a time with an event of the
device between two. Every launch of the recording build has a fault record and a buffer of its own.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from prime_kernels.errors import LaunchError, UnsupportedConfig
from prime_kernels.loader import load_kernel
from prime_kernels.loader.prepared import Prepared, Step
from prime_kernels.moe.backend import Needs
from prime_kernels.moe.cuda_buffers import Buffer
from prime_kernels.moe.cuda_calls import (
    BackwardAddresses,
    BackwardShape,
    ForwardAddresses,
    ForwardShape,
    record_backward,
    record_forward,
)
from prime_kernels.moe.cuda_launch import Recorder, sm_count
from prime_kernels.timeline import records as rec
from prime_kernels.timeline.call import Launch, Pass
from prime_kernels.timeline.floor import is_gemm, padded_flops
from prime_kernels.timeline.tensors import Tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from prime_kernels.moe.config import MegaMoEConfig

PROFILE = "|profile"
AHEAD_CYCLES = 1_000_000  # the device sleeps before a pass, so that no launch of it waits for the host
ALL = Needs(x=True, topk_weights=True, w_gate_up=True, w_down=True)
_FAULT_WORDS, _TIMELINE_WORD = 8, 3  # FaultRecord of kernels_src/common/fault.cuh; words of 8 bytes for the latter
_TILE_FLOPS = 2 * 128 * 256 * 64  # of one step of a CTA


def launch_name(step: Step) -> str:
    """ "gate_up" of pk_gate_up."""
    return step.kernel.spec.symbol.removeprefix("pk_")


def capacity(op: str, config: MegaMoEConfig, counts: Sequence[int], ctas: int) -> int:
    """Records that a lane has room for: twice the steps of an average CTA, each of which may be waited for, and what
    comes once per tile.

    Args:
        op: The launch.
        config: The layer.
        counts: Rows of every expert.
        ctas: CTAs of the launch.
    """
    steps = padded_flops(op, config, counts) / _TILE_FLOPS / ctas
    return 4096 + int(2 * steps)


class Build:
    """The launches of one direction in one build, each prepared alone.

    Args:
        steps: The launches.
        slots: Names of their addresses.
        faults: [launches, words] int64 fault records on the device, one for each launch.
    """

    def __init__(self, steps: Sequence[Step], slots: tuple[str, ...], faults: Tensor) -> None:
        self.steps = [self._with_fault(step, fault) for step, fault in zip(steps, faults, strict=True)]
        self._faults = faults
        self._prepared = [Prepared([step], slots) for step in self.steps]

    @staticmethod
    def _with_fault(step: Step, fault: Tensor) -> Step:
        own = {name: fault.data_ptr() for name in ("fault", "plan.fault") if name in step.args}
        return step._replace(args={**step.args, **own})

    def run(self, stream: int, addresses: tuple[int, ...], events: Sequence[torch.cuda.Event] | None = None) -> None:
        """Launch all; with events, one before each launch and one behind the last."""
        for number, launch in enumerate(self._prepared):
            if events is not None:
                events[number].record()
            launch.launch(stream, addresses)
        if events is not None:
            events[len(self._prepared)].record()

    def check(self) -> None:
        """Raise for a launch that gave up."""
        codes = (self._faults[:, 0] & 0xFFFFFFFF).tolist()
        if any(codes):
            names = [launch_name(step) for step, code in zip(self.steps, codes, strict=True) if code]
            raise LaunchError(
                f"{', '.join(names)} gave up after 20 s; the trace is not valid.",
                code="E44",
                facts={"launches": names},
                remedy="Report it with `prime-kernels doctor --json`. A GPU halted by a debugger looks the same.",
            )


def _steps(direction: str, config: MegaMoEConfig, tokens: int, index: int) -> tuple[list[Step], int]:
    """The launches of one direction, and the bytes of their temporaries."""
    recorder = Recorder(config, index, 0, tokens, Buffer.of("plan"))
    if direction == "forward":
        record_forward(recorder, ForwardShape(tokens, "preact", pair=False, wide_ids=True))
    else:
        record_backward(recorder, BackwardShape(tokens, 2 * config.intermediate, pair=False, needs=ALL, fp32=False))
    return recorder.steps, recorder.work.bytes


def timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _times(build: Build, stream: int, addresses: tuple[int, ...]) -> list[float]:
    """ms of every launch of one pass."""
    events = [timed_event() for _ in range(len(build.steps) + 1)]
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    build.run(stream, addresses, events)
    events[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def recording(steps: Sequence[Step], index: int) -> list[Step]:
    """The same launches, those of GEMMs in the recording build."""
    return [
        step._replace(kernel=load_kernel(step.kernel.spec.key + PROFILE, device=index))
        if is_gemm(launch_name(step))
        else step
        for step in steps
    ]


def make_faults(builds: int, launches: int, device: torch.device) -> Tensor:
    """[builds, launches, words] int64: a fault record for every launch of every build."""
    return torch.zeros(builds, launches, _FAULT_WORDS // 2, dtype=torch.int64, device=device)


def make_buffers(build: Build, faults: Tensor, config: MegaMoEConfig, counts: Sequence[int]) -> list[Tensor | None]:
    """A buffer for every launch that records; the fault records learn their addresses.

    Args:
        build: The recording build.
        faults: [launches, words] its fault records.
        config: The layer.
        counts: Rows of every expert that the launches work on.
    """
    found: list[Tensor | None] = []
    for number, step in enumerate(build.steps):
        buffer, ctas = None, step.grid if isinstance(step.grid, int) else step.grid[0]
        if is_gemm(launch_name(step)):
            room = capacity(launch_name(step), config, counts, ctas)
            buffer = torch.empty(rec.buffer_bytes(ctas, room), dtype=torch.uint8, device=faults.device)
            rec.clear(buffer, ctas, room)
            faults[number, _TIMELINE_WORD] = buffer.data_ptr()
        found.append(buffer)
    return found


class Capture:
    """A layer on one GPU, whose passes can be traced.

    Args:
        config: The layer; BF16, one rank.
        tokens: T.
        device: The GPU.

    Raises:
        BackendUnavailable: The GPU is not served (E01 to E03), or a kernel is not installed (E09).
        UnsupportedConfig: T is 0.
    """

    def __init__(self, config: MegaMoEConfig, tokens: int, device: torch.device) -> None:
        if tokens < 1:
            raise UnsupportedConfig(f"tokens={tokens}; a trace needs at least one token.", facts={"tokens": tokens})
        self.config, self.tokens, self.device = config, tokens, device
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self._tensors = Tensors(config, tokens, device)
        self._ran_forward = False

    def trace(self, direction: str, rounds: int) -> Pass:
        """Run passes of both builds in turns and keep the records of the last one.

        Args:
            direction: "forward", or "backward", before which a forward runs once.
            rounds: Timed passes of each build, after two that are not.

        Returns:
            The pass.

        Raises:
            BackendUnavailable: A kernel is not installed (E09).
            LaunchError: A launch failed or gave up (E43, E44).
        """
        if direction == "backward" and not self._ran_forward:
            self.trace("forward", 1)
        tensors, config = self._tensors, self.config
        steps, work_bytes = _steps(direction, config, self.tokens, self.index)
        tensors.reserve_work(work_bytes)
        fields = ForwardAddresses._fields if direction == "forward" else BackwardAddresses._fields
        addresses = tuple(tensors.address(name) for name in fields)
        faults = make_faults(2, len(steps), self.device)
        normal = Build(steps, fields, faults[0])
        records = Build(recording(steps, self.index), fields, faults[1])
        with torch.cuda.device(self.index):
            stream = torch.cuda.current_stream().cuda_stream
            normal.run(stream, addresses)
            counts = tensors.counts()
            buffers = make_buffers(records, faults[1], config, counts)
            records.run(stream, addresses)
            passes: tuple[list[list[float]], list[list[float]]] = ([], [])
            for _ in range(rounds):
                for build, times in zip((normal, records), passes, strict=True):
                    times.append(_times(build, stream, addresses))
            normal.check()
            records.check()
        self._ran_forward = True
        medians = [[statistics.median(column) for column in zip(*times, strict=True)] for times in passes]
        rows = zip(steps, passes[1][-1], *medians, buffers, strict=True)
        launches = tuple(
            Launch(launch_name(step), ms, normal_ms, profile_ms, None if buffer is None else rec.used(buffer))
            for step, ms, normal_ms, profile_ms, buffer in rows
        )
        name = torch.cuda.get_device_name(self.device)
        return Pass(direction, name, sm_count(self.index), config, self.tokens, counts, launches)
