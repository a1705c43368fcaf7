# SPDX-License-Identifier: Apache-2.0
"""What every rank of a multi-process test does: cut its part of a global batch and run the layer on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.oracle import Inputs, Results


def own_part(inputs: Inputs, counts: list[int], rank: int) -> Inputs:
    """This rank's tokens (`counts[r]` of rank r, in rank order) and experts."""
    start = sum(counts[:rank])
    rows = slice(start, start + counts[rank])
    local = inputs.w_gate_up.shape[0] // len(counts)
    experts = slice(rank * local, (rank + 1) * local)
    return Inputs(
        inputs.x[rows],
        inputs.topk_ids[rows],
        inputs.topk_weights[rows],
        inputs.w_gate_up[experts],
        inputs.w_down[experts],
        inputs.dy[rows],
    )


def run_layer(inputs: Inputs, runtime: Any, **kwargs: Any) -> Results:
    """One forward and one backward of `mega_moe`."""
    import prime_kernels

    leaves = [
        t.detach().clone().requires_grad_() for t in (inputs.x, inputs.topk_weights, inputs.w_gate_up, inputs.w_down)
    ]
    x, weights, w_gate_up, w_down = leaves
    y = prime_kernels.mega_moe(x, inputs.topk_ids, weights, w_gate_up, w_down, runtime=runtime, **kwargs)
    y.backward(inputs.dy)
    grads: list[Tensor] = []
    for leaf in leaves:
        assert leaf.grad is not None
        grads.append(leaf.grad)
    return Results(y.detach(), *grads)


def make_config(inputs: Inputs, backend: str, **changes: Any) -> Any:
    import prime_kernels

    sizes: dict[str, Any] = {
        "num_experts": inputs.w_gate_up.shape[0],
        "topk": inputs.topk_ids.shape[1],
        "hidden": inputs.x.shape[1],
        "intermediate": inputs.w_down.shape[2],
        "max_tokens_per_rank": max(1, inputs.x.shape[0]),
        "backend": backend,
        "peer_timeout_s": 30.0,
    }
    return prime_kernels.MegaMoEConfig(**{**sizes, **changes})


def join(parts: list[Results]) -> Results:
    """Results of all ranks as those of one: tokens and experts in rank order."""
    return Results(*(torch.cat(list(tensors)) for tensors in zip(*parts, strict=True)))
