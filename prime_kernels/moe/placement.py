# SPDX-License-Identifier: Apache-2.0
"""Where a runtime lives: its process group, its device, and whether its memory fits there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe.plan import plan_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from prime_kernels.moe.config import MegaMoEConfig


def process_group(group: object) -> ProcessGroup | None:
    """The ProcessGroup behind `group`; None when it has one rank."""
    candidate = group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UnsupportedConfig(
                f"group is a DeviceMesh with {group.ndim} dimensions; need 1.",
                facts={"argument": "group"},
                remedy='Pass the expert-parallel dimension, e.g. mesh["ep"].',
            )
        candidate = group.get_group()
    if candidate is None:
        return None
    if not isinstance(candidate, dist.ProcessGroup) or dist.get_rank(candidate) < 0:
        raise UnsupportedConfig(
            f"group is {group!r}; need a ProcessGroup that this rank belongs to, a 1-D DeviceMesh, or None.",
            facts={"argument": "group"},
            remedy="Create the expert-parallel groups on every rank and pass the one this rank is in.",
        )
    return candidate if dist.get_world_size(candidate) > 1 else None


def device_of(config: MegaMoEConfig, device: torch.device | str | None) -> torch.device:
    if device is None:
        wants_cuda = config.backend in ("auto", "cuda") and torch.cuda.is_available()
        device = "cuda" if wants_cuda else "cpu"
    device = torch.device(device)
    if str(device) == "cuda" and torch.cuda.is_available():  # without an index, which torch's types say cannot be
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def memory_error(config: MegaMoEConfig, ep_size: int, device: torch.device) -> UnsupportedConfig | None:
    """The arena and the workspace must fit the device before anything is allocated."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    plan = plan_memory(config, ep_size=ep_size)
    needed = plan.symmetric_bytes + plan.workspace_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    if needed <= total:
        return None
    return UnsupportedConfig(
        f"max_tokens_per_rank={config.max_tokens_per_rank} needs {needed} bytes on {device}, which has {total}.",
        facts={"argument": "max_tokens_per_rank", "bytes": needed, "total": total},
        remedy="Lower max_tokens_per_rank or capacity_factor; plan_memory(...).explain() lists the parts.",
    )
