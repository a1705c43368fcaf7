# SPDX-License-Identifier: Apache-2.0
"""Runs passes of virtual ranks of one GPU, in turns with the normal and with the recording build.

Every rank has the stream, arena and SMs of `peers.loopback.create_runtimes`, launches what the backend launches among
peers (moe/cuda_peers.py), and has fault records and buffers of its own. Kernels of one rank wait for those of another:
all launches of a pass are made while the device sleeps, so that no rank waits for the host.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe import cuda_peers
from prime_kernels.moe.cuda_calls import BackwardAddresses, BackwardShape, ForwardAddresses, ForwardShape
from prime_kernels.moe.cuda_launch import sm_count
from prime_kernels.moe.cuda_peer_launch import PeerRecorder
from prime_kernels.moe.cuda_variants import arena_layout
from prime_kernels.peers.loopback import create_peers, create_runtimes
from prime_kernels.timeline import capture
from prime_kernels.timeline import records as rec
from prime_kernels.timeline.call import Launch, Pass
from prime_kernels.timeline.floor import link_bytes
from prime_kernels.timeline.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.peers.base import PeerMemory

SLEEP_CYCLES = 6_000_000  # a rank; 3 ms and more, in which the host launches it
_PULLS = {"forward": 1, "backward": 2}  # of a token by a rank that has an expert of it: x, or dy and x
_NORMAL, _RECORDING = 0, 1


class _Times(NamedTuple):
    """ms of one pass: of every launch of every rank, and from the moment all could begin to the end of the last."""

    launches: list[list[float]]
    whole: float


class _Member:
    """One rank: its tensors, and its launches of one direction in both builds.

    Args:
        config: Of its runtime, with its share of the SMs.
        tokens: T.
        index: Of the GPU.
        peers: Its arena.
        device: Where its tensors are.
    """

    def __init__(self, config: MegaMoEConfig, tokens: int, index: int, peers: PeerMemory, device: torch.device) -> None:
        self.config, self.tokens, self.index, self.peers = config, tokens, index, peers
        words = self._recorder().plan_numel
        self.tensors = Tensors(config, tokens, device, peers.rank, peers.size, words)
        self.builds: tuple[capture.Build, capture.Build]
        self.addresses: tuple[int, ...] = ()
        self.buffers: list[Tensor | None] = []

    def _recorder(self) -> PeerRecorder:
        return PeerRecorder(self.config, self.index, 0, self.tokens, self.peers)

    def prepare(self, direction: str) -> None:
        """Make the launches of one direction."""
        recorder, config = self._recorder(), self.config
        fields: tuple[str, ...]
        if direction == "forward":
            fields = ForwardAddresses._fields
            cuda_peers.record_forward(recorder, ForwardShape(self.tokens, "preact", pair=False, wide_ids=True))
        else:
            fields = BackwardAddresses._fields
            width = 2 * config.intermediate
            shape = BackwardShape(self.tokens, width, pair=False, needs=capture.ALL, fp32=False)
            cuda_peers.record_backward(recorder, shape)
        tensors, steps = self.tensors, recorder.steps
        tensors.reserve_work(recorder.work.bytes)
        self.addresses = tuple(tensors.address(name) for name in fields)
        self.faults = capture.make_faults(2, len(steps), tensors.device)
        normal = capture.Build(steps, fields, self.faults[_NORMAL])
        self.builds = normal, capture.Build(capture.recording(steps, self.index), fields, self.faults[_RECORDING])

    def make_buffers(self) -> None:
        """Let the recording build record; a pass has been run."""
        counts = self.tensors.counts()
        self.buffers = capture.make_buffers(self.builds[_RECORDING], self.faults[_RECORDING], self.config, counts)


class RanksCapture:
    """A layer among virtual ranks of one GPU, whose passes can be traced.

    Args:
        config: The layer; BF16, its experts a multiple of `ranks`.
        tokens: T of every rank.
        device: The GPU.
        ranks: 2..8.
        pacing_gb_s: GB/s that every rank may send, and that it may receive; None: unpaced.

    Raises:
        BackendUnavailable: The GPU is not served (E01 to E03), or a kernel is not installed (E09).
        UnsupportedConfig: T is 0, or there can be no such ranks.
    """

    def __init__(
        self, config: MegaMoEConfig, tokens: int, device: torch.device, *, ranks: int, pacing_gb_s: float | None
    ) -> None:
        if tokens < 1:
            raise UnsupportedConfig(f"tokens={tokens}; a trace needs at least one token.", facts={"tokens": tokens})
        self.config, self.tokens, self.device, self.pacing_gb_s = config, tokens, device, pacing_gb_s
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        # Kept: arenas and streams are theirs.
        self._runtimes = create_runtimes(config, ranks=ranks, device=device, pacing_gb_s=pacing_gb_s)
        self._members = []
        for runtime in self._runtimes:
            assert runtime.peers is not None
            self._members.append(_Member(runtime.config, tokens, self.index, runtime.peers, device))
        self._ran_forward = False

    def _warm_up(self, direction: str) -> None:
        """Launch every recording kernel once, alone: the driver may load its code then, and waits for running kernels
        to do so, which among ranks may be waiting for this very launch."""
        alone = self._members[0].config.replace(max_tokens_per_rank=1, num_experts=1, topk=1)
        timeout_s = alone.peer_timeout_s
        (peers,) = create_peers(arena_layout(alone, 1), ranks=1, device=self.device, timeout_s=timeout_s)
        member = _Member(alone, 1, self.index, peers, self.device)
        for part in dict.fromkeys(("forward", direction)):
            member.prepare(part)
            member.builds[_RECORDING].run(torch.cuda.current_stream().cuda_stream, member.addresses)
            torch.cuda.synchronize(self.device)
            member.builds[_RECORDING].check()

    def _run(self, which: int) -> _Times:
        """One pass of all ranks in one of the builds."""
        here, begin = torch.cuda.current_stream(), capture.timed_event()
        events = [[capture.timed_event() for _ in range(len(it.builds[which].steps) + 1)] for it in self._members]
        torch.cuda._sleep(SLEEP_CYCLES * len(self._members))  # type: ignore[no-untyped-call]
        begin.record()
        for member, own in zip(self._members, events, strict=True):
            stream = member.peers.stream
            assert stream is not None
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                member.builds[which].run(stream.cuda_stream, member.addresses, own)
        for own in events:
            here.wait_event(own[-1])
        for own in events:
            own[-1].synchronize()
        launches = [[before.elapsed_time(after) for before, after in pairwise(own)] for own in events]
        return _Times(launches, max(begin.elapsed_time(own[-1]) for own in events))

    def _link_bytes(self, direction: str) -> int:
        ranks = len(self._members)
        ids = torch.cat([member.tensors.topk_ids.cpu() for member in self._members])
        owners = torch.arange(ranks).repeat_interleave(self.tokens)
        holders = ids // (self.config.num_experts // ranks)
        return link_bytes(owners, holders, ranks, 2 * self.config.hidden, _PULLS[direction])

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
        with torch.cuda.device(self.index):
            self._warm_up(direction)
            for member in self._members:
                member.prepare(direction)
            torch.cuda.synchronize(self.device)
            self._run(_NORMAL)
            for member in self._members:
                member.make_buffers()
            torch.cuda.synchronize(self.device)
            self._run(_RECORDING)
            passes: tuple[list[_Times], list[_Times]] = ([], [])
            for _ in range(rounds):
                for which, times in enumerate(passes):
                    times.append(self._run(which))
            for member in self._members:
                for build in member.builds:
                    build.check()
        self._ran_forward = True
        return self._pass(direction, passes)

    def _pass(self, direction: str, passes: tuple[list[_Times], list[_Times]]) -> Pass:
        launches = []
        for rank, member in enumerate(self._members):
            medians = [
                [statistics.median(column) for column in zip(*(it.launches[rank] for it in times), strict=True)]
                for times in passes
            ]
            steps, last = member.builds[_NORMAL].steps, passes[_RECORDING][-1].launches[rank]
            for step, ms, normal_ms, profile_ms, buffer in zip(steps, last, *medians, member.buffers, strict=True):
                raw = None if buffer is None else rec.used(buffer)
                launches.append(Launch(capture.launch_name(step), ms, normal_ms, profile_ms, raw, rank))
        return Pass(
            direction,
            torch.cuda.get_device_name(self.device),
            sm_count(self.index),
            self.config,
            self.tokens,
            tuple(count for member in self._members for count in member.tensors.counts()),
            tuple(launches),
            ranks=len(self._members),
            pacing_gb_s=self.pacing_gb_s or None,
            link_bytes=self._link_bytes(direction),
            whole_ms=(passes[_RECORDING][-1].whole, statistics.median(it.whole for it in passes[_NORMAL])),
        )
