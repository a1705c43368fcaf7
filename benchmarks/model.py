# SPDX-License-Identifier: Apache-2.0
"""A small decoder around the expert layer, for timing whole training steps: nothing in it differs between arms but the
call that runs the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks import routing
from benchmarks.baselines import Layer
from benchmarks.cost import Shape


@dataclass(frozen=True)
class Around:
    """Sizes outside the expert layer; see models.toml."""

    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int


def identity_layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The expert layer left out: what a step costs without it. Router weights keep their gradient."""
    return x * topk_weights.sum(1, keepdim=True).to(x.dtype)


class Block(nn.Module):
    """Attention and experts, each behind a norm and a residual."""

    def __init__(self, shape: Shape, around: Around, local_experts: int, device: torch.device) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.topk, self.around = shape.topk, around
        width = around.heads * around.head_dim
        self.norm_attention = nn.RMSNorm(shape.hidden, **made)
        self.norm_experts = nn.RMSNorm(shape.hidden, **made)
        self.qkv = nn.Linear(shape.hidden, width + 2 * around.kv_heads * around.head_dim, bias=False, **made)
        self.out = nn.Linear(width, shape.hidden, bias=False, **made)
        self.router = nn.Linear(shape.hidden, shape.num_experts, bias=False, **made)
        self.w_gate_up = nn.Parameter(torch.empty(local_experts, 2 * shape.intermediate, shape.hidden, **made))
        self.w_down = nn.Parameter(torch.empty(local_experts, shape.hidden, shape.intermediate, **made))
        for weight in (self.w_gate_up, self.w_down):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)
        self.experts: Layer = identity_layer

    def forward(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """[documents, length, H], routes [tokens, K] -> [documents, length, H]."""
        x = x + self._attention(self.norm_attention(x))
        rows = self.norm_experts(x).flatten(0, 1)
        # Routes are given, so that every arm and every step has the same load; scores are the router's own.
        scores = self.router(rows).float().softmax(-1).gather(1, topk_ids)
        weights = scores / scores.sum(1, keepdim=True)
        return x + self.experts(rows, topk_ids, weights, self.w_gate_up, self.w_down).view_as(x)

    def _attention(self, x: Tensor) -> Tensor:
        around = self.around
        sizes = [around.heads * around.head_dim, *[around.kv_heads * around.head_dim] * 2]
        query, key, value = (
            part.unflatten(-1, (-1, around.head_dim)).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1)
        )
        # Repeated heads instead of enable_gqa: every attention kernel takes them.
        key, value = (part.repeat_interleave(around.heads // around.kv_heads, dim=1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Embedding, blocks under full activation checkpointing, output layer and loss."""

    def __init__(self, shape: Shape, around: Around, local_experts: int, device: torch.device) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.embed = nn.Embedding(around.vocabulary, shape.hidden, **made)
        self.blocks = nn.ModuleList(Block(shape, around, local_experts, device) for _ in range(around.layers))
        self.norm = nn.RMSNorm(shape.hidden, **made)
        self.head = nn.Linear(shape.hidden, around.vocabulary, bias=False, **made)

    def use(self, layer: Layer) -> None:
        """Run the experts with this layer from now on."""
        for block in self.blocks:
            block.experts = layer

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters of which every rank has its own part."""
        return [weight for block in self.blocks for weight in (block.w_gate_up, block.w_down)]

    def forward(self, ids: Tensor, routes: list[Tensor]) -> Tensor:
        """Mean next-token loss of [documents, length] token ids, with the routes of every block."""
        x = self.embed(ids)
        for block, topk_ids in zip(self.blocks, routes, strict=True):
            x = checkpoint(block, x, topk_ids, use_reentrant=False)
        logits = self.head(self.norm(x[:, :-1]))
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class MasterAdamW:
    """AdamW on fp32 copies of bf16 parameters, as mixed-precision trainers keep them."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self._parameters = parameters
        self._masters = [parameter.detach().float() for parameter in parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, foreach=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update from the parameters' gradients, which are released; a missing gradient counts as 0."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            gradient = parameter.grad
            master.grad = torch.zeros_like(master) if gradient is None else gradient.float()
            parameter.grad = None
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)
            master.grad = None


def sum_shared_gradients(model: Decoder, group: dist.ProcessGroup | None) -> None:
    """All-reduce the gradients of everything that all ranks hold alike (experts are summed by the layer itself)."""
    if group is None:
        return
    own = {id(parameter) for parameter in model.expert_parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def make_routes(shape: Shape, around: Around, tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
    """Routes of every block."""
    return [
        routing.draw_routes(kind, tokens, shape.topk, shape.num_experts, generator)[0] for _ in range(around.layers)
    ]
