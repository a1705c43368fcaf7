# SPDX-License-Identifier: Apache-2.0
"""The forward among virtual ranks of one GPU: against a float64 oracle, and bit for bit against one rank."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from torch import Tensor

import prime_kernels
from prime_kernels.errors import PeerTimeout, ShapeError
from prime_kernels.moe.backend import ForwardResult
from prime_kernels.moe.cuda_peer_launch import PeerRecorder
from tests.gpu.helpers import runtime_for
from tests.gpu.peers import NAN_BYTE, World, check_y, joined, make_case, oracle, routes, same_bits
from tests.helpers.cases import Case
from tests.helpers.child import own_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

own_gpu_process = own_process(150, CUDA_DEVICE_MAX_CONNECTIONS="32")

# Tokens per rank: none, one, and around the boundaries of 64 and 128 rows.
COUNTS = {
    1: [700],
    2: [513, 130],
    4: [300, 0, 129, 641],
    8: [257, 0, 1, 64, 500, 127, 0, 333],
}
EXPERTS, TOPK = 16, 4


def case_of(kind: str, tokens: int, *, hidden: int = 704, intermediate: int = 320, seed: int = 0) -> Case:
    ids = routes(kind, tokens, experts=EXPERTS, topk=TOPK, seed=seed)
    return make_case(ids, hidden=hidden, intermediate=intermediate, experts=EXPERTS, seed=seed)


def check_counts(world: World, case: Case, counts: list[int], results: list[ForwardResult]) -> None:
    """What every rank sent to every expert, and every expert got."""
    sent = []
    for rank, result in enumerate(results):
        ids = world.tokens(case, rank, counts)[1]
        sent.append(torch.bincount(ids[ids >= 0], minlength=EXPERTS).int())
        assert torch.equal(result.tokens_per_expert, sent[-1])
    received = torch.cat([result.recv_per_local_expert for result in results])
    assert torch.equal(received, torch.stack(sent).sum(0, dtype=torch.int32))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@own_gpu_process
def test_uneven_tokens_and_skewed_routes_agree_with_the_oracle(ranks: int) -> None:
    counts = COUNTS[ranks]
    for hidden, intermediate in ((512, 256), (2880, 704), (1408, 2880), (704, 1408), (64, 64)):
        for seed, kind in enumerate(("uniform", "skewed", "one")):
            case = case_of(kind, sum(counts), hidden=hidden, intermediate=intermediate, seed=seed)
            world, want = World(case, counts), oracle(case)
            for turn in (counts, counts[::-1]):
                results = world.forward(counts=turn)
                check_y(joined(results), want, case.topk_ids)
                check_counts(world, case, turn, results)
            world.close()


@own_gpu_process
def test_other_activations_agree_with_the_oracle() -> None:
    case = case_of("skewed", sum(COUNTS[2]), seed=4)
    for clamp, alpha, up_offset in ((7.0, 1.702, 1.0), (1.5, 1.0, 0.0)):
        activation = prime_kernels.SwiGLU(clamp=clamp, alpha=alpha, up_offset=up_offset)
        y = joined(World(case, COUNTS[2], activation=activation).forward())
        check_y(y, oracle(case, clamp=clamp, alpha=alpha, up_offset=up_offset), case.topk_ids)


def one_rank(case: Case, save: str = "inputs") -> tuple[Tensor, Tensor, Tensor | None]:
    """y, pool row of every slot and what is kept, of the launches of a rank that has no peers."""
    with runtime_for(case) as runtime:
        tensors = (case.x, case.topk_ids, case.topk_weights, case.w_gate_up, case.w_down)
        result = runtime.implementation.forward(runtime, *tensors, save=save)
        runtime.synchronize()
    at = 2 * EXPERTS + 1
    return result.y, result.plan[at : at + case.topk_ids.numel()], result.preact


@own_gpu_process
def test_bits_depend_neither_on_the_number_of_ranks_nor_on_their_share_of_tokens_or_sms() -> None:
    case = case_of("skewed", 1100, hidden=704, intermediate=1408, seed=5)
    want, _, _ = one_rank(case)
    check_y(want, oracle(case), case.topk_ids)
    splits = ([1100], [600, 500], [0, 1100], [300, 200, 1, 599], [137] * 7 + [141])
    for counts in splits:
        world = World(case, counts)
        for change in ({}, {"save": "preact"}, {"save": "full"}, {"pair": True}):
            assert same_bits(joined(world.forward(**change)), want), (counts, change)
        narrow = case.change(topk_ids=case.topk_ids.int())
        assert same_bits(joined(world.forward(narrow)), want), (counts, "int32")
        world.close()
    for num_sms in (2, 9, 40):
        assert same_bits(joined(World(case, [600, 500], num_sms=num_sms).forward()), want), num_sms
    for pace in (20.0, 200.0):
        assert same_bits(joined(World(case, [600, 500], pacing_gb_s=pace).forward()), want), pace


def kept_places(counts: list[int], results: list[ForwardResult]) -> Tensor:
    """Of every slot of all ranks: owner << 28 | pool row there, -1 without an expert."""
    head = 2 * (EXPERTS // len(counts)) + 1
    return torch.cat([r.plan[head : head + n * TOPK] for r, n in zip(results, counts, strict=True)])


@own_gpu_process
def test_what_is_kept_for_the_backward_are_the_rows_that_one_rank_keeps() -> None:
    for counts in COUNTS.values():
        case, ranks = case_of("skewed", sum(counts), seed=6), len(counts)
        _, rows, kept = one_rank(case, "preact")
        assert kept is not None
        named, z_width, world = rows >= 0, kept.shape[1], World(case, counts)
        token = torch.arange(len(rows), device="cuda")[named] // TOPK
        for save in ("preact", "full"):
            results = world.forward(save=save)
            places = kept_places(counts, results)
            assert torch.equal(places >= 0, named)
            owner, row = places[named] >> 28, (places[named] & (1 << 28) - 1).long()
            assert torch.equal(owner, (case.topk_ids.flatten()[named] // (EXPERTS // ranks)).int())
            for rank, result in enumerate(results):
                mine, preact = owner == rank, result.preact
                assert preact is not None
                z, x_rows = preact.view(-1).split([len(preact) * z_width, preact.numel() - len(preact) * z_width])
                assert same_bits(z.view(-1, z_width)[row[mine]], kept[rows[named][mine].long()]), (ranks, rank)
                assert len(row[mine].unique()) == int(mine.sum()) == int(result.recv_per_local_expert.sum())
                if save == "full":
                    assert same_bits(x_rows.view(len(preact), -1)[row[mine]], case.x[token[mine]]), (ranks, rank)
        world.close()


def keep_calling(world: World, cases: list[tuple[Case, list[int]]], calls: int, seed: int) -> None:
    """`calls` forwards back to back with random delays, ranks in random order, all bits compared with a first pass."""
    rng, ranks = random.Random(seed), range(len(world.runtimes))
    world.reserve(1536)
    first = [[result.y.clone() for result in world.forward(case, counts=counts)] for case, counts in cases]
    for (case, _), ys in zip(cases, first, strict=True):
        check_y(torch.cat(ys), oracle(case), case.topk_ids)
    wrong = [torch.zeros((), dtype=torch.bool, device="cuda") for _ in ranks]
    tokens = [[world.tokens(case, rank, counts) for rank in ranks] for case, counts in cases]
    results = [r.peers.arena[r.peers.layout.results : r.peers.layout.dscore] for r in world.runtimes if r.peers]
    # Every kernel of torch that the loop uses is loaded before a rank may be waiting for another.
    for ys in first:
        for y, flag, region in zip(ys, wrong, results, strict=True):
            region.fill_(NAN_BYTE)
            flag.logical_or_((y.view(torch.int16) != y.view(torch.int16)).any())
    torch.cuda._sleep(10)
    torch.cuda.synchronize()
    in_flight: deque[list[torch.cuda.Event]] = deque()
    for _ in range(calls):
        which, events = rng.randrange(len(cases)), []
        for rank in rng.sample(ranks, len(ranks)):
            with torch.cuda.stream(world.runtimes[rank].stream):
                if rng.random() < 0.4:
                    torch.cuda._sleep(rng.randrange(1, 300_000))
                results[rank].fill_(NAN_BYTE)
                y = world.call(rank, tokens[which][rank]).y
                different = (y.view(torch.int16) != first[which][rank].view(torch.int16)).any()
                wrong[rank].logical_or_(different)
                events.append(torch.cuda.Event())
                events[-1].record()
        in_flight.append(events)
        if len(in_flight) > 40:  # all ranks' launches of that call are made, so waiting for it is safe
            for event in in_flight.popleft():
                event.synchronize()
    world.settle()
    assert not any(bool(flag) for flag in wrong), [bool(flag) for flag in wrong]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@own_gpu_process
def test_bits_repeat_over_200_calls_whoever_comes_late(ranks: int) -> None:
    case = case_of("skewed", sum(COUNTS[ranks]), seed=7)
    keep_calling(World(case, COUNTS[ranks]), [(case, COUNTS[ranks])], calls=200, seed=ranks)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
@own_gpu_process
def test_a_thousand_calls_of_changing_routes_give_the_bits_of_their_first_pass(seed: int) -> None:
    rng, cases = random.Random(seed), []
    base = case_of("uniform", 8, hidden=512, intermediate=256, seed=seed)
    for index in range(16):
        counts = [rng.choice([0, 1, 64, 100, 1000, 2048, rng.randrange(2049)]) for _ in range(2)]
        counts[rng.randrange(2)] += sum(counts) == 0
        kind = rng.choice(["uniform", "skewed", "skewed", "one"])
        case = case_of(kind, sum(counts), hidden=512, intermediate=256, seed=100 * seed + index)
        cases.append((case.change(w_gate=base.w_gate, w_up=base.w_up, w_down=base.w_down), counts))
    keep_calling(World(base, [4, 4], max_tokens_per_rank=2048), cases, calls=1000, seed=seed)


@own_gpu_process
def test_a_rank_that_does_not_come_is_named_and_new_runtimes_work() -> None:
    case = case_of("uniform", 200, seed=8)
    world = World(case, [100, 100], peer_timeout_s=0.5)
    world.forward()
    late = world.runtimes[0]
    with torch.cuda.stream(late.stream):
        world.call(0, world.tokens(case, 0))
    torch.cuda.synchronize()
    text = r"ep_rank 0 waited 0\.5 s in phase plan for ep_rank 1: for a peer's counts"
    with pytest.raises(PeerTimeout, match=text) as info:
        late.check()
    assert info.value.facts["peers"] == [1]
    with pytest.raises(PeerTimeout), torch.cuda.stream(late.stream):
        world.call(0, world.tokens(case, 0))
    for runtime in world.runtimes:
        runtime.close(abort=True)
    check_y(joined(World(case, [100, 100]).forward()), oracle(case), case.topk_ids)


@own_gpu_process
def test_ids_that_name_no_expert_are_skipped() -> None:
    case = case_of("skewed", 300, seed=9)
    bad = case.topk_ids.clone()
    bad[3, 0], bad[200, 1], bad[201, 2] = EXPERTS, -7, 2**31 - 1
    masked = torch.where((bad < 0) | (bad >= EXPERTS), -1, bad)
    world = World(case, [150, 150])
    want = joined(world.forward(case.change(topk_ids=masked)))
    with pytest.raises(ShapeError, match="1 ids outside"):
        world.forward(case.change(topk_ids=bad))
    with pytest.raises(ShapeError, match="2 ids outside"):
        world.runtimes[1].check()
    world.settle()
    ys = []
    for rank, runtime in enumerate(world.runtimes):
        x, ids, scores = world.tokens(case.change(topk_ids=masked), rank)
        with torch.cuda.stream(runtime.stream):
            ys.append(prime_kernels.mega_moe(x.requires_grad_(), ids, scores, *world.weights[rank], runtime=runtime))
    world.settle()
    assert same_bits(torch.cat([y.detach() for y in ys]), want)


@own_gpu_process
def test_only_four_kernels_run_between_call_and_return() -> None:
    case = case_of("uniform", 256, seed=10)
    world = World(case, [256])
    world.forward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        with torch.cuda.stream(world.runtimes[0].stream):
            world.call(0, world.tokens(case, 0))
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(names) == ["pk_combine", "pk_down_peers", "pk_gate_up_peers", "pk_plan_peers"]


@own_gpu_process
def test_both_gemms_in_one_launch_give_the_same_bits() -> None:
    case = case_of("skewed", 1000, seed=11)
    for counts in ([1000], [300, 700], [250, 250, 500, 0]):
        world = World(case, counts)
        apart = joined(world.forward())
        world.close()
        PeerRecorder.chained = True
        world = World(case, counts)
        assert same_bits(joined(world.forward()), apart)
        world.close()
        PeerRecorder.chained = False
