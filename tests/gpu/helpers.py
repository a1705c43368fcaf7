# SPDX-License-Identifier: Apache-2.0
"""Running the layer on a GPU: cases moved there, dirty allocator blocks, one call with all its gradients."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

import prime_kernels
from tests.helpers.cases import Case, Result, relative_error

# Relative Frobenius error against float64, per tensor, expert, 128-row block and 16-column tile. bf16 rounding of z, h
# and the results alone gives about 2e-3 to 4e-3; an error of layout or of a missing row gives 1e-1 or more.
BOUND = 8e-3


def on_gpu(case: Case) -> Case:
    return Case(**{f.name: getattr(case, f.name).cuda() for f in fields(case)})


def poison_allocator(mib: int = 256) -> None:
    """Leave NaN in the blocks that the caching allocator hands out next."""
    held = [torch.full((size << 18,), float("nan"), device="cuda") for size in (mib, mib // 4, 8, 1)]
    held += [torch.full((64 << shift,), float("nan"), device="cuda") for shift in range(0, 14)]
    del held


def runtime_for(case: Case, **config: Any) -> prime_kernels.MegaMoERuntime:
    experts, intermediate, hidden = case.w_gate.shape
    options: dict[str, Any] = {"backend": "cuda", "max_tokens_per_rank": max(1, case.x.shape[0])} | config
    return prime_kernels.MegaMoERuntime.create(
        prime_kernels.MegaMoEConfig(
            num_experts=experts,
            topk=case.topk_ids.shape[1],
            hidden=hidden,
            intermediate=intermediate,
            **options,
        ),
        device=case.x.device,
    )


def run(case: Case, runtime: prime_kernels.MegaMoERuntime, *, pair: bool = False, poison: bool = True) -> Result:
    """y and every gradient of <y, dy>."""
    x, weights, down = (t.detach().clone().requires_grad_() for t in (case.x, case.topk_weights, case.w_down))
    gate, up = (t.detach().clone().requires_grad_() for t in (case.w_gate, case.w_up))
    packed = case.w_gate_up.detach().requires_grad_()
    if poison:
        poison_allocator()
    y = prime_kernels.mega_moe(x, case.topk_ids, weights, (gate, up) if pair else packed, down, runtime=runtime)
    if poison:
        poison_allocator()
    y.backward(case.dy)
    runtime.synchronize()
    grads: tuple[Tensor | None, ...]
    if pair:
        grads = (gate.grad, up.grad)
    else:
        assert packed.grad is not None
        grads = packed.grad.chunk(2, 1)
    results = (y.detach(), x.grad, weights.grad, *grads, down.grad)
    assert all(r is not None for r in results)
    return Result(*results)  # type: ignore[arg-type]


def same_bits(a: Result, b: Result) -> bool:
    return all(torch.equal(p.view(torch.int16), q.view(torch.int16)) for p, q in zip(a, b, strict=True))


def worst_row_block(got: Tensor, want: Tensor) -> float:
    """The largest relative error of any 128-row block."""
    pairs = zip(got.split(128), want.split(128), strict=True)
    return max((relative_error(a, b) for a, b in pairs), default=0.0)
