# SPDX-License-Identifier: Apache-2.0
"""Gradients among virtual ranks of one GPU: a float64 oracle, and the bits that one rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prime_kernels
from tests.gpu.helpers import BOUND, run, runtime_for, worst_row_block
from tests.gpu.peers import GATE_CYCLES, World, make_case, routes
from tests.helpers.cases import Case, Result, assert_close, dense_oracle
from tests.helpers.child import own_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

own_gpu_process = own_process(150, CUDA_DEVICE_MAX_CONNECTIONS="32")

COUNTS = {1: [700], 2: [513, 130], 4: [300, 0, 129, 641], 8: [257, 0, 1, 64, 500, 127, 0, 333]}
EXPERTS, TOPK = 16, 4
SAVES = ("preact", "inputs", "full")


def case_of(kind: str, tokens: int, *, hidden: int = 704, intermediate: int = 320, seed: int = 0) -> Case:
    ids = routes(kind, tokens, experts=EXPERTS, topk=TOPK, seed=seed)
    case = make_case(ids, hidden=hidden, intermediate=intermediate, experts=EXPERTS, seed=seed)
    g = torch.Generator(device="cuda").manual_seed(seed + 1000)
    return case.change(dy=torch.randn(tokens, hidden, generator=g, device="cuda").bfloat16())


def gated(world: World) -> None:
    """Let every rank's stream wait until all that follows has been launched."""
    gate = torch.cuda.Event()
    torch.cuda._sleep(GATE_CYCLES)
    gate.record()
    for runtime in world.runtimes:
        assert runtime.stream is not None
        runtime.stream.wait_event(gate)


def train(world: World, case: Case, counts: list[int]) -> Result:
    """y and all gradients of <y, dy> through the public call on every rank, from dirty memory."""
    world.poison()
    leaves: list[tuple[Tensor, ...]] = []
    for rank in range(len(counts)):
        x, ids, scores = world.tokens(case, rank, counts)
        own = (x, scores, *world.weights[rank])
        leaves.append((ids, *(t.detach().clone().requires_grad_() for t in own)))
    torch.cuda.synchronize()
    gated(world)
    ys = []
    for runtime, (ids, x, scores, gate_up, down) in zip(world.runtimes, leaves, strict=True):
        with torch.cuda.stream(runtime.stream):
            ys.append(prime_kernels.mega_moe(x, ids, scores, gate_up, down, runtime=runtime))
    world.settle()
    world.poison()
    dys = list(case.dy.split(counts))
    gated(world)
    wanted = [leaf for own in leaves for leaf in own[1:]]
    grads = torch.autograd.grad(ys, wanted, dys)
    world.settle()
    dx, dscore, dw_gate_up, dw_down = (torch.cat(grads[i::4]) for i in range(4))
    gate, up = dw_gate_up.chunk(2, 1)
    return Result(torch.cat([y.detach() for y in ys]), dx, dscore, gate, up, dw_down)


def bits(result: Result) -> tuple[Tensor, ...]:
    return tuple(t.contiguous().view(torch.uint8) for t in result)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@own_gpu_process
def test_gradients_of_uneven_tokens_and_skewed_routes_agree_with_the_oracle(ranks: int) -> None:
    counts = COUNTS[ranks]
    for turn, (hidden, intermediate) in enumerate(((512, 256), (2880, 704), (704, 1408), (64, 64))):
        for seed, kind in enumerate(("uniform", "skewed")):
            case = case_of(kind, sum(counts), hidden=hidden, intermediate=intermediate, seed=seed)
            world, want = World(case, counts, save=SAVES[(turn + seed) % 3]), dense_oracle(case)
            for order in (counts, counts[::-1], counts):
                result = train(world, case, order)
                assert_close(result, want, BOUND)
                assert worst_row_block(result.dx, want.dx) <= BOUND
            world.close()


@own_gpu_process
def test_bits_of_no_gradient_depend_on_the_number_of_ranks() -> None:
    case = case_of("skewed", 1000, seed=3)
    with runtime_for(case) as runtime:
        alone = bits(run(case, runtime))
    for counts in ([1000], [300, 700], [0, 1000], [250, 250, 500, 0], [125] * 8):
        for save in SAVES:
            options: dict[str, Any] = {"pacing_gb_s": 20.0} if save == "preact" else {}
            world = World(case, counts, save=save, **options)
            got = bits(train(world, case, counts))
            assert all(torch.equal(a, b) for a, b in zip(got, alone, strict=True)), (counts, save)
            world.close()


@pytest.mark.soak
@own_gpu_process
def test_a_thousand_steps_of_changing_routes_give_the_bits_of_their_first_pass() -> None:
    counts = [400, 600]
    cases = [case_of(kind, 1000, seed=seed) for seed in range(4) for kind in ("uniform", "skewed", "one")]
    world = World(cases[0], counts)
    first = []
    for case in cases:
        shared = case.change(w_gate=cases[0].w_gate, w_up=cases[0].w_up, w_down=cases[0].w_down)
        result = train(world, shared, counts)
        assert_close(result, dense_oracle(shared), BOUND)
        first.append((shared, bits(result)))
    g = torch.Generator().manual_seed(0)
    for step in range(1000):
        case, want = first[int(torch.randint(len(first), (), generator=g))]
        late = world.runtimes[step % 2].stream
        with torch.cuda.stream(late):
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=g)))
        result = train(world, case, counts)
        assert all(torch.equal(a, b) for a, b in zip(bits(result), want, strict=True)), step
    world.close()
