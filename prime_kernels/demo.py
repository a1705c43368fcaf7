# SPDX-License-Identifier: Apache-2.0
"""`prime-kernels demo`: train one small mixture-of-experts layer through `mega_moe`, next to plain torch.

Two students with equal initial parameters learn a fixed teacher from the same batches. One computes its experts with
`prime_kernels.mega_moe`, the other with a loop over all experts that shares no code with this package. The demo passes
if the loss falls below half of its first value and the running means of both curves agree at every step.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prime_kernels
from prime_kernels.demo_report import AGREEMENT, Report, draw, largest_difference, table
from prime_kernels.devices import choose_device
from prime_kernels.errors import UnsupportedConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK, TOKENS = 128, 128, 8, 2, 512
LEARNING_RATE = 3e-3
SEED = 20261129


class Layer(nn.Module):
    """Router and routed experts with a residual connection; `experts` is the only part in which the students differ."""

    def __init__(self, experts: Experts, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def init(*shape: int) -> nn.Parameter:
            value = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
            return nn.Parameter(value.to(device))

        self.router = init(NUM_EXPERTS, HIDDEN)
        self.w_gate_up = init(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN)
        self.w_down = init(NUM_EXPERTS, HIDDEN, INTERMEDIATE)
        self.experts = experts
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] float32 -> [T, H] float32; float32 parameters are cast to the compute dtype, as in mixed precision."""
        scores = torch.softmax(x @ self.router.t(), dim=-1)
        topk_weights, topk_ids = torch.topk(scores, TOPK, dim=-1)
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        weights = self.w_gate_up.to(self.dtype), self.w_down.to(self.dtype)
        return x + self.experts(x.to(self.dtype), topk_ids, topk_weights, *weights).float()


def dense_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Every expert on every token, weighted by the score or by zero: slow, and hard to get wrong."""
    dense = torch.zeros(x.shape[0], NUM_EXPERTS, dtype=topk_weights.dtype, device=x.device)
    dense = dense.scatter_add(1, topk_ids, topk_weights)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(NUM_EXPERTS):
        gate, up = (x @ w_gate_up[expert].t()).chunk(2, dim=-1)
        y = y + dense[:, expert, None] * ((F.silu(gate) * up) @ w_down[expert].t())
    return y.to(x.dtype)


def _progress(stream: TextIO, step: int, steps: int, loss: float) -> None:
    """A bar that is redrawn on a terminal; one line a tenth elsewhere, so that logs stay short."""
    done = step * 30 // steps
    line = f"[{'#' * done}{'.' * (30 - done)}] step {step:>{len(str(steps))}}/{steps}  loss {loss:.4f}"
    if stream.isatty():
        stream.write(f"\r{line}" + ("\n" if step == steps else ""))
    elif step == steps or step % max(steps // 10, 1) == 0:
        stream.write(line + "\n")
    stream.flush()


def _train_step(layer: Layer, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> tuple[float, float]:
    """One step; returns the loss before the update and the seconds taken (reading the loss waits for the device)."""
    start = time.perf_counter()
    loss = F.mse_loss(layer(x), target)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach()), time.perf_counter() - start


def train(
    steps: int, device: torch.device, fused: Experts, progress: TextIO
) -> tuple[list[float], list[float], list[float]]:
    """Train both students on the same batches.

    Args:
        steps: Optimiser steps.
        device: Where everything lives; the dtype is bfloat16 on CUDA and float32 on the CPU.
        fused: The experts of the first student, called with (x, topk_ids, topk_weights, w_gate_up, w_down).
        progress: Stream of the progress bar.

    Returns:
        Loss of the first student, loss of the plain student, and [first, plain] median seconds of a step.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    students = [Layer(experts, dtype, device, SEED) for experts in (fused, dense_experts)]
    optimizers = [torch.optim.Adam(student.parameters(), lr=LEARNING_RATE) for student in students]
    generator = torch.Generator().manual_seed(SEED + 1)
    teacher = torch.randn(HIDDEN, HIDDEN, generator=generator) * HIDDEN**-0.5
    curves: tuple[list[float], list[float]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(1, steps + 1):
        batch = torch.randn(TOKENS, HIDDEN, generator=generator)
        x, target = batch.to(device), (batch + torch.tanh(batch @ teacher)).to(device)
        for student, optimizer, curve, taken in zip(students, optimizers, curves, seconds, strict=True):
            loss, duration = _train_step(student, optimizer, x, target)
            curve.append(loss)
            taken.append(duration)
        _progress(progress, step, steps, curves[0][-1])
    return *curves, [sorted(taken)[len(taken) // 2] for taken in seconds]


def demo(steps: int, device: torch.device, out: Path, progress: TextIO) -> Report:
    """Train, compare and draw.

    Args:
        steps: Optimiser steps, at least 2.
        device: CPU or a CUDA device.
        out: Folder for loss.png; made if missing.
        progress: Stream of the progress bar.

    Returns:
        The report; `report.learned and report.agrees` is the verdict.

    Raises:
        UnsupportedConfig: Fewer than 2 steps.
        BackendUnavailable: No kernel for this CUDA device.
    """
    if steps < 2:
        raise UnsupportedConfig(
            f"--steps is {steps}; need at least 2.", facts={"steps": steps}, remedy="Raise --steps."
        )
    config = prime_kernels.MegaMoEConfig(
        num_experts=NUM_EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        max_tokens_per_rank=TOKENS,
        allow_fallback=True,  # where no fused kernel fits, the table says "reference"
    )
    with prime_kernels.MegaMoERuntime.create(config, device=device) as runtime:

        def fused(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            y = prime_kernels.mega_moe(x, topk_ids, topk_weights, w_gate_up, w_down, runtime=runtime)
            assert isinstance(y, Tensor)  # no statistics were asked for
            return y

        ours, plain, seconds = train(steps, device, fused, progress)
        runtime.synchronize()
        backend = runtime.backend
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Report(
        backend=backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        dtype=str(dtype).removeprefix("torch."),
        steps=steps,
        first_loss=ours[0],
        final_loss=ours[-1],
        plain_final_loss=plain[-1],
        max_relative_difference=largest_difference(ours, plain),
        allowed_difference=AGREEMENT[dtype],
        step_ms=seconds[0] * 1e3,
        plain_step_ms=seconds[1] * 1e3,
        plot=draw(out / "loss.png", ours, plain, backend),
    )


def run(args: argparse.Namespace) -> int:
    """The verb: args.steps, args.device, args.out, args.json. Exit code 0 if the demo passed, else 1."""
    import json

    report = demo(args.steps, choose_device(args.device), Path(args.out), sys.stderr if args.json else sys.stdout)
    ok = report.learned and report.agrees
    if args.json:
        print(json.dumps({"result": "ok" if ok else "mismatch", **asdict(report)}))
    else:
        layer = f"hidden {HIDDEN}, intermediate {INTERMEDIATE}, {NUM_EXPERTS} experts, top-{TOPK}, {TOKENS} tokens"
        print(table(report, layer))
    return 0 if ok else 1
