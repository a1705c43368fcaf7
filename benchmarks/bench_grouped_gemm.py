# SPDX-License-Identifier: Apache-2.0
"""Rates of single grouped GEMMs: `python benchmarks/bench_grouped_gemm.py --out grouped_gemm.jsonl`.

The products of an expert layer beside torch._grouped_mm and, where it works, the package deep_gemm: each arm is checked
against fp32 on poisoned memory first, then all are timed in turns. An arm that is wrong has no time. Rates count routed
rows, not padding; every arm pads as it needs. Launches that an arm needs per call (group bounds) are part of its time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (after the path of the package)
from torch import Tensor  # noqa: E402

from benchmarks import bench, numerics, routing, stamp, timing  # noqa: E402
from benchmarks.cost import Shape  # noqa: E402
from build_tools.tomlfile import read_toml  # noqa: E402

BOUND = {torch.bfloat16: 3e-3, torch.float32: 1e-4}  # one bf16 rounding gives 1.7e-3; fp32 sums in any order 1e-6


@dataclass(frozen=True)
class Problem:
    """Rows [T * K, m] grouped by expert, times weights [E, n, m] transposed; or, transposed, times rows [T * K, n]."""

    name: str
    grads: bool
    m: int
    n: int
    dtype: torch.dtype = torch.bfloat16
    add: bool = False


def problems_of(shape: Shape) -> list[Problem]:
    """The two products of the forward and the larger weight gradient, overwritten in bf16 and accumulated in fp32."""
    hidden, inter = shape.hidden, shape.intermediate
    return [
        Problem("gate_up", False, hidden, 2 * inter),
        Problem("down", False, inter, hidden),
        Problem("wgrad_gate_up", True, 2 * inter, hidden),
        Problem("wgrad_gate_up_fp32_accumulate", True, 2 * inter, hidden, torch.float32, add=True),
    ]


@dataclass(frozen=True)
class Data:
    """Operands of one problem without padding. `base`: what an accumulating arm adds to."""

    counts: list[int]
    a: Tensor
    b: Tensor
    base: Tensor | None

    def spans(self) -> list[slice]:
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


def make_data(problem: Problem, counts: list[int], device: torch.device) -> Data:
    """Random operands; weights scaled so that results are about 1."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*sizes: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(0.0, scale, generator=generator)

    rows, experts = sum(counts), len(counts)
    a = normal(rows, problem.m)
    b = normal(rows, problem.n) if problem.grads else normal(experts, problem.n, problem.m, scale=problem.m**-0.5)
    base = normal(experts, problem.m, problem.n, dtype=torch.float32) if problem.add else None
    return Data(counts, a, b, base)


@dataclass(frozen=True)
class Run:
    """One arm on one problem. `call` computes; `result` gives what it computed, without padding."""

    call: Callable[[], Any]
    result: Callable[[Any], Tensor]
    bound: float


Arm = Callable[[Problem, Data], Run]


def torch_arm(problem: Problem, data: Data) -> Run:
    """torch._grouped_mm. It has no fp32 sums in memory, so accumulating is its bf16 result added afterwards."""
    offsets = torch.tensor(data.counts, device=data.a.device).cumsum(0).to(torch.int32)
    total = None if data.base is None else data.base.clone()

    def product() -> Tensor:
        if not data.a.is_cuda:
            return looped(problem, data)
        if problem.grads:
            return torch._grouped_mm(data.a.t(), data.b, offs=offsets)
        return torch._grouped_mm(data.a, data.b.transpose(1, 2), offs=offsets)

    def call() -> Tensor:
        return product() if total is None else total.add_(product())

    return Run(call, lambda out: out, BOUND[torch.bfloat16])


def looped(problem: Problem, data: Data) -> Tensor:
    """The same by a loop, off the GPU: to be tested, not to be timed."""
    if problem.grads:
        return torch.stack([(data.a[s].t() @ data.b[s]) for s in data.spans()])
    return torch.cat([data.a[s] @ data.b[e].t() for e, s in enumerate(data.spans())])


def module_arm(module: Any, align: int) -> Arm:
    """A module with DeepGEMM's names, groups padded to multiples of `align` rows."""

    def pad(rows: Tensor, places: Tensor, count: int) -> Tensor:
        return rows.new_zeros(count, rows.shape[1]).index_copy_(0, places, rows)

    def make(problem: Problem, data: Data) -> Run:
        device, counts = data.a.device, torch.tensor(data.counts)
        padded = (counts + align - 1) // align * align
        count = int(padded.sum())
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        places = (torch.arange(int(counts.sum())) + torch.repeat_interleave(shift, counts)).to(device)
        a = pad(data.a, places, count)
        if problem.grads:
            b, ks, sizes = pad(data.b, places, count), padded.tolist(), padded.to(device, torch.int32)
            shape = (len(data.counts), problem.m, problem.n)
            d = torch.full(shape, float("nan"), dtype=problem.dtype, device=device)
            if data.base is not None:
                d.copy_(data.base)
            c = d if problem.add else None
            call = module.k_grouped_bf16_gemm_tn_contiguous
            return Run(lambda: call(a, b, d, ks, sizes, c), lambda _: d, BOUND[problem.dtype])
        ids = torch.full((count,), -1, dtype=torch.int32, device=device)
        experts = torch.repeat_interleave(torch.arange(len(data.counts), dtype=torch.int32), counts)
        ids[places] = experts.to(device)
        d = torch.full((count, problem.n), float("nan"), dtype=torch.bfloat16, device=device)
        call = module.m_grouped_bf16_gemm_nt_contiguous
        return Run(lambda: call(a, data.b, d, ids), lambda _: d[places], BOUND[torch.bfloat16])

    return make


def make_arms(device: torch.device) -> tuple[dict[str, Arm], list[str]]:
    """Arms by name, the package's first, and why one is absent."""
    arms: dict[str, Arm] = {}
    absent: list[str] = []
    if device.type == "cuda":
        import prime_kernels
        from prime_kernels.moe.grouped_deep_gemm import load_deep_gemm

        ours: Any = prime_kernels.load("deep_gemm", device=device.index)
        arms["prime_kernels"] = module_arm(ours, ours.get_theoretical_mk_alignment_for_contiguous_layout())
        theirs = load_deep_gemm(device)
        if isinstance(theirs, str):
            absent.append(theirs)
        else:
            arms["deep_gemm"] = module_arm(theirs._module, theirs._alignment)
    arms["torch"] = torch_arm
    return arms, absent


def check(problem: Problem, data: Data, run: Run) -> tuple[float, str | None]:
    """(worst relative error of an expert, what is wrong): one call of a fresh arm against fp32."""
    got = run.result(run.call())
    if data.a.is_cuda:
        torch.cuda.synchronize()
    worst, wrong = 0.0, None
    for expert, span in enumerate(data.spans()):
        a = data.a[span].float()
        if problem.grads:
            want, part = a.t() @ data.b[span].float(), got[expert].float()
            if data.base is not None:
                part = part - data.base[expert]
        else:
            want, part = a @ data.b[expert].float().t(), got[span].float()
        error, block = numerics.relative_error(part, want), numerics.worst_block_error(part, want)
        worst = max(worst, error)
        if not (error < run.bound and block < numerics.BLOCK_BOUND):
            wrong = wrong or f"expert {expert}: relative error {error:.1e}, worst block {block:.1e}"
    return worst, wrong


def supported(name: str, problem: Problem) -> bool:
    """DeepGEMM's weight gradient on Hopper always accumulates."""
    return not (name == "deep_gemm" and problem.grads and not problem.add)


def anchor_of(shape: str, arm: str, problem: str) -> float | None:
    """TFLOP/s measured on the machine of anchors.toml."""
    table = read_toml(Path(__file__).with_name("anchors.toml")).get("grouped_gemm", {})
    found = table.get(arm, {}).get(shape, {}).get(problem)
    return None if found is None else float(found)


def check_arms(problem: Problem, data: Data, arms: dict[str, Arm]) -> tuple[dict[str, tuple[Run, float]], bool]:
    """(arms that are right, with their errors, and whether all were)."""
    runs: dict[str, tuple[Run, float]] = {}
    right = True
    for name, arm in arms.items():
        if not supported(name, problem):
            continue
        numerics.poison(data.a.device, [data.a, data.b])
        run = arm(problem, data)
        error, wrong = check(problem, data, run)
        if wrong is not None:
            print(f"  {problem.name:<30} {name:<14} WRONG {wrong}", flush=True)
            right = False
        else:
            runs[name] = run, error
    return runs, right


def run_problem(
    args: argparse.Namespace, shape: Shape, problem: Problem, counts: list[int], arms: dict[str, Arm]
) -> tuple[list[dict[str, Any]], bool]:
    """Check and time one problem; prints its lines and returns its records, and whether every arm was right."""
    device = device_of(args)
    data = make_data(problem, counts, device)
    runs, right = check_arms(problem, data, arms)
    variants = [timing.Variant(name, lambda _: None, lambda _, run=run: run.call()) for name, (run, _) in runs.items()]
    if not variants:
        return [], right
    times = timing.measure(variants, device=device, rounds=args.rounds, warmups=args.warmups, group=None)
    flops = 2 * sum(counts) * problem.m * problem.n
    found = []
    for name, took in times.items():
        rate, anchor = flops / (took.ms * 1e-3) / 1e12, anchor_of(shape.name, name, problem.name)
        rival = anchor_of(shape.name, "deep_gemm", problem.name)
        print(
            f"  {problem.name:<30} {name:<14} {took.ms:8.3f} ms  p10 {took.p10:.3f}  p90 {took.p90:.3f}  "
            f"{rate:6.1f} TFLOP/s  host {took.host_us:4.0f} us  error {runs[name][1]:.1e}"
            + (f"  anchor {anchor:.0f}" if anchor else "")
            + (f"  deep_gemm's anchor {rival:.0f}" if rival and name == "prime_kernels" else ""),
            flush=True,
        )
        record = {"problem": problem.name, "shape": shape.name, "arm": name, "rows": sum(counts)}
        record |= {"m": problem.m, "n": problem.n, "experts": len(counts), "ms": round(took.ms, 4), "n_calls": took.n}
        record |= {"p10": round(took.p10, 4), "p90": round(took.p90, 4), "host_us": round(took.host_us, 1)}
        found.append(record | {"tflops": float(f"{rate:.4g}"), "rel_err": runs[name][1], "anchor_tflops": anchor})
    return found, right


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line; argparse exits with 2 on a bad one."""
    parser = argparse.ArgumentParser(prog="bench_grouped_gemm.py", description=__doc__)
    parser.add_argument("--shapes", default=bench.DEFAULT_SHAPES, help="names of shapes.toml, comma separated")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--routing", default="uniform", choices=routing.KINDS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    known = bench.read_shapes()
    for name in args.shapes.split(","):
        if name not in known:
            parser.error(f"shape {name!r} is not one of {', '.join(known)}")
    return args


def device_of(args: argparse.Namespace) -> torch.device:
    return torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")


def main(argv: list[str] | None = None) -> int:
    """Run all problems of all shapes. Returns 1 if an arm was wrong anywhere."""
    args = parse(argv)
    device = device_of(args)
    torch.set_float32_matmul_precision("highest")
    arms, absent = make_arms(device)
    for reason in absent:
        print(f"without deep_gemm: {reason}")
    fits, stamp_problem = stamp.read_stamp(ROOT)
    where = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": None if fits is None else fits["commit"],
        "dirty": None if fits is None else fits["dirty"],
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tokens": args.tokens,
        "routing": args.routing,
    }
    if stamp_problem is not None:
        print(f"without a commit: {stamp_problem}")
    right = True
    for name in args.shapes.split(","):
        shape = bench.read_shapes()[name]
        generator = torch.Generator(device).manual_seed(1000)
        ids, _ = routing.draw_routes(args.routing, args.tokens, shape.topk, shape.num_experts, generator)
        counts = torch.bincount(ids.flatten(), minlength=shape.num_experts).tolist()
        print(f"\n{shape.name} tokens={args.tokens} rows={sum(counts)} routing={args.routing} on {where['gpu']}")
        for problem in problems_of(shape):
            found, fine = run_problem(args, shape, problem, counts, arms)
            right &= fine
            if args.out is not None:
                with args.out.open("a") as file:
                    file.writelines(json.dumps(record | where) + "\n" for record in found)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
