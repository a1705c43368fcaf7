# SPDX-License-Identifier: Apache-2.0
"""`runtime=None` with a group: a runtime that all ranks make together on first use, and errors that all of them see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prime_kernels.errors import PeerAborted, PrimeKernelsError, ShapeError
from tests.helpers.oracle import BOUNDS, Results, check_results, dense, make_inputs
from tests.helpers.procs import run_ranks
from tests.helpers.ranks import join, own_part, run_layer

pytestmark = pytest.mark.dist

COUNTS = [5, 0, 9, 2]
EXPERTS = 8


def batch_of(world: int, seed: int) -> Any:
    ids = torch.randint(0, EXPERTS, (sum(COUNTS[:world]), 2), generator=torch.Generator().manual_seed(seed))
    return make_inputs(ids, num_experts=EXPERTS, hidden=64, intermediate=64, dtype=torch.float32, seed=seed)


def counts(part: Any, runtime: Any) -> list[Any]:
    """tokens_per_expert and recv_per_local_expert with and without a graph."""
    import prime_kernels

    stats = []
    for weights in (part.topk_weights, part.topk_weights.clone().requires_grad_()):
        arguments = (part.x, part.topk_ids, weights, part.w_gate_up, part.w_down)
        stats.append(prime_kernels.mega_moe(*arguments, runtime=runtime, return_stats=True)[1])
    return stats


def first_use(rank: int, world: int, as_mesh: bool) -> list[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from prime_kernels.moe import auto

    torch.set_num_threads(1)
    group = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)) if as_mesh else dist.group.WORLD
    results: list[Any] = []
    for step in range(3):
        results.append(run_layer(own_part(batch_of(world, step), COUNTS[:world], rank), None, group=group))
        assert len(auto._runtimes) == 1
    (runtime,) = auto._runtimes.values()
    results.append(counts(own_part(batch_of(world, 0), COUNTS[:world], rank), runtime))
    assert runtime.config.max_tokens_per_rank == 4096
    assert runtime.ep_size == world
    # A rank whose batch does not fit cannot grow it alone: it says so, and its peers hear of it.
    part = own_part(batch_of(world, 0), COUNTS[:world], rank)
    if rank == 0:
        part = part._replace(
            x=part.x.repeat(1000, 1),
            topk_ids=part.topk_ids.repeat(1000, 1),
            topk_weights=part.topk_weights.repeat(1000, 1),
        )
    try:
        run_layer(part, None, group=group)
        results.append("nothing was raised")
    except PrimeKernelsError as error:
        results.append(error)
    results.append(run_layer(own_part(batch_of(world, 1), COUNTS[:world], rank), None, group=group))
    runtime.close()
    return results


@pytest.mark.parametrize("as_mesh", [False, True], ids=["group", "mesh"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_make_one_runtime_on_first_use_and_share_its_errors(world: int, as_mesh: bool) -> None:
    ranks = run_ranks(world, first_use, as_mesh)
    for step in (0, 1, 2):
        got: Results = join([rank[step] for rank in ranks])
        check_results(got, dense(batch_of(world, step)), BOUNDS[torch.float32], step)
    ids = batch_of(world, 0).topk_ids
    everywhere = torch.bincount(ids.flatten(), minlength=EXPERTS)
    for index, rank in enumerate(ranks):
        start = sum(COUNTS[:index])
        own = torch.bincount(ids[start : start + COUNTS[index]].flatten(), minlength=EXPERTS)
        for stats in rank[3]:
            assert torch.equal(stats.tokens_per_expert.long(), own)
            assert torch.equal(stats.recv_per_local_expert.long(), everywhere.view(world, -1)[index])
    errors = [rank[4] for rank in ranks]
    assert isinstance(errors[0], ShapeError)
    assert "x has 5000 tokens; max_tokens_per_rank is 4096" in str(errors[0])
    for error in errors[1:]:
        assert isinstance(error, PeerAborted)
        assert error.facts["peer"] == 0
        assert "x has 5000 tokens" in str(error)
    check_results(join([rank[5] for rank in ranks]), dense(batch_of(world, 1)), BOUNDS[torch.float32], "after")
