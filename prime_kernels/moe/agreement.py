# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group compare when a runtime is created: version, config, backend, and whether all can go on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import prime_kernels
from prime_kernels.errors import ConfigMismatch, PeerAborted, PrimeKernelsError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from prime_kernels.moe.config import MegaMoEConfig


def agree(config: MegaMoEConfig, group: ProcessGroup, *, error: PrimeKernelsError | None, backend: str | None) -> None:
    """Compare with all ranks. Collective, also for a rank that has an error and will raise it afterwards.

    Raises:
        ConfigMismatch: names the first pair of ranks that differ, the field and both values.
        PeerAborted: another rank cannot create its runtime; carries its reason.
    """
    mine: dict[str, Any] = {"version": prime_kernels.__version__}
    mine |= {f"config.{f.name}": repr(getattr(config, f.name)) for f in dataclasses.fields(config)}
    mine |= {"backend": backend, "error": None if error is None else str(error)}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    rank = dist.get_rank(group)
    for field in mine:
        if field in ("backend", "error"):
            continue
        for peer, theirs in enumerate(everyone):
            if theirs.get(field) != everyone[0].get(field):
                raise ConfigMismatch(
                    f"ep_rank {peer} has {field}={theirs.get(field)}, ep_rank 0 has {everyone[0].get(field)}.",
                    facts={"field": field, "peers": (0, peer), "ep_rank": rank},
                    remedy="Create the runtime with the same config and the same prime-kernels on every rank.",
                )
    if error is not None:
        return
    for peer, theirs in enumerate(everyone):
        if theirs["error"] is not None:
            raise PeerAborted(
                f"ep_rank {peer} cannot create its runtime: {theirs['error']}",
                facts={"ep_rank": rank, "peer": peer, "reason": theirs["error"]},
                remedy="Fix that rank; this one could have gone on.",
            )
        if theirs["backend"] != backend:
            raise ConfigMismatch(
                f"ep_rank {peer} got backend {theirs['backend']!r}, ep_rank {rank} got {backend!r}.",
                facts={"field": "backend", "peers": (rank, peer)},
                remedy="Name the backend in the config, or give every rank the same kind of device.",
            )
