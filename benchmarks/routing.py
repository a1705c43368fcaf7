# SPDX-License-Identifier: Apache-2.0
"""Synthetic routers: which experts a token goes to. Every slot of a token names another expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("uniform", "zipf", "skew", "hot")
ZIPF_EXPONENT = 1.0
SKEW_FACTOR = 4.0


def expert_shares(kind: str, num_experts: int) -> Tensor:
    """[E] fp64, sum 1. Probability of each expert to be drawn first.

    uniform: all alike. zipf: the e-th most popular expert has weight 1/e. skew: the first eighth of the experts (those
    of the first ranks) is four times as popular as the rest. hot: one expert gets every token.
    """
    if kind == "uniform":
        weights = torch.ones(num_experts, dtype=torch.float64)
    elif kind == "zipf":
        weights = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -ZIPF_EXPONENT
    elif kind == "skew":
        weights = torch.ones(num_experts, dtype=torch.float64)
        weights[: max(1, num_experts // 8)] = SKEW_FACTOR
    elif kind == "hot":
        weights = torch.ones(num_experts, dtype=torch.float64)
        weights[0] = 1e12
    else:
        raise ValueError(f"routing is {kind!r}; need one of {', '.join(KINDS)}")
    return weights / weights.sum()


def draw_routes(
    kind: str, tokens: int, topk: int, num_experts: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(topk_ids [T, K] int64, topk_weights [T, K] fp32, rows summing to 1) on the generator's device.

    Sampling without replacement by the Gumbel top-k trick: the K largest of log(share) + Gumbel noise.
    """
    device = generator.device
    shares = expert_shares(kind, num_experts).to(device, torch.float32)
    uniform = torch.rand(tokens, num_experts, generator=generator, device=device).clamp_(1e-20, 1 - 1e-7)
    scores = shares.log() - (-uniform.log()).log()
    ids = scores.topk(topk, dim=1).indices
    raw = torch.rand(tokens, topk, generator=generator, device=device) + 0.1
    return ids, raw / raw.sum(1, keepdim=True)


def imbalance(counts: Tensor) -> float:
    """Most loaded over mean; 1 when balanced."""
    total = counts.sum().item()
    return counts.max().item() * counts.numel() / total if total else 1.0
