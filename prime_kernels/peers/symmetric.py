# SPDX-License-Identifier: Apache-2.0
"""Arenas of the ranks of a process group, one GPU each, through torch's symmetric memory.

No multicast object is ever made: kernels address peers one by one, and torch would make one for every block that ranks
exchange wherever the device says that it can.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from prime_kernels.errors import BackendUnavailable
from prime_kernels.peers.base import PeerMemory
from prime_kernels.settings import without_multicast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from prime_kernels.peers.arena import ArenaLayout

_T = TypeVar("_T")
_REMEDY = 'Use a group of GPUs that NVLink connects, or backend="grouped".'
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Place(NamedTuple):
    """Where a rank's GPU is."""

    host: str
    ordinal: int
    uuid: str


class SymmetricPeers(PeerMemory):
    """One rank's view of arenas that torch has mapped into this process."""

    handle: Any = None

    def close(self) -> None:
        """Unmap the peers' arenas and give up this rank's, which lives on while a peer still maps it."""
        self.handle = None
        self.arena = self.arena.new_empty(0)


def create_peers(layout: ArenaLayout, group: ProcessGroup, device: torch.device, *, timeout_s: float) -> SymmetricPeers:
    """Zeroed arenas of all ranks of a group, each mapped into all of them. Collective.

    Args:
        layout: Of every arena; equal on all ranks.
        group: The ranks, on one host.
        device: This rank's GPU, with its index.
        timeout_s: Seconds that a kernel waits for a peer.

    Raises:
        BackendUnavailable: GPUs cannot reach each other's memory, or torch cannot map it without multicast (E51); on
            every rank.
    """
    rank = dist.get_rank(group)
    places = _gather(group, place_of(device))
    refuse_places(places)
    blind = [peer for peer in range(len(places)) if peer != rank and not _reaches(device, places[peer].uuid)]
    refuse_pairs([(one, peer) for one, peers in enumerate(_gather(group, blind)) for peer in peers])
    with without_multicast():
        refuse_multicast(_gather(group, _offers_multicast(device)))
        arena = _attempt(group, lambda: _allocate(layout.end, device))
        handle = _attempt(group, lambda: _rendezvous(arena, group))
    addresses = [int(address) for address in handle.buffer_ptrs]
    arena.zero_()
    peers = SymmetricPeers(layout, rank, arena, addresses, timeout_s=timeout_s)
    peers.handle = handle
    torch.cuda.synchronize(device)
    _gather(group, None)  # no rank writes to an arena that is still to be zeroed
    return peers


def place_of(device: torch.device) -> Place:
    """Where this rank's GPU is; equal for two ranks on one GPU."""
    properties = torch.cuda.get_device_properties(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    host = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return Place(host, index, str(getattr(properties, "uuid", index)))


def refuse_places(places: Sequence[Place]) -> None:
    """Raise unless all GPUs are different ones of one host, with the same numbers in every process."""
    for peer, there in enumerate(places):
        for rank, here in enumerate(places[:peer]):
            if here.host != there.host:
                what, remedy = "are on different hosts", _REMEDY
            elif here.uuid == there.uuid:
                what = f"are both on GPU {here.uuid}"
                remedy = "Give every rank a GPU; prime_kernels.peers.loopback has virtual ranks on one."
            elif here.ordinal == there.ordinal:
                what = f"call different GPUs cuda:{here.ordinal}, which torch's symmetric memory takes for one"
                remedy = "Let every rank see all GPUs (CUDA_VISIBLE_DEVICES) and pass its own as the device."
            else:
                continue
            raise BackendUnavailable(
                f"ep_rank {rank} and ep_rank {peer} {what}.",
                code="E51",
                facts={"peers": (rank, peer), "places": [tuple(place) for place in places]},
                remedy=remedy,
            )


def refuse_pairs(pairs: Sequence[tuple[int, int]]) -> None:
    """Raise if there is a pair (rank, peer) whose GPUs cannot read each other's memory."""
    if not pairs:
        return
    named = sorted({(min(pair), max(pair)) for pair in pairs})
    text = ", ".join(f"{rank} and {peer}" for rank, peer in named)
    raise BackendUnavailable(
        f"GPUs without access to each other's memory, by ep_rank: {text}.",
        code="E51",
        facts={"pairs": named},
        remedy=_REMEDY,
    )


def refuse_multicast(offers: Sequence[bool]) -> None:
    """Raise if torch would make multicast objects on any rank, although it was asked not to."""
    if any(offers):
        raise BackendUnavailable(
            f"torch {torch.__version__} makes multicast objects with shared memory and does not heed "
            f"TORCH_SYMM_MEM_DISABLE_MULTICAST, on ep_rank {list(offers).index(True)}.",
            code="E51",
            facts={"torch": torch.__version__},
            remedy='Use another torch, or backend="grouped".',
        )


def _gather(group: ProcessGroup, mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _reaches(device: torch.device, uuid: str) -> bool:
    """Whether this GPU can read that one's memory; True where this process does not see that one."""
    for index in range(torch.cuda.device_count()):
        if str(getattr(torch.cuda.get_device_properties(index), "uuid", index)) == uuid:
            return bool(torch.cuda.can_device_access_peer(device, index))
    return True


def _offers_multicast(device: torch.device) -> bool:
    """What torch itself asks before it makes a multicast object."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index))


def _attempt(group: ProcessGroup, step: Callable[[], _T]) -> _T:
    """A step that every rank makes; an error of any rank becomes one of all."""
    result, reason = None, None
    try:
        result = step()
    except RuntimeError as error:
        reason = error.message if isinstance(error, BackendUnavailable) else str(error)
    for peer, text in enumerate(_gather(group, reason)):
        if text is not None:
            raise BackendUnavailable(
                f"torch {torch.__version__} cannot share memory among the GPUs of this group; ep_rank {peer}: {text}.",
                code="E51",
                facts={"peer": peer, "reason": text},
                remedy=_REMEDY,
            )
    assert result is not None
    return result


def _allocate(size: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    name = _SymmetricMemory.get_backend(device)
    if name not in (None, "CUDA"):
        raise BackendUnavailable(f"its symmetric memory was set to {name}; need CUDA")
    # Not through torch's own pool, where what else a rank has allocated would move its arena against the others'.
    return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


def _rendezvous(arena: Tensor, group: ProcessGroup) -> Any:
    """Torch's handle of everyone's memory. Collective."""
    from torch._C._distributed_c10d import _SymmetricMemory

    handle = _SymmetricMemory.rendezvous(arena, group.group_name)
    if handle is None:
        raise BackendUnavailable("the rendezvous gave no handle")
    if handle.multicast_ptr:
        raise BackendUnavailable("it made a multicast object although it was asked not to")
    if handle.buffer_ptrs[dist.get_rank(group)] != arena.data_ptr():
        raise BackendUnavailable("the arena is not where the handle says that it is")
    return handle
