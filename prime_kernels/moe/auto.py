# SPDX-License-Identifier: Apache-2.0
"""`runtime=None`: a runtime per (group, shapes), created on first use and kept until the process ends. Eager only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from prime_kernels.errors import ShapeError, UnsupportedConfig
from prime_kernels.moe.config import MegaMoEConfig
from prime_kernels.moe.handles import NO_RUNTIME, lookup
from prime_kernels.moe.placement import process_group
from prime_kernels.moe.runtime import MegaMoERuntime

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from prime_kernels.moe.config import Precision

_LEAST_TOKENS = 4096
_runtimes: dict[tuple[Any, ...], MegaMoERuntime] = {}


def runtime_for(
    x: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    precision: Precision,
) -> MegaMoERuntime:
    """The runtime that a call without one gets. Collective over `group` when it makes one."""
    if _replayed(x):
        lookup(NO_RUNTIME)
    for name, tensor, rank in (("x", x, 2), ("topk_ids", topk_ids, 2), ("w_down", w_down, 3)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != rank:
            raise ShapeError(
                f"{name} is {list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__}; "
                f"need a tensor of {rank} dimensions.",
                facts={"argument": name},
                remedy="See the shapes in mega_moe's description.",
            )
    ranks = process_group(group)
    size = 1 if ranks is None else dist.get_world_size(ranks)
    local = w_down.to_local() if hasattr(w_down, "to_local") else w_down
    sizes = (local.shape[0] * size, topk_ids.shape[1], x.shape[1], local.shape[2])
    key = (ranks, sizes, precision, x.device)
    runtime = _runtimes.get(key)
    if runtime is not None and (x.shape[0] <= runtime.config.max_tokens_per_rank or ranks is not None):
        # With peers a larger cap needs all of them, and this rank cannot know that they see one too.
        return runtime
    runtime = MegaMoERuntime.create(
        MegaMoEConfig(
            num_experts=sizes[0],
            topk=sizes[1],
            hidden=sizes[2],
            intermediate=sizes[3],
            max_tokens_per_rank=_cap(x.shape[0], ranks),
            precision=precision,
        ),
        group=ranks,
        device=x.device,
    )
    # A smaller one that this replaces lives on while a backward still refers to it.
    _runtimes[key] = runtime
    return runtime


def require_same_group(runtime: MegaMoERuntime, group: ProcessGroup | DeviceMesh) -> None:
    """`group` beside `runtime` is redundant; it must not contradict."""
    if process_group(group) is not runtime.group:
        raise UnsupportedConfig(
            f"group is not the group of {runtime!r}.",
            facts={"argument": "group"},
            remedy="Leave group out when passing a runtime.",
        )


def _cap(tokens: int, group: ProcessGroup | None) -> int:
    """A power of two that all ranks' token counts fit in."""
    if group is not None:
        counts = [0] * dist.get_world_size(group)
        dist.all_gather_object(counts, tokens, group=group)
        tokens = max(counts)
    return max(_LEAST_TOKENS, 1 << (max(tokens, 1) - 1).bit_length())


def _replayed(x: Tensor) -> bool:
    """Inside a checkpointed region (its first run or a recomputation) or a CUDA graph capture."""
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    source = torch.utils.checkpoint.__file__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != source:
        frame = frame.f_back
    return frame is not None
