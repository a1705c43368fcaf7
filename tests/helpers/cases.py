# SPDX-License-Identifier: Apache-2.0
"""Cases of one rank, with gate and up weights apart, and an oracle in float64 under autograd for them.

Shares no code with the package: every expert sees every token, so no sorting, counting or skipping can go wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class Case:
    """Inputs of one call. `w_gate` and `w_up` are apart so that no layout of the packed tensor is assumed here."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    dy: Tensor

    @property
    def w_gate_up(self) -> Tensor:
        return torch.cat([self.w_gate, self.w_up], dim=1)

    def change(self, **fields: Any) -> Case:
        return replace(self, **fields)


class Result(NamedTuple):
    y: Tensor
    dx: Tensor
    dtopk_weights: Tensor
    dw_gate: Tensor
    dw_up: Tensor
    dw_down: Tensor


def make_case(
    *,
    tokens: int = 48,
    hidden: int = 64,
    intermediate: int = 128,
    experts: int = 8,
    topk: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """Activations N(0, scale), weights over sqrt(fan-in), distinct random experts per token."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * std).to(dtype)

    ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(tokens)]) if tokens else None
    return Case(
        x=normal(tokens, hidden, std=scale),
        topk_ids=torch.empty(0, topk, dtype=torch.int64) if ids is None else ids,
        topk_weights=torch.rand(tokens, topk, generator=g, dtype=torch.float32) + 0.1,
        w_gate=normal(experts, intermediate, hidden, std=hidden**-0.5),
        w_up=normal(experts, intermediate, hidden, std=hidden**-0.5),
        w_down=normal(experts, hidden, intermediate, std=intermediate**-0.5),
        dy=normal(tokens, hidden, std=scale),
    )


def dense_oracle(
    case: Case,
    *,
    clamp: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    preact_dtype: torch.dtype | None = None,
) -> Result:
    """y and all gradients of <y, dy>, float64. `preact_dtype` rounds gate and up, as a clamp's decision needs."""
    leaves = [
        tensor.detach().double().requires_grad_()
        for tensor in (case.x, case.topk_weights, case.w_gate, case.w_up, case.w_down)
    ]
    x, topk_weights, w_gate, w_up, w_down = leaves
    y = torch.zeros_like(x)
    for expert in range(w_gate.shape[0]):
        gate, up = x @ w_gate[expert].T, x @ w_up[expert].T
        if preact_dtype is not None:
            gate, up = (z + (z.to(preact_dtype).double() - z).detach() for z in (gate, up))
        if clamp is not None:
            gate = torch.where(gate > clamp, clamp, gate)
            up = torch.where(up.abs() > clamp, clamp * up.sign().detach(), up)
        hidden = gate / (1 + torch.exp(-alpha * gate)) * (up + up_offset)
        weight = (topk_weights * (case.topk_ids == expert)).sum(1, keepdim=True)
        y = y + weight * (hidden @ w_down[expert].T)
    y.backward(case.dy.double())
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Result(y.detach(), *grads)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected values; inf if anything is not finite."""
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    actual, expected = actual.double(), expected.double()
    norm = float(expected.norm())
    difference = float((actual - expected).norm())
    return difference if norm == 0 else difference / norm


def worst_errors(actual: Result, expected: Result) -> dict[str, float]:
    """Per tensor: the worst of the whole tensor, of each expert slice, and of each 16-column tile."""
    errors = {}
    for name in Result._fields:
        got, want = getattr(actual, name), getattr(expected, name)
        assert got.shape == want.shape, name
        parts = [(got, want)]
        if name.startswith("dw_"):
            parts += [(got[e], want[e]) for e in range(want.shape[0])]
        if name != "dtopk_weights":
            parts += list(zip(got.split(16, -1), want.split(16, -1), strict=True))
        errors[name] = max(relative_error(a, b) for a, b in parts)
    return errors


def assert_close(actual: Result, expected: Result, bound: float) -> None:
    """Every error measure within the bound, and a reference that is not trivially met by zeros."""
    for name in Result._fields:
        assert float(getattr(expected, name).norm()) > 0, f"{name} of the oracle is zero: this case tests nothing"
    errors = worst_errors(actual, expected)
    assert max(errors.values()) <= bound, {name: f"{error:.3g}" for name, error in errors.items()}
