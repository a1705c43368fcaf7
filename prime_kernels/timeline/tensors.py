# SPDX-License-Identifier: Apache-2.0
"""What a traced pass computes on: random inputs, and room for results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prime_kernels.moe.cuda_variants import plan_numel, preact_shape

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.config import MegaMoEConfig

SEED = 0


@dataclass
class Tensors:
    """Inputs and results of a layer on a device, as the backend's addresses name them; of one rank."""

    config: MegaMoEConfig
    tokens: int
    device: torch.device
    rank: int = 0
    ranks: int = 1
    plan_words: int | None = None  # None: those of one rank without peers

    def __post_init__(self) -> None:
        config, tokens, device = self.config, self.tokens, self.device
        h, i = config.hidden, config.intermediate
        experts = config.num_experts // self.ranks
        generator = torch.Generator(device=device).manual_seed(SEED + self.rank)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made.normal_(0.0, scale, generator=generator)

        scores, self.topk_ids = torch.topk(
            torch.rand(tokens, config.num_experts, generator=generator, device=device), config.topk, dim=-1
        )
        self.topk_weights = scores / scores.sum(-1, keepdim=True)
        self.x, self.dy = normal(tokens, h), normal(tokens, h)
        self.w_gate_up = normal(experts, 2 * i, h, scale=h**-0.5)
        self.w_down = normal(experts, h, i, scale=i**-0.5)
        self.y, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        self.dscore = torch.empty_like(self.topk_weights)
        self.dw_gate_up, self.dw_down = torch.empty_like(self.w_gate_up), torch.empty_like(self.w_down)
        kept = preact_shape(config, tokens, "preact", self.ranks)
        self.preact = torch.empty(kept, dtype=torch.bfloat16, device=device)
        words = self.plan_words or plan_numel(config, tokens)
        self.plan = torch.zeros(words, dtype=torch.int32, device=device)
        self.sent = torch.empty(config.num_experts, dtype=torch.int32, device=device)
        self.received = torch.empty(experts, dtype=torch.int32, device=device)
        self.work = torch.empty(0, dtype=torch.uint8, device=device)

    def address(self, name: str) -> int:
        """Address of a tensor; 0 for one that there is not (weights are packed)."""
        found: Tensor | None = getattr(self, name, None)
        return 0 if found is None else found.data_ptr()

    def counts(self) -> tuple[int, ...]:
        """Rows of every expert that is here, from the plan."""
        return tuple(self.plan[: self.config.num_experts // self.ranks].tolist())

    def reserve_work(self, size: int) -> None:
        """Have room for that many bytes of temporaries."""
        if self.work.numel() < size:
            self.work = torch.empty(size, dtype=torch.uint8, device=self.device)
