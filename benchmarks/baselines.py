# SPDX-License-Identifier: Apache-2.0
"""The layers that are timed: the package's backends, and the unfused recipe that trainers run, under one interface.

The recipe ("unfused-torch") is the yardstick of every ratio: sort by expert, `dist.all_to_all_single` of rows with
host-known split sizes, local sort, `torch._grouped_mm` gate/up, compiled SwiGLU, `torch._grouped_mm` down, all-to-all
back, weighted `index_add`, and autograd through all of it. On one GPU it runs as it is written, through a group of one
rank, as the anchors did; "unfused-torch-local" is the shortcut without exchange. The package's own "grouped" backend
does the same work with an explicit backward and ordered sums; both are timed beside the recipe under their own names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cost import Shape

RECIPE = "unfused-torch"
LOCAL_RECIPE = "unfused-torch-local"
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x, topk_ids, topk_weights, w_gate_up, w_down) -> y, differentiable."""


@dataclass(frozen=True)
class Arm:
    """One layer to time, with the fields it has in a record."""

    name: str
    layer: Layer
    backend: str | None
    engine: str | None
    runtime: Any = None

    def close(self) -> None:
        """Release the runtime, if there is one."""
        if self.runtime is not None:
            self.runtime.close()


def config_of(backend: str, shape: Shape, *, tokens: int, **options: Any) -> Any:
    """The package's config of a layer of this shape."""
    import prime_kernels

    return prime_kernels.MegaMoEConfig(
        num_experts=shape.num_experts,
        topk=shape.topk,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        max_tokens_per_rank=tokens,
        backend=backend,  # type: ignore[arg-type]
        **options,
    )


def package_arm(
    backend: str,
    shape: Shape,
    *,
    tokens: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    engine: str = "torch",
    **options: Any,
) -> Arm:
    """One of the package's backends. Raises what `MegaMoERuntime.create` raises if it cannot run here."""
    import prime_kernels

    config = config_of(backend, shape, tokens=tokens, engine=engine, **options)
    runtime = prime_kernels.MegaMoERuntime.create(config, group=group, device=device)

    def layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        y = prime_kernels.mega_moe(
            x, topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime, precision=config.precision
        )
        assert isinstance(y, Tensor)
        return y

    name = backend if engine == "torch" else f"{backend}-{engine}"
    return Arm(name, layer, backend, engine if backend == "grouped" else None, runtime)


def recipe_arm(shape: Shape, *, group: dist.ProcessGroup | None) -> Arm:
    """The unfused recipe, out of torch alone.

    Raises:
        ValueError: without a process group there is no exchange, and so not the recipe.
    """
    if group is None:
        raise ValueError(f"{RECIPE} exchanges rows in a process group, of one rank at least; {LOCAL_RECIPE} needs none")
    return _torch_arm(RECIPE, shape, group)


def local_recipe_arm(shape: Shape) -> Arm:
    """The recipe without exchange, for a rank that holds all experts."""
    return _torch_arm(LOCAL_RECIPE, shape, None)


def _torch_arm(name: str, shape: Shape, group: dist.ProcessGroup | None) -> Arm:
    def layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        return unfused_layer(x, topk_ids, topk_weights, w_gate_up, w_down, shape.num_experts, group)

    return Arm(name, layer, None, "torch")


def unfused_layer(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The recipe; without a group, the shortcut. Every slot must name an expert; differentiable in all but the ids."""
    flat = topk_ids.reshape(-1)
    experts, order = torch.sort(flat, stable=True)
    tokens = order // topk_ids.shape[1]
    counts = torch.histc(experts.float(), bins=num_experts, min=0, max=num_experts - 1).to(torch.int64)
    rows = x[tokens]
    offsets = counts.cumsum(0).to(torch.int32)
    if group is None:
        out = _experts(rows, w_gate_up, w_down, offsets)
    else:
        ranks = dist.get_world_size(group)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        both = torch.stack([counts, received]).view(2, ranks, -1).sum(2).tolist()  # the host needs the splits
        local = received.view(ranks, -1)
        numbers = torch.arange(num_experts // ranks, device=x.device).repeat(ranks)
        labels = torch.repeat_interleave(numbers, received, output_size=sum(both[1]))
        arrival = torch.sort(labels, stable=True).indices
        rows = _AllToAll.apply(rows, both[1], both[0], group)[arrival]
        out = _experts(rows, w_gate_up, w_down, local.sum(0).cumsum(0).to(torch.int32))
        back = torch.empty_like(out).index_copy(0, arrival, out)
        out = _AllToAll.apply(back, both[0], both[1], group)
    weighted = out * topk_weights.reshape(-1)[order, None]
    y = torch.zeros(x.shape, dtype=weighted.dtype, device=x.device).index_add(0, tokens, weighted)
    return y.to(x.dtype)


def _experts(rows: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor) -> Tensor:
    h = _activation(_is_fast(rows))(_grouped_mm(rows, w_gate_up.transpose(1, 2), offsets))
    return _grouped_mm(h, w_down.transpose(1, 2), offsets)


def _grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    if _is_fast(rows):
        return torch._grouped_mm(rows, weights, offs=offsets)
    # Elsewhere the recipe exists to be tested and to be compared with, not to be timed.
    starts = [0, *offsets.tolist()]
    return torch.cat([rows[a:b] @ weights[e] for e, (a, b) in enumerate(pairwise(starts))])


def _is_fast(rows: Tensor) -> bool:
    """Whether torch has a grouped GEMM for these rows."""
    return rows.is_cuda and rows.dtype == torch.bfloat16


@cache
def _activation(compiled: bool) -> Callable[[Tensor], Tensor]:
    return torch.compile(_swiglu) if compiled else _swiglu


def _swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


class _AllToAll(torch.autograd.Function):
    """Rows to their ranks; gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out_splits: list[int], in_splits: list[int], group: Any) -> Tensor:
        ctx.way_back = in_splits, out_splits, group
        out = rows.new_empty(sum(out_splits), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), out_splits, in_splits, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        out_splits, in_splits, group = ctx.way_back
        out = grad.new_empty(sum(out_splits), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), out_splits, in_splits, group=group)
        return out, None, None, None
