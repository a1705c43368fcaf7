# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism among virtual ranks of one GPU, as bench.py times it (`--virtual-ranks R --pacing g`).

Every rank has tokens/R of the batch and its share of the experts, SMs and arena. With a pace, transport takes the time
that a link of that rate would; a run counts only if the transport of a forward alone takes what its bytes say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import numerics, timing

# What differs from the layer as it comes. "chained": both GEMMs of the forward in one launch, its numerics checked.
# "only-moves": that launch without its products, which is what transport alone takes; its results are none.
ABLATIONS: dict[str | None, dict[str, bool]] = {
    None: {},
    "chained": {"chained": True},
    "only-moves": {"chained": True, "only_moves": True},
}
HOST_MS_PER_RANK = 1.5  # launching a call of one rank, on a slow host
MAX_PACE_ERROR = 0.05


def ablation_problem(args: Any) -> str | None:
    """Why bench.py has no such run; None when it has."""
    if args.ablation and not args.virtual_ranks:
        return "--ablation is of launches among peers; give --virtual-ranks"
    if args.ablation == "only-moves" and args.ops != ["forward"]:
        return "--ablation only-moves is of the forward alone"
    return None


@contextmanager
def ablated(name: str | None) -> Iterator[None]:
    """Launches that are prepared inside are those of this ablation."""
    from prime_kernels.moe.cuda_peer_launch import PeerRecorder

    before = {flag: getattr(PeerRecorder, flag) for flag in ("chained", "only_moves")}
    for flag in before:
        setattr(PeerRecorder, flag, ABLATIONS[name].get(flag, False))
    try:
        yield
    finally:
        for flag, value in before.items():
            setattr(PeerRecorder, flag, value)


@dataclass(frozen=True)
class Share:
    """What one rank has of a batch; all but ids and dy are leaves."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    dy: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.topk_weights, self.w_gate_up, self.w_down


class VirtualRanks:
    """The layer of a config among R virtual ranks.

    Args:
        config: `max_tokens_per_rank` is a rank's.
        ranks: R.
        pacing_gb_s: GB/s of every rank's link in and out; None: unpaced.
        device: The GPU.
    """

    def __init__(self, config: Any, *, ranks: int, pacing_gb_s: float | None, device: torch.device) -> None:
        from prime_kernels.peers.loopback import create_runtimes

        self.runtimes = create_runtimes(config, ranks=ranks, device=device, pacing_gb_s=pacing_gb_s)
        self.pacing_gb_s, self.hidden = pacing_gb_s, config.hidden
        self.backlog_ms = 1.0 + HOST_MS_PER_RANK * ranks
        self._weights: list[tuple[Tensor, Tensor]] = []

    def shares(self, batch: numerics.Batch) -> list[Share]:
        """The batch cut into ranks. Weights are cut once: batches share them."""
        ranks = len(self.runtimes)
        if not self._weights:
            pairs = zip(batch.w_gate_up.chunk(ranks), batch.w_down.chunk(ranks), strict=True)
            self._weights = [(g.detach().requires_grad_(), d.detach().requires_grad_()) for g, d in pairs]
        parts = [t.detach().chunk(ranks) for t in (batch.x, batch.topk_ids, batch.topk_weights, batch.dy)]
        return [
            Share(x.requires_grad_(), ids, scores.requires_grad_(), *weights, dy)
            for x, ids, scores, dy, weights in zip(*parts, self._weights, strict=True)
        ]

    def forward(self, shares: list[Share]) -> list[Tensor]:
        """y of every rank: all begin with the current stream, which goes on when all have ended."""
        import prime_kernels

        ys = []
        with self._together():
            for runtime, own in zip(self.runtimes, shares, strict=True):
                with torch.cuda.stream(runtime.stream):
                    y = prime_kernels.mega_moe(
                        own.x, own.topk_ids, own.topk_weights, own.w_gate_up, own.w_down, runtime=runtime
                    )
                    assert isinstance(y, Tensor)
                    ys.append(y)
        return ys

    def backward(self, ys: list[Tensor], shares: list[Share]) -> tuple[Tensor, ...]:
        """Gradients of all leaves of all ranks."""
        leaves = [leaf for own in shares for leaf in own.leaves]
        with self._together():
            return torch.autograd.grad(ys, leaves, [own.dy for own in shares])

    @contextmanager
    def _together(self) -> Iterator[None]:
        here = torch.cuda.current_stream()
        begin = here.record_event()
        for runtime in self.runtimes:
            assert runtime.stream is not None
            runtime.stream.wait_event(begin)
        yield
        for runtime in self.runtimes:
            assert runtime.stream is not None
            here.wait_event(runtime.stream.record_event())

    def check(self, batch: numerics.Batch) -> numerics.Verdict:
        """Numerics of a forward and a backward on poisoned memory."""
        shares = self.shares(batch)
        for runtime in self.runtimes:
            assert runtime.peers is not None
            runtime.peers.arena[runtime.peers.layout.counts :].fill_(255)
            with torch.cuda.stream(runtime.stream):
                torch.full((runtime.plan.workspace_bytes,), 255, dtype=torch.uint8, device=batch.x.device)
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        ys = self.forward(shares)
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        grads = self.backward(ys, shares)
        torch.cuda.synchronize()
        self.settle()
        dx, dscores, dw_gate_up, dw_down = (torch.cat(grads[i::4]) for i in range(4))
        outputs = numerics.Outputs(torch.cat([y.detach() for y in ys]), dx, dscores, dw_gate_up, dw_down)
        with torch.no_grad():
            return numerics.check_layer(batch, outputs)

    def settle(self) -> None:
        """Raise what a kernel of any rank reported."""
        for runtime in self.runtimes:
            runtime.check()

    def variant(self, name: str, op: str, batches: list[numerics.Batch]) -> timing.Variant:
        """What bench.py times of one op."""

        def shares(index: int) -> list[Share]:
            return self.shares(batches[index % len(batches)])

        def both(own: list[Share]) -> tuple[Tensor, ...]:
            return self.backward(self.forward(own), own)

        if op == "forward":
            return timing.Variant(name, shares, self.forward, self.backlog_ms)
        if op == "backward":

            def prepare(index: int) -> tuple[list[Tensor], list[Share]]:
                own = shares(index)
                torch.cuda._sleep(int(self.backlog_ms * 2e6))
                return self.forward(own), own

            return timing.Variant(name, prepare, lambda ready: self.backward(*ready), self.backlog_ms)
        return timing.Variant(name, shares, both, 2 * self.backlog_ms)

    def remote_bytes(self, batch: numerics.Batch) -> int:
        """Bytes through the busier end of the busiest rank's link in a forward: tokens once a rank, results each."""
        ranks, rows = len(self.runtimes), self.hidden * 2
        local = self.runtimes[0].num_local_experts
        moved = torch.zeros(ranks, ranks, dtype=torch.int64)  # [from, to]
        for owner, ids in enumerate(batch.topk_ids.chunk(ranks)):
            holder = torch.where(ids >= 0, ids // local, -1)
            for rank in range(ranks):
                if rank != owner:
                    here = holder == rank
                    moved[owner, rank] += int(here.any(1).sum())
                    moved[rank, owner] += int(here.sum())
        return int(max(moved.sum(0).max(), moved.sum(1).max())) * rows

    def pace_problem(self, batch: numerics.Batch) -> str | None:
        """Why the pace of this process cannot be trusted: what transport alone takes against what its bytes say."""
        if not self.pacing_gb_s:
            return None
        wanted_ms = self.remote_bytes(batch) / self.pacing_gb_s / 1e6
        try:
            with ablated("only-moves"):
                rows = timing.kernel_times(self.fresh_calls().transport(batch), batch.x.device)
        finally:
            self.fresh_calls()
        took_ms = sum(us / count for name, us, count in rows if name == "pk_forward") / 1e3
        if abs(took_ms / wanted_ms - 1) <= MAX_PACE_ERROR:
            return None
        return f"transport alone took {took_ms:.3f} ms; its bytes at {self.pacing_gb_s} GB/s take {wanted_ms:.3f} ms"

    def transport(self, batch: numerics.Batch) -> timing.Variant:
        """A forward behind a pause in which the host launches all of it."""

        def timed(own: list[Share]) -> list[Tensor]:
            torch.cuda._sleep(int(self.backlog_ms * 2e6))
            return self.forward(own)

        return timing.Variant("transport", lambda index: self.shares(batch), timed)

    def fresh_calls(self) -> VirtualRanks:
        """Forget launches that were prepared, so that ablations take effect."""
        for runtime in self.runtimes:
            runtime.implementation._calls.pop(runtime, None)
        return self

    def close(self) -> None:
        for runtime in self.runtimes:
            runtime.close()
