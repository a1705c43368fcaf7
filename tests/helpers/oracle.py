# SPDX-License-Identifier: Apache-2.0
"""The layer as a dense loop in float64 under autograd, with no code of the package, and how errors are measured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Relative Frobenius error. bf16 rounds once to 2^-9 = 2e-3; chains of four such roundings stay below this bound.
BOUNDS = {torch.bfloat16: 8e-3, torch.float32: 2e-6, torch.float64: 1e-13}


class Inputs(NamedTuple):
    """Of one rank, or of all ranks together. Weights hold all experts."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    dy: Tensor


class Results(NamedTuple):
    y: Tensor
    dx: Tensor
    dtopk_weights: Tensor
    dw_gate_up: Tensor
    dw_down: Tensor


def make_inputs(
    topk_ids: Tensor, *, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, seed: int = 0
) -> Inputs:
    """Random inputs of order 1 for these routes."""
    gen = torch.Generator().manual_seed(seed)
    tokens = topk_ids.shape[0]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=gen, dtype=torch.float64) * scale).to(dtype)

    return Inputs(
        normal(tokens, hidden),
        topk_ids,
        torch.rand(topk_ids.shape, generator=gen) + 0.1,
        normal(num_experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        normal(num_experts, hidden, intermediate, scale=intermediate**-0.5),
        normal(tokens, hidden),
    )


def dense(inputs: Inputs) -> Results:
    """Exact results: every expert over the tokens that name it, slot by slot, in float64."""
    x, weights, w_gate_up, w_down = (
        t.double().requires_grad_() for t in (inputs.x, inputs.topk_weights, inputs.w_gate_up, inputs.w_down)
    )
    y = torch.zeros_like(x)
    for expert in range(w_gate_up.shape[0]):
        for slot in range(inputs.topk_ids.shape[1]):
            tokens = (inputs.topk_ids[:, slot] == expert).nonzero()[:, 0]
            gate, up = (x[tokens] @ w_gate_up[expert].t()).chunk(2, dim=1)
            out = (torch.nn.functional.silu(gate) * up) @ w_down[expert].t()
            y = y.index_add(0, tokens, out * weights[tokens, slot, None])
    grads = torch.autograd.grad(y, (x, weights, w_gate_up, w_down), inputs.dy.double())
    return Results(y.detach(), *grads)


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in Frobenius norms; where want is 0, 0 or infinity."""
    assert got.shape == want.shape, (got.shape, want.shape)
    difference = (got.double() - want.double()).norm().item()
    scale = want.double().norm().item()
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale


def check_results(got: Results, want: Results, bound: float, label: object = "") -> None:
    """Every tensor within the bound, weight gradients also expert by expert; experts without rows exactly 0."""
    for name, one, other in zip(Results._fields, got, want, strict=True):
        assert torch.isfinite(one).all(), (label, name)
        # Gradients of the scores are fp32 whatever x is, so they round to 2^-24 where x is fp64.
        limit = max(bound, 1e-7) if one.dtype == torch.float32 else bound
        assert relative_error(one, other) < limit, (label, name, relative_error(one, other))
        if name.startswith("dw_"):
            for expert in range(one.shape[0]):
                error = relative_error(one[expert], other[expert])
                assert error < 2 * bound, (label, name, expert, error)
