# SPDX-License-Identifier: Apache-2.0
"""Training over ranks: optimizers, microbatches in flight, checkpointing, sharded parameters, ranks without rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.oracle import relative_error
from tests.helpers.procs import run_ranks

pytestmark = pytest.mark.dist

EXPERTS, TOPK, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 64, 64, 12


def open_runtime(group: Any, **changes: Any) -> Any:
    import prime_kernels

    sizes = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    options = {"max_tokens_per_rank": 64, "backend": "grouped", "peer_timeout_s": 30.0, **changes}
    config = prime_kernels.MegaMoEConfig(**{**sizes, **options})
    return prime_kernels.MegaMoERuntime.create(config, group=group, device="cpu")


class Layer(nn.Module):
    """A router that is the same on all ranks, and this rank's experts."""

    def __init__(self, runtime: Any, first_expert_only: int | None = None) -> None:
        import prime_kernels

        super().__init__()
        self.limit = first_expert_only
        self.router = nn.Linear(HIDDEN, runtime.config.num_experts, bias=False)
        self.experts = prime_kernels.MegaMoEExperts(runtime.config, ep_size=runtime.ep_size, dtype=torch.float32)
        self.experts.bind(runtime)
        gen = torch.Generator().manual_seed(11)
        local, rank = runtime.num_local_experts, runtime.ep_rank
        with torch.no_grad():
            self.router.weight.copy_(torch.randn(self.router.weight.shape, generator=gen) * HIDDEN**-0.5)
            for weight in (self.experts.w_gate_up, self.experts.w_down):
                whole = torch.randn(runtime.config.num_experts, *weight.shape[1:], generator=gen)
                weight.copy_(whole[rank * local : (rank + 1) * local] * weight.shape[2] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, ids = scores[:, : self.limit].topk(TOPK)
        return x + self.experts(x, ids, weights)


def tokens_of(rank: int, step: int, count: int = TOKENS) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))


def sum_router_grads(layer: Layer) -> None:
    import torch.distributed as dist

    dist.all_reduce(layer.router.weight.grad)


def state_of(layer: Layer) -> list[Tensor]:
    return [layer.router.weight.detach(), layer.experts.w_gate_up.detach(), layer.experts.w_down.detach()]


def train_with_starving_ranks(rank: int, world: int) -> Any:
    """Three AdamW steps; experts of all ranks but the first never get a row."""
    import torch.distributed as dist

    with open_runtime(dist.group.WORLD) as runtime:
        layer = Layer(runtime, first_expert_only=EXPERTS // world if EXPERTS // world >= TOPK else TOPK)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad()
            y = layer(tokens_of(rank, step))
            assert y.grad_fn is not None
            y.square().sum().backward()
            sum_router_grads(layer)
            if rank * (EXPERTS // world) >= TOPK:
                for weight in (layer.experts.w_gate_up, layer.experts.w_down):
                    assert weight.grad is not None
                    assert not weight.grad.any(), "a rank without rows has gradients of exactly 0"
            optimizer.step()
        steps = [float(optimizer.state[p]["step"]) for p in layer.parameters()]
        sharded = state_of(layer)
    alone = None
    if rank == 0:
        with open_runtime(None) as runtime:
            layer = Layer(runtime, first_expert_only=TOPK)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02, weight_decay=0.1)
            for step in range(3):
                optimizer.zero_grad()
                layer(torch.cat([tokens_of(r, step) for r in range(world)])).square().sum().backward()
                optimizer.step()
            alone = state_of(layer)
    return steps, sharded, alone


@pytest.mark.parametrize("world", [2, 4])
def test_three_optimizer_steps_with_starving_ranks_equal_training_on_one_rank(world: int) -> None:
    reports = run_ranks(world, train_with_starving_ranks)
    assert all(steps == [3.0] * 3 for steps, _, _ in reports)
    router, w_gate_up, w_down = reports[0][2]
    for _, sharded, _ in reports:
        assert relative_error(sharded[0], router) < 1e-5
    for index, whole in ((1, w_gate_up), (2, w_down)):
        # Adam divides by the gradient's own size: rounding in the router's all-reduce shows up amplified.
        assert relative_error(torch.cat([sharded[index] for _, sharded, _ in reports]), whole) < 1e-4


def run_microbatches(rank: int, world: int) -> Any:
    """Three forwards of different T in flight, backward in another order, against one at a time."""
    import torch.distributed as dist

    counts = [TOKENS, 0 if rank else 5, 3 + rank]
    with open_runtime(dist.group.WORLD) as runtime:
        layer = Layer(runtime)
        grads = []
        for order in ([2, 0, 1], None):
            layer.zero_grad()
            losses = {}
            for batch, count in enumerate(counts):
                losses[batch] = layer(tokens_of(rank, batch, count)).square().sum()
                if order is None:
                    losses[batch].backward()
            for batch in order or []:
                losses[batch].backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
    return grads


def test_microbatches_in_flight_do_not_disturb_each_other() -> None:
    for together, apart in run_ranks(2, run_microbatches):
        for one, other in zip(together, apart, strict=True):
            assert relative_error(one, other) < 1e-6  # the order of accumulation differs, nothing else


def run_checkpointed(rank: int, world: int, backend: str) -> Any:
    import torch.distributed as dist
    from torch.utils.checkpoint import checkpoint

    with open_runtime(dist.group.WORLD, backend=backend) as runtime:
        layer = Layer(runtime, first_expert_only=2)  # rank 1 starves
        grads = []
        for mode in (None, False, True):
            layer.zero_grad()
            x = tokens_of(rank, 0, 0 if rank else TOKENS).requires_grad_()
            y = layer(x) if mode is None else checkpoint(layer, x, use_reentrant=mode)
            y.square().sum().backward()
            grads.append([x.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
        launches = runtime.stats()
    return grads, launches.forwards, launches.backwards


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_checkpointing_changes_no_bit_even_with_a_starving_rank(backend: str) -> None:
    for (plain, nonreentrant, reentrant), forwards, backwards in run_ranks(2, run_checkpointed, backend):
        for expected, one, other in zip(plain, nonreentrant, reentrant, strict=True):
            assert torch.equal(expected, one)
            assert torch.equal(expected, other)
        assert (forwards, backwards) == (5, 3)


def train_sharded(rank: int, world: int) -> Any:
    """FSDP2 over 2 data-parallel groups of 2 expert-parallel ranks, against one rank with everything."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with open_runtime(mesh["ep"].get_group()) as runtime:
        layer = Layer(runtime)
        fully_shard(layer.experts, mesh=mesh["dp"])
        layer.experts.set_gradient_divide_factor(1.0)
        layer.experts.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            layer(tokens_of(rank, step)).square().mean().backward()
            sum_router_grads(layer)
            optimizer.step()
        sharded = [weight.full_tensor().detach() for weight in (layer.experts.w_gate_up, layer.experts.w_down)]
        router = layer.router.weight.detach().clone()
    alone = None
    if rank == 0:
        with open_runtime(None, max_tokens_per_rank=64) as runtime:
            layer = Layer(runtime)
            start = state_of(layer)[1].clone()
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
            for step in range(3):
                optimizer.zero_grad()
                losses = layer(torch.cat([tokens_of(r, step) for r in range(world)])).square()
                (losses.mean() * world).backward()
                optimizer.step()
            alone = state_of(layer)
            assert all((alone[1][e] - start[e]).abs().max() > 1e-4 for e in range(EXPERTS)), "every expert learns"
    dist.barrier()
    return runtime.ep_rank, router, sharded, alone


def test_sharded_data_parallel_times_expert_parallel_equals_one_rank() -> None:
    reports = run_ranks(4, train_sharded)
    alone = reports[0][3]
    for ep_rank, router, sharded, _ in reports:
        assert relative_error(router, alone[0]) < 1e-5
        for whole, part in zip(alone[1:], sharded, strict=True):
            local = EXPERTS // 2
            assert relative_error(part, whole[ep_rank * local : (ep_rank + 1) * local]) < 1e-5


def run_sparse_draws(rank: int, world: int) -> int:
    """One token per rank over very many experts: nearly all of them, and now and then a whole rank, get nothing."""
    import torch.distributed as dist

    import prime_kernels

    starved = 0
    with open_runtime(dist.group.WORLD, num_experts=256, topk=3, max_tokens_per_rank=1) as runtime:
        local = runtime.num_local_experts
        w_gate_up = torch.full((local, 2 * INTERMEDIATE, HIDDEN), 0.01).requires_grad_()
        w_down = torch.full((local, HIDDEN, INTERMEDIATE), 0.01).requires_grad_()
        for draw in range(60):
            gen = torch.Generator().manual_seed(draw)
            ids = torch.randint(0, 256, (world, 3), generator=gen)
            x = torch.ones(1, HIDDEN, requires_grad=True)
            y = prime_kernels.mega_moe(x, ids[rank : rank + 1], torch.ones(1, 3), w_gate_up, w_down, runtime=runtime)
            y.sum().backward()
            used = ((ids >= rank * local) & (ids < (rank + 1) * local)).any().item()
            assert w_down.grad is not None
            assert bool(w_down.grad.any()) == used
            starved += not used
            w_down.grad = w_gate_up.grad = None
    return starved


def test_one_token_over_very_many_experts_never_hangs() -> None:
    assert sum(run_ranks(4, run_sparse_draws)) > 0, "some rank got no row in some draw"
