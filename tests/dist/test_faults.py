# SPDX-License-Identifier: Apache-2.0
"""One rank misuses the layer or leaves it: the others learn which rank and why, and go on if they can."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from prime_kernels.errors import (
    ConfigMismatch,
    PeerAborted,
    PeerTimeout,
    PrimeKernelsError,
    ShapeError,
    UnsupportedConfig,
)
from tests.helpers.oracle import BOUNDS, Inputs, check_results, dense, make_inputs
from tests.helpers.procs import run_ranks
from tests.helpers.ranks import join, make_config, own_part, run_layer

pytestmark = pytest.mark.dist

EXPERTS, TOPK, TOKENS, CAP = 8, 2, 6, 16
BLAMED = 1
MISUSES = ["an id out of range", "a negative id", "a huge id", "too many tokens", "a wrong dtype", "a wrong shape"]


def make_batch(world: int) -> Inputs:
    ids = torch.randint(0, EXPERTS, (TOKENS * world, TOPK), generator=torch.Generator().manual_seed(5))
    return make_inputs(ids, num_experts=EXPERTS, hidden=64, intermediate=64, dtype=torch.float32)


def misused(part: Inputs, misuse: str) -> Inputs:
    ids = part.topk_ids.clone()
    if misuse == "an id out of range":
        ids[2, 1] = EXPERTS
    elif misuse == "a negative id":
        ids[0, 0] = -2
    elif misuse == "a huge id":
        ids[5, 1] = 2**31 - 1
    elif misuse == "too many tokens":
        times = CAP // TOKENS + 1
        return part._replace(
            x=part.x.repeat(times, 1), topk_ids=ids.repeat(times, 1), topk_weights=part.topk_weights.repeat(times, 1)
        )
    elif misuse == "a wrong dtype":
        return part._replace(x=part.x.double())
    elif misuse == "a wrong shape":
        return part._replace(w_down=part.w_down[:, :-1].contiguous())
    return part._replace(topk_ids=ids)


def open_runtime(inputs: Inputs, backend: str, **changes: Any) -> Any:
    import torch.distributed as dist

    import prime_kernels

    config = make_config(inputs, backend, **{"max_tokens_per_rank": CAP, "validate": True, **changes})
    return prime_kernels.MegaMoERuntime.create(config, group=dist.group.WORLD, device="cpu")


def error_of(call: Any, *args: Any, **kwargs: Any) -> tuple[PrimeKernelsError | None, float]:
    started = time.monotonic()
    try:
        call(*args, **kwargs)
    except PrimeKernelsError as error:
        return error, time.monotonic() - started
    return None, time.monotonic() - started


def misuse_then_use(rank: int, world: int, backend: str) -> Any:
    batch = make_batch(world)
    part = own_part(batch, [TOKENS] * world, rank)
    reports = {}
    with open_runtime(batch, backend) as runtime:
        for misuse in MISUSES:
            error = error_of(run_layer, misused(part, misuse) if rank == BLAMED else part, runtime)
            reports[misuse] = (*error, run_layer(part, runtime))
    return reports


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_misuse_on_one_rank_is_an_error_on_all_and_the_next_call_is_right(backend: str) -> None:
    reports = run_ranks(2, misuse_then_use, backend)
    exact = dense(make_batch(2))
    for misuse in MISUSES:
        for rank, report in enumerate(reports):
            error, seconds, _ = report[misuse]
            assert seconds < 5.0, misuse
            if rank == BLAMED:
                assert isinstance(error, ShapeError | UnsupportedConfig), (misuse, error)
            else:
                assert isinstance(error, PeerAborted), (misuse, error)
                assert error.facts["peer"] == BLAMED
                assert str(reports[BLAMED][misuse][0]) in str(error), "the reason travels with the abort"
        check_results(join([report[misuse][2] for report in reports]), exact, BOUNDS[torch.float32], misuse)


def skip_wild_ids(rank: int, world: int) -> Any:
    batch = make_batch(world)
    part = own_part(batch, [TOKENS] * world, rank)
    if rank == BLAMED:
        part = misused(misused(misused(part, "an id out of range"), "a negative id"), "a huge id")
    with open_runtime(batch, "grouped", validate=False) as runtime:
        return run_layer(part, runtime)


def test_without_validation_wild_ids_are_skipped_like_minus_one() -> None:
    batch = make_batch(2)
    ids = batch.topk_ids.clone()
    for token, slot in ((2, 1), (0, 0), (5, 1)):
        ids[TOKENS + token, slot] = -1
    exact = dense(batch._replace(topk_ids=ids))
    check_results(join(run_ranks(2, skip_wild_ids)), exact, BOUNDS[torch.float32])


def fail_in_backward(rank: int, world: int) -> Any:
    """Rank 1's user code fails between forward and backward, and the rank stays alive without calling again."""
    batch = make_batch(world)
    part = own_part(batch, [TOKENS] * world, rank)
    with open_runtime(batch, "grouped", peer_timeout_s=2.0) as runtime:
        import prime_kernels

        x = part.x.clone().requires_grad_()
        y = prime_kernels.mega_moe(x, *part[1:5], runtime=runtime)
        if rank == BLAMED:
            time.sleep(4.0)
            return None, error_of(y.sum().backward)
        first = error_of(y.sum().backward)
        later = error_of(prime_kernels.mega_moe, x, *part[1:5], runtime=runtime)
        runtime.close(abort=True)
        return first, later


def test_a_rank_that_never_calls_backward_is_named_after_the_time_out_and_the_runtime_stays_refused() -> None:
    (first, later), (_, late) = run_ranks(2, fail_in_backward)
    assert isinstance(first[0], PeerTimeout)
    assert first[0].facts["peers"] == [BLAMED]
    assert first[0].facts["phase"] == "backward"
    assert 1.9 < first[1] < 4.0
    assert isinstance(later[0], PeerTimeout | PeerAborted)
    assert later[1] < 1.0
    assert isinstance(late[0], PeerAborted), "who comes late learns that the others gave up"


def use_a_new_runtime_after_a_time_out(rank: int, world: int) -> Any:
    batch = make_batch(world)
    part = own_part(batch, [TOKENS] * world, rank)
    runtime = open_runtime(batch, "reference", peer_timeout_s=1.5)
    if rank == BLAMED:
        time.sleep(2.5)
    error, _ = error_of(run_layer, part, runtime)
    runtime.close(abort=True)
    with open_runtime(batch, "reference") as again:
        return error, run_layer(part, again)


def test_a_new_runtime_works_after_a_time_out() -> None:
    reports = run_ranks(2, use_a_new_runtime_after_a_time_out)
    assert isinstance(reports[0][0], PeerTimeout)
    assert isinstance(reports[1][0], PeerAborted)
    check_results(join([results for _, results in reports]), dense(make_batch(2)), BOUNDS[torch.float32])


def differ_in_config(rank: int, world: int) -> Any:
    batch = make_batch(world)
    return error_of(open_runtime, batch, "reference", intermediate=64 if rank == 0 else 128)[0]


def test_ranks_with_different_configs_are_told_the_field() -> None:
    for error in run_ranks(2, differ_in_config):
        assert isinstance(error, ConfigMismatch)
        assert "intermediate" in str(error)


def split_into_pairs(rank: int, world: int) -> Any:
    """Groups [0, 2] and [3, 1]; the layer is the first use of either."""
    import torch.distributed as dist

    import prime_kernels

    pairs = [[0, 2], [3, 1]]
    groups = [dist.new_group(pair, backend="gloo") for pair in pairs]
    mine = 0 if rank in pairs[0] else 1
    batch = make_batch(2) if mine == 0 else pair_batch()
    config = make_config(batch, "grouped")
    place = dist.get_rank(groups[mine])
    with prime_kernels.MegaMoERuntime.create(config, group=groups[mine], device="cpu") as runtime:
        return mine, place, run_layer(own_part(batch, [TOKENS] * 2, place), runtime)


def pair_batch() -> Inputs:
    ids = torch.randint(-1, EXPERTS, (TOKENS * 2, TOPK), generator=torch.Generator().manual_seed(6))
    return make_inputs(ids, num_experts=EXPERTS, hidden=64, intermediate=64, dtype=torch.float32, seed=9)


def test_two_groups_in_one_world_are_independent_whatever_the_order_of_their_ranks() -> None:
    reports = run_ranks(4, split_into_pairs)
    for mine, batch in enumerate((make_batch(2), pair_batch())):
        parts = sorted(
            ((place, results) for group, place, results in reports if group == mine), key=lambda part: part[0]
        )
        check_results(join([results for _, results in parts]), dense(batch), BOUNDS[torch.float32], mine)
