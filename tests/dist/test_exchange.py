# SPDX-License-Identifier: Apache-2.0
"""Rows reach their owners in the order that one rank holding all experts would see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.procs import run_ranks

pytestmark = pytest.mark.dist

NUM_EXPERTS, TOPK, WIDTH = 8, 3, 4


def make_batches(world: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """(x, topk_ids) of every rank for each named case; the same on all ranks."""
    gen = torch.Generator().manual_seed(7)

    def batch(tokens: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(low, high, (tokens, TOPK), generator=gen)
        return torch.randn(tokens, WIDTH, generator=gen, dtype=torch.float64), ids

    local = NUM_EXPERTS // world
    return {
        "uneven tokens": [batch(3 + 2 * rank, 0, NUM_EXPERTS) for rank in range(world)],
        "an empty rank": [batch(0 if rank == world - 1 else 5, -1, NUM_EXPERTS) for rank in range(world)],
        "no tokens at all": [batch(0, 0, NUM_EXPERTS) for _ in range(world)],
        "all to rank 0": [batch(4, 0, local) for _ in range(world)],
        "all skipped": [batch(4, -1, 0) for _ in range(world)],
        "wild ids are skipped": [batch(6, -3, NUM_EXPERTS + 3) for _ in range(world)],
    }


def exchange_all(rank: int, world: int, with_channel: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from prime_kernels.moe import exchange
    from prime_kernels.moe.abort import PeerChannel

    group = dist.group.WORLD
    channel = PeerChannel(group, num_local_experts=NUM_EXPERTS // world, timeout_s=20.0) if with_channel else None
    out = {}
    for name, batches in make_batches(world).items():
        x, ids = batches[rank]
        kwargs: dict[str, Any] = {"group": group, "ep_size": world, "channel": channel}
        routing = exchange.build_routing(ids, num_experts=NUM_EXPERTS, ep_rank=rank, flags=1 << rank, **kwargs)
        again = exchange.routing_from_plan(exchange.pack_plan(routing), ids.shape, **kwargs)
        assert torch.equal(again.order[: again.num_sent], routing.order)
        assert torch.equal(again.slot_rows, routing.slot_rows)
        rows = exchange.dispatch(exchange.gather_slots(x, routing), routing)
        back = exchange.sum_slots(exchange.combine_rows(rows, routing), routing)
        marks = exchange.slots_to_rows(torch.arange(ids.numel(), dtype=torch.float32).view(ids.shape), routing)
        home = exchange.rows_to_slots(exchange.combine_rows(exchange.dispatch(marks, routing), routing), routing)
        out[name] = (rows, routing.recv_per_local_expert, back, home, routing.peer_flags)
    return out


@pytest.mark.parametrize("with_channel", [False, True], ids=["plain collectives", "peer channel"])
@pytest.mark.parametrize("world", [2, 4])
def test_owners_see_the_rows_of_one_big_rank_in_its_order(world: int, with_channel: bool) -> None:
    reports = run_ranks(world, exchange_all, with_channel)
    local = NUM_EXPERTS // world
    for name, batches in make_batches(world).items():
        x = torch.cat([part for part, _ in batches])
        ids = torch.cat([part for _, part in batches])
        for rank in range(world):
            rows, counts, back, home, flags = reports[rank][name]
            wanted = [
                x[token]
                for expert in range(rank * local, (rank + 1) * local)
                for token in range(len(ids))
                for slot in range(TOPK)
                if ids[token, slot] == expert
            ]
            assert torch.equal(rows, torch.stack(wanted) if wanted else x.new_empty(0, WIDTH)), (name, rank)
            owned = ids[(ids >= rank * local) & (ids < (rank + 1) * local)] - rank * local
            assert torch.equal(counts.long(), torch.bincount(owned, minlength=local)), (name, rank)
            # gather, dispatch and their transposes: a token comes back once per routed slot.
            own_x, own_ids = batches[rank]
            routed = (own_ids >= 0) & (own_ids < NUM_EXPERTS)
            assert torch.allclose(back, own_x * routed.sum(1, keepdim=True), rtol=1e-14), (name, rank)
            slots = torch.arange(own_ids.numel(), dtype=torch.float32).view(own_ids.shape)
            assert torch.equal(home, torch.where(routed, slots, 0)), (name, rank)
            if with_channel:
                assert flags == (1 << world) - 1
