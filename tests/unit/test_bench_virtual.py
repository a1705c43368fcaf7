# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of virtual ranks compute without a GPU: shares of a batch, bytes over links, records."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks import records
from benchmarks.numerics import Batch
from benchmarks.virtual import VirtualRanks


def world(ranks: int, experts: int, hidden: int = 64) -> VirtualRanks:
    made = VirtualRanks.__new__(VirtualRanks)
    made.runtimes = [SimpleNamespace(num_local_experts=experts // ranks)] * ranks  # type: ignore[list-item]
    made.hidden, made._weights = hidden, []
    return made


def batch(ids: list[list[int]], experts: int = 4, hidden: int = 64) -> Batch:
    tokens, topk = len(ids), len(ids[0])
    x, dy = (torch.randn(tokens, hidden) for _ in range(2))
    weights = torch.randn(experts, 128, hidden), torch.randn(experts, hidden, 64)
    return Batch(x, torch.tensor(ids), torch.rand(tokens, topk), dy, *weights)


def test_a_token_crosses_a_link_once_and_its_results_each() -> None:
    # Rank 0 owns the first two tokens and experts 0 and 1.
    ids = [[2, 3], [0, 2], [0, 1], [3, 3]]
    moved = world(2, 4).remote_bytes(batch(ids))
    out_of_0 = 2 + 2  # tokens 0 and 1 to rank 1; results of token 2 back
    out_of_1 = 1 + 3  # token 2; results of token 0 (two) and of token 1
    assert moved == max(out_of_0, out_of_1) * 128


def test_slots_without_an_expert_and_one_rank_move_nothing() -> None:
    assert world(2, 4).remote_bytes(batch([[-1, -1], [0, -1], [2, -1], [3, 2]])) == 0
    assert world(1, 4).remote_bytes(batch([[0, 3], [1, 2]])) == 0


def test_shares_are_the_batch_in_rank_order_with_leaves_of_their_own() -> None:
    whole = batch([[0, 1], [1, 2], [2, 3], [3, 0]])
    shares = world(2, 4).shares(whole)
    assert torch.equal(torch.cat([own.x for own in shares]), whole.x)
    assert torch.equal(torch.cat([own.w_down for own in shares]), whole.w_down)
    assert all(leaf.requires_grad and leaf.is_leaf for own in shares for leaf in own.leaves)


def test_fields_of_virtual_runs_are_known_to_the_schema() -> None:
    assert {"virtual_ranks", "pacing_GBs", "one_rank_ms", "remote_bytes"} <= set(records.OPTIONAL)
