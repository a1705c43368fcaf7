# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks: a whole expert-parallel group in one process on one GPU, with the kernels and flags of a real one.

Every rank has a stream, an arena and its share of the SMs, so that the kernels of all of them are resident together and
wait for one another as kernels on several GPUs do. For tests and measurements; a model can train on it, slowly.

While one rank's kernel waits for another, the host must get to launch the other one. So between the first launch of a
step and the last: no synchronisation, no `.item()`, nothing that makes the allocator ask the driver for memory. Memory
for one call of every rank is in the allocator's cache from the beginning. `CUDA_DEVICE_MAX_CONNECTIONS=32` in the
environment keeps the streams from queueing behind one another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prime_kernels.errors import BackendUnavailable, UnsupportedConfig
from prime_kernels.peers.arena import MAX_PEERS
from prime_kernels.peers.base import PeerMemory

if TYPE_CHECKING:
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.runtime import MegaMoERuntime
    from prime_kernels.peers.arena import ArenaLayout


class LoopbackPeers(PeerMemory):
    """One virtual rank's view. Keeps the arenas of all of them."""

    _arenas: list[torch.Tensor]


def create_peers(
    layout: ArenaLayout,
    *,
    ranks: int,
    device: torch.device,
    timeout_s: float,
    pacing_gb_s: float | None = None,
) -> list[LoopbackPeers]:
    """Zeroed arenas of `ranks` virtual ranks, each with a stream of its own.

    Args:
        layout: Of every arena.
        ranks: 1..8.
        device: The GPU that they share.
        timeout_s: Seconds that a kernel waits for a peer.
        pacing_gb_s: GB/s that every rank may send, and that it may receive; None or 0: unpaced.
    """
    arenas = [torch.zeros(layout.end, dtype=torch.uint8, device=device) for _ in range(ranks)]
    addresses = [arena.data_ptr() for arena in arenas]
    pace = max(1, round(pacing_gb_s * 1000)) if pacing_gb_s else 0  # bytes per microsecond
    made = []
    for rank, arena in enumerate(arenas):
        peers = LoopbackPeers(layout, rank, arena, addresses, timeout_s=timeout_s, bytes_per_us=pace)
        peers._arenas = arenas
        peers.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        made.append(peers)
    return made


def create_runtimes(
    config: MegaMoEConfig,
    *,
    ranks: int,
    device: torch.device | str | int | None = None,
    pacing_gb_s: float | None = None,
) -> list[MegaMoERuntime]:
    """Runtimes of `ranks` virtual ranks that share one GPU.

    Calls of rank r are made under `torch.cuda.stream(runtimes[r].stream)`, the same calls in the same order on every
    rank, with nothing between them that waits for the device.

    Args:
        config: As for a group of that many ranks. `num_sms` is at most a rank's share, which is also the default.
        ranks: 1..8; must divide the experts.
        device: A CUDA device. None: the current one.
        pacing_gb_s: GB/s that every rank may send, and that it may receive; None or 0: as fast as memory goes.
            330 / ranks keeps the ratio of transport to compute that as many H200s have.

    Returns:
        Open runtimes, rank r at index r, without a process group.

    Raises:
        UnsupportedConfig: the config has no fused kernels, or `ranks` or `pacing_gb_s` is out of range.
        BackendUnavailable: `device` is no CUDA device, or the kernels do not load there.

    Source: this file and moe/cuda_peers.py.
    """
    from prime_kernels.moe.backends import select_backend
    from prime_kernels.moe.cuda_variants import arena_layout
    from prime_kernels.moe.runtime import MegaMoERuntime

    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        raise BackendUnavailable(
            f"virtual ranks got device {place}; need a CUDA device.",
            facts={"argument": "device", "device": str(place)},
            remedy='Use backend="reference" with a gloo group to run several ranks on the CPU.',
        )
    _check(config, ranks, pacing_gb_s)
    choice = select_backend(config.replace(backend="cuda"), ep_size=ranks, device=place)
    if choice.error is not None:
        raise choice.error
    assert choice.backend is not None
    if str(place) == "cuda":
        place = torch.device("cuda", torch.cuda.current_device())
    share = torch.cuda.get_device_properties(place).multi_processor_count // ranks // 2 * 2
    config = config.replace(backend="cuda", num_sms=min(config.num_sms or share, share), reserve_sms=0)
    peers = create_peers(
        arena_layout(config, ranks),
        ranks=ranks,
        device=place,
        timeout_s=config.peer_timeout_s,
        pacing_gb_s=pacing_gb_s,
    )
    runtimes = [MegaMoERuntime(config, choice.backend, None, place, peers=rank) for rank in peers]
    for runtime in runtimes:
        choice.backend.open(runtime)
        _reserve(runtime)
    torch.cuda.synchronize(place)
    return runtimes


def _reserve(runtime: MegaMoERuntime) -> None:
    """Leave one call's memory in the allocator's cache of the rank's stream, so that a call need not ask the driver."""
    plan, config = runtime.plan, runtime.config
    output_bytes = 2 * config.max_tokens_per_rank * config.hidden
    with torch.cuda.stream(runtime.stream):
        for size in (plan.workspace_bytes + plan.saved_bytes_per_layer + output_bytes, 1 << 18):
            torch.empty(size, dtype=torch.uint8, device=runtime.device)


def _check(config: MegaMoEConfig, ranks: int, pacing_gb_s: float | None) -> None:
    if not isinstance(ranks, int) or not 1 <= ranks <= MAX_PEERS:
        raise UnsupportedConfig(
            f"ranks is {ranks!r}; need an integer in 1..{MAX_PEERS}.",
            facts={"argument": "ranks", "got": ranks},
            remedy="Give virtual ranks more experts each instead.",
        )
    if pacing_gb_s is not None and not 0 <= pacing_gb_s < 1e6:
        raise UnsupportedConfig(
            f"pacing_gb_s is {pacing_gb_s!r}; need GB/s in [0, 1e6), or None.",
            facts={"argument": "pacing_gb_s", "got": pacing_gb_s},
            remedy="Use None to run without a pace.",
        )
    if config.backend not in ("auto", "cuda"):
        raise UnsupportedConfig(
            f'backend is "{config.backend}"; virtual ranks are for the fused kernels only.',
            facts={"argument": "backend", "got": config.backend},
            remedy='Use backend="cuda".',
        )
