# SPDX-License-Identifier: Apache-2.0
"""The layer over several ranks equals the dense oracle on all ranks' inputs, and equals one rank bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.oracle import BOUNDS, Inputs, Results, check_results, dense, make_inputs
from tests.helpers.procs import run_ranks
from tests.helpers.ranks import join, make_config, own_part, run_layer

pytestmark = pytest.mark.dist

HIDDEN, INTERMEDIATE = 64, 128


class Case(NamedTuple):
    counts: list[int]
    inputs: Inputs
    options: dict[str, Any]


def spread(counts: list[int], topk: int, low: int, high: int, seed: int = 3) -> Tensor:
    return torch.randint(low, high, (sum(counts), topk), generator=torch.Generator().manual_seed(seed))


@cache
def make_cases(world: int) -> dict[str, Case]:
    uneven = [5 + 7 * rank for rank in range(world)]
    starved = [11] * (world - 1) + [0]
    even = [9] * world
    local = 8 // world
    routes = {
        "uneven tokens with skipped slots": (uneven, spread(uneven, 3, -1, 8), 8, torch.float32, {}),
        "bf16": (even, spread(even, 3, 0, 8), 8, torch.bfloat16, {}),
        "no tokens on the last rank": (starved, spread(starved, 3, 0, 8), 8, torch.float32, {}),
        "no tokens anywhere": ([0] * world, spread([0], 3, 0, 8), 8, torch.float32, {}),
        "every row on rank 0": (even, spread(even, 3, 0, local), 8, torch.float32, {}),
        "every row on one expert of the last rank": (even, spread(even, 1, 7, 8), 8, torch.float32, {}),
        "every slot skipped": (even, spread(even, 3, -1, 0), 8, torch.float32, {}),
        "repeated ids": (even, spread(even, 1, 0, 8).expand(-1, 4).contiguous(), 8, torch.float32, {}),
        "one slot, one expert per rank": (even, spread(even, 1, 0, world).int(), world, torch.float32, {}),
        "inputs saved": (uneven, spread(uneven, 3, -1, 8), 8, torch.float32, {"save": "inputs"}),
        "rows saved": (uneven, spread(uneven, 3, -1, 8), 8, torch.float32, {"save": "full"}),
        # The pool holds 128 rows per expert and a little: more arrive, and backward has to compute them again.
        "more rows than the pool": (
            [200] * world,
            torch.zeros(200 * world, 2, dtype=torch.int64),
            world,
            torch.float32,
            {"capacity_factor": 0.1},
        ),
    }
    return {
        name: Case(
            counts,
            make_inputs(ids, num_experts=experts, hidden=HIDDEN, intermediate=INTERMEDIATE, dtype=dtype),
            options,
        )
        for name, (counts, ids, experts, dtype, options) in routes.items()
    }


@cache
def exact(world: int, name: str) -> Results:
    return dense(make_cases(world)[name].inputs)


def run_cases(rank: int, world: int, backend: str) -> dict[str, tuple[Results, Results | None, Tensor]]:
    """(this rank's results; on rank 0, those of one rank with the whole batch; rows per local expert) of each case."""
    import torch.distributed as dist

    import prime_kernels

    out = {}
    for name, case in make_cases(world).items():
        config = make_config(case.inputs, backend, **case.options)
        with prime_kernels.MegaMoERuntime.create(config, group=dist.group.WORLD, device="cpu") as runtime:
            part = own_part(case.inputs, case.counts, rank)
            results = run_layer(part, runtime)
            with torch.no_grad():
                y, stats = prime_kernels.mega_moe(*part[:5], runtime=runtime, return_stats=True)
            assert torch.equal(y, results.y), name
        alone = None
        if rank == 0:
            with prime_kernels.MegaMoERuntime.create(config, device="cpu") as runtime:
                alone = run_layer(case.inputs, runtime)
        out[name] = (results, alone, stats.recv_per_local_expert)
    return out


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_give_the_oracles_results_and_those_of_one_rank(world: int, backend: str) -> None:
    reports = run_ranks(world, run_cases, backend, timeout_s=90.0)
    for name, case in make_cases(world).items():
        together = join([report[name][0] for report in reports])
        check_results(together, exact(world, name), BOUNDS[case.inputs.x.dtype], (name, backend, world))
        alone = reports[0][name][1]
        for field, one, other in zip(Results._fields, together, alone, strict=True):
            assert torch.equal(one, other), (name, field, "differs from one rank")
        ids = case.inputs.topk_ids
        rows = torch.cat([report[name][2] for report in reports])
        experts = case.inputs.w_gate_up.shape[0]
        assert torch.equal(rows.long(), torch.bincount(ids[ids >= 0].reshape(-1).long(), minlength=experts)), name
