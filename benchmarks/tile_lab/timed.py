# SPDX-License-Identifier: Apache-2.0
"""One case on the GPU: checked, timed in turns with the plain GEMM, timed without pauses, checked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench, timing
from benchmarks.telemetry import Sampler
from benchmarks.tile_lab import cases, tiles
from benchmarks.tile_lab.driver import Args, Kernel, Module

TOKENS = 16384
ROUNDS, WARMUPS = 20, 3
SUSTAIN_S = 2.0
COPY_BYTES_PER_S = 0.4e12  # read and written
COPY_ROUND_BYTES = 32768


@dataclass
class Launcher:
    """A kernel with its arguments. `keep`: what they point to."""

    kernel: Kernel
    args: Args
    keep: list[Tensor]

    def variant(self, name: str, *, stagger: int, copy_rounds: int = 0) -> timing.Variant:
        """One launch, as something to time."""

        def launch(_prepared: object) -> None:
            self.args.stagger, self.args.copy_rounds = stagger, copy_rounds
            self.kernel.launch(self.args)

        return timing.Variant(name, lambda _index: None, launch)

    def add_copy(self, rounds: int) -> Callable[[], bool]:
        """Memory to copy `rounds` rounds; returns whether it has been copied."""
        source = torch.randint(
            0, 256, (self.kernel.ctas * rounds * COPY_ROUND_BYTES,), dtype=torch.uint8, device="cuda"
        )
        target = torch.zeros_like(source)
        self.args.copy_src, self.args.copy_dst = source.data_ptr(), target.data_ptr()
        self.keep += [source, target]
        return lambda: torch.equal(source, target)


def make_launcher(kernel: Kernel, case: cases.Case) -> Launcher:
    """Arguments of a case.

    Raises:
        ValueError: its tiles would hang the kernel.
    """
    found = tiles.problems(case.tiles, cluster=kernel.cluster, ctas=kernel.ctas)
    if found:
        raise ValueError("; ".join(found[:3]))
    args, listed = Args(), torch.tensor(case.tiles, dtype=torch.int32, device="cuda")
    for place, box in case.maps.items():
        kernel.module.encode(args, place, box)
    for name, pointer in case.pointers.items():
        setattr(args, name, pointer)
    args.tiles, args.num_tiles, args.num_n_tiles = listed.data_ptr(), len(case.tiles), case.num_n_tiles
    return Launcher(kernel, args, [listed])


def check(case: cases.Case, launcher: Launcher, experts: int) -> tuple[dict[str, float], list[str]]:
    """Errors after a launch with either start, each on poisoned outputs."""
    worst: dict[str, float] = {}
    found: list[str] = []
    for stagger in (0, 1):
        case.poison()
        launcher.variant("check", stagger=stagger).timed(None)
        torch.cuda.synchronize()
        errors, problems = case.check(experts)
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
        found += problems
    return worst, found


def run(cubin: bytes, name: str, shape_name: str) -> dict[str, Any]:
    """The fields of one record; "error" instead of times if a result is wrong."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    generator = torch.Generator(device).manual_seed(0)
    torch.zeros(1, device=device)  # the context that the driver calls use
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    kernel = Kernel(Module(cubin), name, stream=torch.cuda.current_stream().cuda_stream, sms=sms)
    shape = bench.read_shapes()[shape_name]
    pool = tiles.Pool(cases.draw_counts(TOKENS * shape.topk, shape.num_experts))
    made = cases.Bench(shape, pool, kernel.tile_n, kernel.cluster, generator)
    case = cases.KINDS[name.split("_")[0]](made)
    launcher = make_launcher(kernel, case)
    record: dict[str, Any] = {"max_clusters": kernel.max_clusters, "ctas": kernel.ctas, "tiles": len(case.tiles)}
    record["rel_err"], found = check(case, launcher, shape.num_experts)
    if not found:
        record.update(times(case, launcher, device))
        if not record.pop("copied"):
            found.append("the copy beside it was not made")
        record["rel_err_after"], problems = check(case, launcher, shape.num_experts)
        found += problems
    if found:
        print("\n".join(found), flush=True)
        record["error"] = f"{len(found)} checks failed; {found[0]}"
    return record


def times(case: cases.Case, launcher: Launcher, device: torch.device) -> dict[str, Any]:
    """Times and rates: in turns with the peer, beside a copy, and without pauses."""

    def measure(variants: list[timing.Variant]) -> dict[str, timing.Timing]:
        return timing.measure(variants, device=device, rounds=ROUNDS, warmups=WARMUPS, group=None)

    starts = [launcher.variant(str(stagger), stagger=stagger) for stagger in (0, 1)]
    peer = timing.Variant("peer", lambda _index: None, lambda _prepared: case.peer())
    plain = measure([*starts, peer])
    best = min((0, 1), key=lambda stagger: plain[str(stagger)].ms)
    ms = plain[str(best)].ms
    rounds = int(COPY_BYTES_PER_S / 2 * ms * 1e-3 / (launcher.kernel.ctas * COPY_ROUND_BYTES))
    copied = launcher.add_copy(rounds)
    beside = measure([launcher.variant("copy", stagger=best, copy_rounds=rounds)])["copy"]
    with Sampler(0) as sampler:
        sustained, calls = timing.sustain(starts[best], device=device, seconds=SUSTAIN_S, group=None)
    return {
        "ms_stagger0": plain["0"].ms,
        "ms_stagger1": plain["1"].ms,
        "spread": plain[str(best)].spread,
        "peer_ms": plain["peer"].ms,
        "ms_copy_0.4TBs": beside.ms,
        "copied": copied(),
        "ms_sustained": sustained,
        "calls_sustained": calls,
        "clock_mhz": sampler.median("clock_mhz"),
        "power_w": sampler.median("power_w"),
        "tflops": case.flop / ms / 1e9,
        "tflops_sustained": case.flop / sustained / 1e9,
        "tflops_peer": case.flop / plain["peer"].ms / 1e9,
    }
