# SPDX-License-Identifier: Apache-2.0
"""The arena: what every rank of a group owns and its peers write or read. Pure numbers, no torch.

The other side of this file is kernels_src/comm/peers.cuh. A header of 4096 bytes (the words of `struct Peers`, behind
them what kernels count) is followed by the regions, each beginning at a multiple of `ALIGN`. All ranks have the same
layout, so that an offset is good in any arena.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PEERS = 8  # kMaxPeers
STATE_OFFSET = 512  # kStateOffset
HEADER_BYTES = 4096
ALIGN = 256  # bytes
ROW_BYTES = 16  # RowEntry
_FLAG_KINDS, _FLAG_BYTES = 4, 128  # Flag, kFlagBytes
# Words of struct Peers behind the addresses, in order.
WORDS = (
    *("rank", "size", "flags", "counts", "rows", "tokens", "grads", "results", "dscore"),
    *("timeout_ns", "bytes_per_us"),
)
_HEADER = struct.Struct(f"<{MAX_PEERS}Q{len(WORDS)}Q")
_MOST = 2**63 - 1


class ArenaLayout(NamedTuple):
    """Offsets of the regions in bytes, and the size of the whole.

    Attributes:
        flags: A line per kind of flag and sender.
        counts: [8, E] int32, rows that every rank sends to every expert.
        rows: [pool rows] of 16 bytes, whose token every row of the pool is.
        tokens: [T, H] bf16, x in the forward.
        grads: [T, H] bf16, dy in the backward.
        results: [T K, H] bf16, y or dx of every slot.
        dscore: [T K] fp32, the scores' gradients.
        end: Bytes of an arena.
    """

    flags: int
    counts: int
    rows: int
    tokens: int
    grads: int
    results: int
    dscore: int
    end: int

    @classmethod
    def of(cls, *, num_experts: int, tokens: int, topk: int, hidden: int, pool_rows: int) -> ArenaLayout:
        """The layout for at most `tokens` tokens per rank.

        Args:
            num_experts: E, of all ranks.
            tokens: T, of the rank with most.
            topk: K.
            hidden: H.
            pool_rows: Rows that a rank's pool holds.
        """
        sizes = (
            _FLAG_KINDS * MAX_PEERS * _FLAG_BYTES,
            MAX_PEERS * num_experts * 4,
            pool_rows * ROW_BYTES,
            tokens * hidden * 2,
            tokens * hidden * 2,
            tokens * topk * hidden * 2,
            tokens * topk * 4,
        )
        ends = [HEADER_BYTES]
        for size in sizes:
            ends.append(ends[-1] + -(-size // ALIGN) * ALIGN)
        return cls(*ends)

    def header(self, rank: int, addresses: Sequence[int], *, timeout_s: float, bytes_per_us: int = 0) -> bytes:
        """`struct Peers` of one rank.

        Args:
            rank: Whose arena it is for.
            addresses: Of every rank's arena, as this rank's device sees them.
            timeout_s: Seconds that a kernel waits for a peer.
            bytes_per_us: Pace of transport between ranks; 0: as fast as it goes.
        """
        words = self._asdict() | {"rank": rank, "size": len(addresses), "bytes_per_us": bytes_per_us}
        words["timeout_ns"] = int(min(timeout_s * 1e9, _MOST))
        places = [*addresses, *[0] * (MAX_PEERS - len(addresses))]
        return _HEADER.pack(*places, *(words[name] for name in WORDS))
