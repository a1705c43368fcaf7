# SPDX-License-Identifier: Apache-2.0
"""Where a process measures: its device, its rank, and the process groups that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Where this process measures. `exchange` is the group that the unfused recipe's rows travel in, on one GPU too."""

    device: torch.device
    group: dist.ProcessGroup | None
    rank: int
    ep: int
    exchange: dist.ProcessGroup | None = None

    def say(self, text: str) -> None:
        """Print on one rank only."""
        if self.rank == 0:
            print(text, flush=True)

    def slowest(self, value: float) -> float:
        """Largest value of any rank."""
        if self.group is None:
            return value
        tensor = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return float(tensor.item())


@contextmanager
def process_group(device: torch.device, folder: Path, *, rank: int = 0, ranks: int = 1) -> Iterator[dist.ProcessGroup]:
    """The default process group, NCCL on GPUs and gloo on CPUs, of `ranks` processes that share `folder`."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(str(folder / "store"), ranks),
        rank=rank,
        world_size=ranks,
        device_id=device if on_gpu else None,
    )
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    except BaseException:
        # Not among several: it could wait for ranks that are still in the middle of something. Left alone, the
        # process of one rank would stay for minutes.
        if ranks == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
