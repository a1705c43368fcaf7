# SPDX-License-Identifier: Apache-2.0
"""Notices that ranks of one group leave for each other in the group's store: why one stopped, how far one got.

The board is used off the fast path only. A store whose host is gone costs the reason, not the error: closed connections
end waits.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from prime_kernels.errors import PeerAborted, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Iterable

_SETTLE_S = 1.0


class NoticeBoard:
    """Reads and writes notices of one group, in a store of its own. No call waits for a rank longer than a second."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._store = store

    def post_stop(self, reason: str, *, final: bool = True) -> None:
        """This rank leaves its call. `final`: and does not come back; else its last words, should its process end."""
        self._set(f"{'stop' if final else 'words'}/{self.rank}", reason)

    def stops(self, kind: str = "stop", peers: Iterable[int] | None = None) -> dict[int, str]:
        """Reason by peer of those that posted one; by default of those that do not come back."""
        found = {peer: self._get(f"{kind}/{peer}") for peer in (self._peers if peers is None else peers)}
        return {peer: reason for peer, reason in found.items() if reason is not None}

    def settled_stops(self, peers: Iterable[int] | None = None) -> dict[int, str]:
        """`stops`, or last words, of peers that are gone; waits up to a second, since theirs may be on its way."""
        peers = None if peers is None else list(peers)
        deadline = time.monotonic() + _SETTLE_S
        while not (found := self.stops("stop", peers) or self.stops("words", peers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def post_progress(self, call: int) -> None:
        """This rank waits inside `call`."""
        self._set(f"at/{self.rank}", str(call))

    def absent(self, call: int) -> list[int]:
        """Peers that did not post progress in `call`."""
        return [peer for peer in self._peers if self._get(f"at/{peer}") != str(call)]

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(key, value)

    def _get(self, key: str) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return None


def peer_aborted(rank: int, peer: int | None, phase: str, call: int, reason: str) -> PeerAborted:
    """The error of `rank` when `peer` (None: nobody knows which) stopped."""
    who = "a peer" if peer is None else f"ep_rank {peer}"
    return PeerAborted(
        f"{who} stopped in {phase} call {call}, seen by ep_rank {rank}: {reason}",
        facts={"ep_rank": rank, "peer": peer, "phase": phase, "call": call, "reason": reason},
        remedy="Look at that rank's own error; this rank did nothing wrong.",
    )


def peer_timeout(rank: int, missing: list[int], phase: str, call: int, waited: float) -> PeerTimeout:
    """The error of `rank` after `waited` seconds without the `missing` ranks."""
    names = ", ".join(str(peer) for peer in missing) or "a rank it cannot name"
    return PeerTimeout(
        f"ep_rank {rank} waited {waited:.1f} s in {phase} call {call} for ep_rank {names}.",
        facts={"ep_rank": rank, "peers": missing, "phase": phase, "call": call, "seconds": waited},
        remedy="Find out what those ranks do, then close the runtime with abort=True; "
        "peer_timeout_s in the config sets the limit.",
    )
