# SPDX-License-Identifier: Apache-2.0
"""`prime-kernels bench`: what one layer costs on this machine, against the unfused backend in the same run.

A quick figure for choosing a configuration. The recorded measurements of this project come from benchmarks/bench.py,
which adds clocks, power, rotation of buffers and a digest of the sources.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

import prime_kernels
from prime_kernels.devices import choose_device
from prime_kernels.errors import PrimeKernelsError, UnsupportedConfig

if TYPE_CHECKING:
    import argparse

BackendName = Literal["cuda", "grouped", "reference"]
BASELINE: BackendName = "grouped"
# Largest relative Frobenius distance from the reference backend, of output and gradients, at which a time is printed.
MAX_ERROR = 2e-2
# The reference computes at most this many tokens for the check; rows do not depend on each other.
CHECK_TOKENS = 256
SEED = 0


@dataclass(frozen=True)
class Row:
    """One backend: medians in milliseconds, largest relative error of output and gradients; or why it did not run."""

    backend: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    relative_error: float | None = None
    reason: str | None = None


class _Candidate:
    """A runtime with its inputs; `forward` and `backward` run one pass each."""

    def __init__(self, config: prime_kernels.MegaMoEConfig, inputs: tuple[Tensor, ...], device: torch.device) -> None:
        self.runtime = prime_kernels.MegaMoERuntime.create(config, device=device)
        self.inputs = inputs
        self.leaves = [tensor for tensor in inputs if tensor.requires_grad]
        self.y: Tensor | None = None
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    def call(self, tokens: int | None = None) -> Tensor:
        x, topk_ids, topk_weights, w_gate_up, w_down = self.inputs
        rows = slice(None, tokens)
        y = prime_kernels.mega_moe(x[rows], topk_ids[rows], topk_weights[rows], w_gate_up, w_down, runtime=self.runtime)
        assert isinstance(y, Tensor)  # no statistics were asked for
        return y

    def forward(self) -> None:
        self.y = self.call()

    def backward(self, dy: Tensor) -> None:
        assert self.y is not None
        torch.autograd.grad(self.y, self.leaves, dy)
        self.y = None

    def results(self, dy: Tensor) -> tuple[Tensor, ...]:
        """Output of the first tokens, and all gradients for this dy of theirs."""
        y = self.call(dy.shape[0])
        return y.detach(), *torch.autograd.grad(y, self.leaves, dy)


def _inputs(config: prime_kernels.MegaMoEConfig, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """x, topk_ids, topk_weights, w_gate_up, w_down with unit-scale values and uniform routing."""
    generator = torch.Generator(device=device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        value = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        return value if len(shape) == 2 else value * shape[-1] ** -0.5

    experts, hidden, intermediate = config.num_experts, config.hidden, config.intermediate
    scores = torch.rand(tokens, experts, generator=generator, device=device)
    topk_weights, topk_ids = torch.topk(scores, config.topk, dim=-1)
    floats = (
        normal(tokens, hidden),
        topk_weights / topk_weights.sum(dim=-1, keepdim=True),
        normal(experts, 2 * intermediate, hidden),
        normal(experts, hidden, intermediate),
    )
    x, topk_weights, w_gate_up, w_down = (tensor.requires_grad_() for tensor in floats)
    return x, topk_ids, topk_weights, w_gate_up, w_down


def _timed(device: torch.device, function: object, *args: Tensor) -> float:
    """Seconds of one call, waiting for the device on both sides."""
    assert callable(function)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _relative_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest relative Frobenius distance over the tensors; NaN if any holds one."""
    pairs = zip(found, expected, strict=True)
    errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs]
    return float(torch.stack(errors).max())


def measure(config: prime_kernels.MegaMoEConfig, tokens: int, rounds: int, device: torch.device) -> list[Row]:
    """Time the device's own backend and the unfused baseline, launch by launch in turn.

    Args:
        config: The layer; its `backend` is replaced.
        tokens: T of this rank.
        rounds: Timed rounds; medians over them. One round before is not counted.
        device: CPU or a CUDA device.

    Returns:
        One row a backend, the baseline last. A backend that cannot run, or whose output or gradients are further than
        `MAX_ERROR` from the reference, has a reason and no time.

    Raises:
        UnsupportedConfig: No backend supports the layer.
    """
    inputs = _inputs(config, tokens, device)
    names: list[BackendName] = ["cuda" if device.type == "cuda" else "reference", BASELINE]
    dy = torch.randn(inputs[0].shape, device=device, dtype=inputs[0].dtype)
    oracle = _Candidate(config.replace(backend="reference"), inputs, device)
    expected = oracle.results(dy[:CHECK_TOKENS])
    oracle.runtime.close()
    rows: dict[BackendName, Row] = {}
    running: dict[BackendName, _Candidate] = {}
    for name in names:
        try:
            candidate = _Candidate(config.replace(backend=name), inputs, device)
            error = _relative_error(candidate.results(dy[:CHECK_TOKENS]), expected)
        except PrimeKernelsError as failure:
            rows[name] = Row(name, reason=str(failure))
            continue
        if error <= MAX_ERROR:
            running[name] = candidate
            rows[name] = Row(name, relative_error=error)
        else:
            candidate.runtime.close()
            rows[name] = Row(name, relative_error=error, reason=f"relative error {error:.1e} over {MAX_ERROR:.0e}")
    for _ in range(rounds + 1):
        for candidate in running.values():
            candidate.forward_s.append(_timed(device, candidate.forward))
            candidate.backward_s.append(_timed(device, candidate.backward, dy))
    for candidate in running.values():
        candidate.runtime.close()
    return [
        replace(
            rows[name],
            forward_ms=statistics.median(running[name].forward_s[1:]) * 1e3,
            backward_ms=statistics.median(running[name].backward_s[1:]) * 1e3,
        )
        if name in running
        else rows[name]
        for name in names
    ]


def run(args: argparse.Namespace) -> int:
    """The verb `bench`.

    Args:
        args: tokens, rounds, device, json and the layer's options.

    Returns:
        0 if the device's own backend was timed, else 1.

    Raises:
        UnsupportedConfig: The layer is not supported, or `--ep-size` is not 1.
    """
    if args.ep_size != 1:
        raise UnsupportedConfig(
            f"--ep-size is {args.ep_size}; this verb runs one process.",
            facts={"ep_size": args.ep_size},
            remedy="Start benchmarks/bench.py with torchrun for several ranks.",
        )
    device = choose_device(args.device)
    config = prime_kernels.MegaMoEConfig(
        num_experts=args.num_experts,
        topk=args.topk,
        hidden=args.hidden,
        intermediate=args.intermediate,
        max_tokens_per_rank=args.tokens,
        precision=args.precision,
    )
    rows = measure(config, args.tokens, args.rounds, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if args.json:
        print(json.dumps({"device": name, "tokens": args.tokens, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{name}, {args.tokens} tokens, medians of {args.rounds}; the baseline is {BASELINE}")
        print(f"{'backend':<12}{'forward ms':>12}{'backward ms':>13}{'rel. error':>12}")
        for row in rows:
            if row.reason is not None:
                print(f"{row.backend:<12}not timed: {row.reason}")
            else:
                print(f"{row.backend:<12}{row.forward_ms:>12.3f}{row.backward_ms:>13.3f}{row.relative_error:>12.1e}")
    return 0 if rows[0].reason is None else 1
