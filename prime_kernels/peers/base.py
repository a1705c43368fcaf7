# SPDX-License-Identifier: Apache-2.0
"""What every provider of peers' memory gives: this rank's arena, and where those of its peers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from prime_kernels.peers.arena import ArenaLayout


class PeerMemory:
    """One rank's view of the arenas of its group.

    Args:
        layout: Of every arena.
        rank: Of this rank.
        arena: This rank's own, uint8, zeroed.
        addresses: Of every rank's arena, as this rank's device sees them.
        timeout_s: Seconds that a kernel waits for a peer.
        bytes_per_us: Pace of transport between ranks; 0: as fast as it goes.

    Attributes:
        layout, rank, arena: As given.
        size: Ranks of the group.
        address: Of this rank's arena.
        stream: The stream that this rank's calls must be made on; None: any.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        rank: int,
        arena: Tensor,
        addresses: Sequence[int],
        *,
        timeout_s: float,
        bytes_per_us: int = 0,
    ) -> None:
        self.layout, self.rank, self.size, self.arena = layout, rank, len(addresses), arena
        self.address = addresses[rank]
        self.stream: torch.cuda.Stream | None = None
        header = layout.header(rank, addresses, timeout_s=timeout_s, bytes_per_us=bytes_per_us)
        arena[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def close(self) -> None:
        """Give the memory back. Not collective: peers that still map it keep it alive."""
