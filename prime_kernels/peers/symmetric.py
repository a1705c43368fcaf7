# SPDX-License-Identifier: Apache-2.0
"""Arenas of the ranks of a process group, one GPU each, through torch's symmetric memory.

Multicast objects are never made: nothing here reads or writes through one, and making them fails on machines whose
fabric is not set up for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_kernels.peers.base import PeerMemory

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from prime_kernels.peers.arena import ArenaLayout


def create_peers(layout: ArenaLayout, group: ProcessGroup, device: torch.device, *, timeout_s: float) -> PeerMemory:
    raise NotImplementedError
