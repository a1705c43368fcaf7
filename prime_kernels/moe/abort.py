# SPDX-License-Identifier: Apache-2.0
"""One rank's line to the others of its expert-parallel group: nobody waits for a rank that will not come.

Every call of the op starts with a *header*: each rank tells each peer which call it is in, the rows it will send, and
whether it goes on. A rank whose Python raised before its header sends a header that says so and why; its peers raise
`PeerAborted` and the group stays usable for the next call. A rank that fails later, or not at all, leaves the group
in the middle of a call: peers notice through the group's store or by waiting `timeout_s`, and the channel is broken.

Headers travel on the CPU, over gloo connections of their own, whatever carries the rows: a rank that waits for a
header has launched nothing on its device. They are point-to-point, so a missing peer is known by name.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from prime_kernels.errors import ConfigMismatch, PeerAborted, PeerTimeout
from prime_kernels.moe.headers import Header, pack_headers, unpack_header
from prime_kernels.moe.notices import NoticeBoard, peer_aborted, peer_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

    _Receives = list[tuple[int, Work | None]]

_NUM_TAGS = 0x4000
_POLL_S, _NOTICE_POLL_S = 0.0005, 0.1

_num_channels: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_abandoned: list[Any] = []


class PeerChannel:
    """Headers, aborts and bounded waits of one runtime. Not thread-safe, like the runtime's calls.

    Args:
        group: The runtime's process group, any backend.
        num_local_experts: E_l, counts per peer in a header.
        timeout_s: Seconds to wait for a peer, in headers and in row transport on the CPU.

    Creating one is a collective over `group`.
    """

    def __init__(self, group: ProcessGroup, *, num_local_experts: int, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.timeout_s = timeout_s
        self.broken: str | None = None
        self._num_local_experts = num_local_experts
        self._call = 0
        self._phase = "none"
        self._depth, self._finished = 0, False
        self._in_call = False
        self._posted: list[tuple[list[Work], _Receives, Tensor, Tensor]] = []
        self._reported: BaseException | None = None
        # Ranks create the channels of a group in the same order, so a count names each rendezvous.
        _num_channels[group] = number = _num_channels.get(group, -1) + 1
        store = dist.distributed_c10d._get_process_group_store(group)
        store = dist.PrefixStore(f"prime_kernels/{number}", store)  # type: ignore[attr-defined]
        # Row transport that outlives the time-out ends by itself a little later, so that exit does not hang on it.
        limit = timedelta(seconds=timeout_s + 5.0)
        self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        self._board = NoticeBoard(store, self.rank, self.size)

    def exchange(self, sent: Tensor, *, phase: str, flags: int = 0, tokens: int = 0) -> tuple[Tensor, int]:
        """Start a call: swap headers with every peer.

        Args:
            sent: [R, E_l] int64 on the CPU. Rows for each expert of each rank.
            phase: One of `headers.PHASES`, equal on all ranks.
            flags: Non-negative bit set.
            tokens: T of this rank, for error texts.

        Returns:
            [R, E_l] int64 rows from each rank for each local expert, and the union of all flags.

        Raises:
            PeerAborted: a peer raised before its header, or its process ended.
            PeerTimeout: a peer did not start this call within `timeout_s`.
            ConfigMismatch: a peer is in another call than this rank.
        """
        self._require_usable()
        started = time.monotonic()
        self._call += 1
        self._phase = phase
        headers = pack_headers(Header(self._call, phase, flags, tokens), sent)
        received = headers.clone()
        receives = self._post(headers, received)
        self._in_call = True
        self._await_headers(receives, started)
        self._posted.clear()
        union, counts = 0, []
        for peer in range(self.size):
            header, rows = unpack_header(received[peer], peer)
            self._check_header(peer, header)
            counts.append(rows)
            union |= header.flags
        return torch.stack(counts), union

    @contextlib.contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Run one call (validation included); tell the peers if it raises here.

        Nests: an error is posted once, and not at all after an inner guard ended well. What follows a call, such as
        the exception that ends a checkpoint's recomputation, is no concern of the peers.
        """
        self._depth += 1
        if self._depth == 1:
            self._finished = False
        try:
            yield
            self._finished = self._depth > 1
        except BaseException as error:
            if not self._finished:
                self.abort(error, phase)
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._in_call = False

    def abort(self, error: BaseException, phase: str) -> None:
        """Tell every peer that this rank will not finish the call. Does not wait for them.

        Before this rank's header went out, peers get the reason instead and the group stays usable. After it the
        channel is broken on every rank. An error that came from a peer is not passed on.
        """
        if self.broken is not None or error is self._reported or isinstance(error, PeerAborted | PeerTimeout):
            return
        self._reported = error
        reason = f"{type(error).__name__}: {error}"
        fatal = self._in_call
        self._board.post_stop(reason, final=fatal)
        if fatal:
            self.broken = f"this rank stopped in the middle of {phase} call {self._call}: {reason}"
        self._call += 1
        counts = torch.zeros(self.size, self._num_local_experts, dtype=torch.int64, device="cpu")
        headers = pack_headers(Header(self._call, phase, reason=reason, fatal=fatal), counts)
        # gloo sends from these buffers when peers arrive; `_posted` keeps them until an exchange succeeds.
        self._post(headers, headers.clone())

    def all_to_all(self, out: Tensor, rows: Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        """`dist.all_to_all_single` of CPU rows inside a call, with a bounded wait and aborts noticed while waiting."""
        self._require_usable()
        self._wait(self._gloo.alltoall_base(out, rows, out_splits, in_splits, dist.AllToAllOptions()))

    def close(self) -> None:
        """Refuse further calls and give the connections back. Not a collective."""
        if self.broken is not None:
            _abandoned.append(self._gloo)  # its destructor would wait for transport that peers left
        self._gloo = None
        self.broken = self.broken or "it is closed"

    def _require_usable(self) -> None:
        if self.broken is not None:
            raise PeerAborted(
                f"ep_rank {self.rank} cannot start a call: {self.broken}.",
                facts={"ep_rank": self.rank},
                remedy="Close the runtime with abort=True and create a new one on every rank.",
            )

    def _post(self, headers: Tensor, received: Tensor) -> _Receives:
        """Start sends and receives; returns the receives. Row r of both tensors belongs to peer r."""
        received[self.rank] = headers[self.rank]
        sends, receives = [], []
        for peer in range(self.size):
            if peer == self.rank:
                continue
            arriving = None
            with contextlib.suppress(RuntimeError):  # its connection is closed already: None says so
                arriving = self._gloo.recv([received[peer]], peer, self._call % _NUM_TAGS)
                sends.append(self._gloo.send([headers[peer]], peer, self._call % _NUM_TAGS))
            receives.append((peer, arriving))
        self._posted.append((sends, receives, headers, received))
        return receives

    def _await_headers(self, receives: _Receives, started: float) -> None:
        missing: list[int] = []
        closed: list[int] = []
        for peer, work in receives:
            left = max(self.timeout_s - (time.monotonic() - started), 0.001)
            try:
                if work is None:
                    closed.append(peer)
                else:
                    work.wait(timedelta(seconds=left))
            except RuntimeError:
                late = time.monotonic() - started >= self.timeout_s
                (missing if late else closed).append(peer)
        if closed:
            raise self._stopped(closed[0])
        if missing:
            raise self._timed_out(missing, time.monotonic() - started)
        # Every peer has arrived, so its receives are posted and these end at once.
        for send in self._posted[-1][0]:
            send.wait(timedelta(seconds=self.timeout_s))

    def _check_header(self, peer: int, header: Header) -> None:
        if header.reason is not None:
            error = peer_aborted(self.rank, peer, header.phase, self._call, header.reason)
            self.broken = error.message if header.fatal else None
            raise error
        if (header.call, header.phase) != (self._call, self._phase):
            self.broken = "the ranks are in different calls"
            raise ConfigMismatch(
                f"ep_rank {peer} is in {header.phase} call {header.call} with {header.tokens} tokens; "
                f"ep_rank {self.rank} is in {self._phase} call {self._call}.",
                facts={"ep_rank": self.rank, "peer": peer, "phase": self._phase, "peer_phase": header.phase},
                remedy="Every rank must run the same layers, forward and backward, in the same order.",
            )

    def _wait(self, work: Work) -> None:
        started = time.monotonic()
        next_look = started + _NOTICE_POLL_S
        while not work.is_completed():
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _NOTICE_POLL_S
                self._board.post_progress(self._call)
                if stops := self._board.stops():
                    raise self._stopped(min(stops))
            if now - started > self.timeout_s:
                raise self._timed_out(self._board.absent(self._call), now - started)
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            # The transport does not say whose connection closed; a rank that failed in Python will.
            raise self._stopped(min(self._board.settled_stops(), default=None)) from error

    def _stopped(self, peer: int | None) -> PeerAborted:
        """The error for a peer whose connection closed or who published a reason. Breaks the channel."""
        reason = None if peer is None else self._board.settled_stops([peer]).get(peer)
        if reason is None:
            reason = "its process ended or its connection closed, without a reason"
        error = peer_aborted(self.rank, peer, self._phase, self._call, reason)
        self.broken = error.message
        return error

    def _timed_out(self, missing: list[int], waited: float) -> PeerTimeout:
        error = peer_timeout(self.rank, missing, self._phase, self._call, waited)
        self.broken = error.message
        # A rank that comes late must learn why nobody is here any more.
        self._board.post_stop(f"PeerTimeout: {error.message}")
        return error
