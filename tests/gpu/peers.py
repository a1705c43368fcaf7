# SPDX-License-Identifier: Apache-2.0
"""A layer among virtual ranks of one GPU: its inputs, its calls, and an oracle of its forward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import prime_kernels
from prime_kernels.moe.backend import ForwardResult
from prime_kernels.peers.loopback import create_runtimes
from tests.gpu.helpers import BOUND, poison_allocator, worst_row_block
from tests.helpers.cases import Case, relative_error

GATE_CYCLES = 40_000_000  # some 20 ms: all ranks are launched before any begins
NAN_BYTE = 255


def make_case(ids: Tensor, *, hidden: int, intermediate: int, experts: int, seed: int) -> Case:
    """Inputs for these routes, made on the GPU. Scores of either sign, zero among them."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device="cuda") * std).bfloat16()

    ids = ids.cuda()
    scores = torch.rand(ids.shape, generator=g, device="cuda") + 0.1
    scores[::7, :1] *= -1
    scores[5::11, :1] = 0
    return Case(
        x=normal(len(ids), hidden),
        topk_ids=ids,
        topk_weights=scores,
        w_gate=normal(experts, intermediate, hidden, std=hidden**-0.5),
        w_up=normal(experts, intermediate, hidden, std=hidden**-0.5),
        w_down=normal(experts, hidden, intermediate, std=intermediate**-0.5),
        dy=normal(0, hidden),
    )


def routes(kind: str, tokens: int, *, experts: int, topk: int, seed: int) -> Tensor:
    """[tokens, topk] ids.

    "uniform": distinct experts. "skewed": most to the first two, with repeated experts and slots without any, some
    tokens without any at all. "one": all to one expert.
    """
    g = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, experts, generator=g).topk(topk, dim=1).indices
    if kind == "uniform":
        return uniform
    if kind == "one":
        return torch.full((tokens, topk), seed % experts)
    ids = torch.where(torch.rand(tokens, topk, generator=g) < 0.6, uniform % 2, uniform)
    ids[torch.rand(tokens, topk, generator=g) < 0.1] = -1
    ids[torch.rand(tokens, generator=g) < 0.05] = -1
    return ids


def oracle(case: Case, *, clamp: float = math.inf, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """y in float64, expert by expert and slot by slot."""
    y = torch.zeros(case.x.shape, dtype=torch.float64, device=case.x.device)
    for e in range(case.w_gate.shape[0]):
        for k in range(case.topk_ids.shape[1]):
            tokens = (case.topk_ids[:, k] == e).nonzero()[:, 0]
            x = case.x[tokens].double()
            gate, up = (x @ w[e].double().T for w in (case.w_gate, case.w_up))
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            h = gate * torch.sigmoid(alpha * gate) * (up + up_offset)
            y[tokens] += case.topk_weights[tokens, k, None].double() * (h @ case.w_down[e].double().T)
    return y


def check_y(y: Tensor, want: Tensor, ids: Tensor) -> None:
    """The whole, every block of 128 rows, every 16 columns, every expert's tokens; tokens without experts exactly 0."""
    assert y.shape == want.shape
    assert want.numel() == 0 or float(want.norm()) > 0, "the oracle is zero: this case tests nothing"
    errors = {"all": relative_error(y, want), "rows": worst_row_block(y, want)}
    errors["columns"] = max(relative_error(a, b) for a, b in zip(y.split(16, -1), want.split(16, -1), strict=True))
    for e in range(int(ids.max()) + 1 if ids.numel() else 0):
        rows = (ids == e).any(1)
        errors[f"expert {e}"] = relative_error(y[rows], want[rows])
    worst = {name: f"{error:.3g}" for name, error in errors.items() if not error <= BOUND}
    assert not worst, worst
    assert not y[(ids < 0).all(1)].any()


class World:
    """Virtual ranks with a layer among them. Rank r has `counts[r]` tokens of a case, in rank order, and its experts.

    Args:
        case: Gives the sizes and the weights.
        counts: Tokens of every rank.
        pacing_gb_s: As for `create_runtimes`.
        config: Fields of the config beside the sizes.
    """

    def __init__(self, case: Case, counts: list[int], *, pacing_gb_s: float | None = None, **config: Any) -> None:
        experts, intermediate, hidden = case.w_gate.shape
        self.case, self.counts = case, counts
        options: dict[str, Any] = {"max_tokens_per_rank": max(1, *counts), "peer_timeout_s": 10.0} | config
        self.config = prime_kernels.MegaMoEConfig(
            num_experts=experts,
            topk=case.topk_ids.shape[1],
            hidden=hidden,
            intermediate=intermediate,
            backend="cuda",
            **options,
        )
        self.runtimes = create_runtimes(self.config, ranks=len(counts), pacing_gb_s=pacing_gb_s)
        packed, local = case.w_gate_up, experts // len(counts)
        self.weights = list(zip(packed.split(local), case.w_down.split(local), strict=True))

    def tokens(self, case: Case, rank: int, counts: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x, ids and scores of a rank."""
        split = [t.split(counts or self.counts) for t in (case.x, case.topk_ids, case.topk_weights)]
        return split[0][rank], split[1][rank], split[2][rank]

    def call(self, rank: int, tokens: tuple[Tensor, ...], *, save: str = "inputs", pair: bool = False) -> ForwardResult:
        """Launch one forward on the rank's stream, which is the current one."""
        runtime, (packed, down) = self.runtimes[rank], self.weights[rank]
        gate_up: Any = tuple(t.contiguous() for t in packed.chunk(2, 1)) if pair else packed
        backend = runtime.implementation
        result: ForwardResult = runtime.run(
            "forward", lambda: backend.forward(runtime, *tokens, gate_up, down, save=save)
        )
        return result

    def poison(self) -> None:
        """NaN, or -1, wherever a call writes before it reads: arenas, results, temporaries."""
        for runtime in self.runtimes:
            assert runtime.peers is not None
            runtime.peers.arena[runtime.peers.layout.counts :].fill_(NAN_BYTE)
            plan = runtime.plan
            with torch.cuda.stream(runtime.stream):
                torch.full(
                    (plan.workspace_bytes + plan.saved_bytes_per_layer,), NAN_BYTE, dtype=torch.uint8, device="cuda"
                )
                poison_allocator(16)
        torch.cuda.synchronize()

    def forward(
        self,
        case: Case | None = None,
        *,
        counts: list[int] | None = None,
        save: str = "inputs",
        pair: bool = False,
    ) -> list[ForwardResult]:
        """One forward of all ranks, from dirty memory, that begins on all of them at once."""
        case = case or self.case
        self.poison()
        gate = torch.cuda.Event()
        torch.cuda._sleep(GATE_CYCLES)
        gate.record()
        results = []
        for rank, runtime in enumerate(self.runtimes):
            with torch.cuda.stream(runtime.stream):
                gate.wait()
                results.append(self.call(rank, self.tokens(case, rank, counts), save=save, pair=pair))
        self.settle()
        return results

    def settle(self) -> None:
        """Wait for all ranks; raise what a kernel of any of them reported."""
        torch.cuda.synchronize()
        for runtime in self.runtimes:
            runtime.check()

    def reserve(self, mib: int) -> None:
        """Fill the allocator's caches of all ranks, so that calls of changing sizes need not ask the driver."""
        for runtime in self.runtimes:
            with torch.cuda.stream(runtime.stream):
                held = [torch.empty(mib << 20, dtype=torch.uint8, device="cuda")]
                held += [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(64)]
                del held
        torch.cuda.synchronize()

    def close(self) -> None:
        for runtime in self.runtimes:
            runtime.close()


def joined(results: list[ForwardResult]) -> Tensor:
    """y of all ranks, in rank order."""
    return torch.cat([result.y for result in results])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))
