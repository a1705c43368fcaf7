# SPDX-License-Identifier: Apache-2.0
"""bench.py's runs with virtual ranks: against one rank that has all tokens, in turns; with `--ablation`, what of it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import bench, numerics, timing
from benchmarks.baselines import config_of, package_arm
from benchmarks.place import Place
from benchmarks.virtual import VirtualRanks, ablated


def run_virtual(args: argparse.Namespace, shape: Any, tokens: int, place: Place) -> list[dict[str, Any]]:
    """Check and time one shape at `tokens` per virtual rank; returns records without stamp fields."""
    with ablated(args.ablation):
        return _run(args, shape, tokens, place)


def _run(args: argparse.Namespace, shape: Any, tokens: int, place: Place) -> list[dict[str, Any]]:
    ranks, total = args.virtual_ranks, tokens * args.virtual_ranks
    batches = bench.make_batches(shape, total, args.routing, place)
    options = {"save": args.save, "wgrad_dtype": bench.DTYPES[args.wgrad_dtype], "num_sms": args.num_sms}
    config = config_of("cuda", shape, tokens=tokens, **options)
    world = VirtualRanks(config, ranks=ranks, pacing_gb_s=args.pacing, device=place.device)
    alone = package_arm("cuda", shape, tokens=total, device=place.device, group=None, **options)
    pace = f"{args.pacing} GB/s" if args.pacing else "no pace"
    what = f", ablation {args.ablation}" if args.ablation else ""
    place.say(f"\n{shape.name} virtual ranks={ranks} tokens={tokens} of each, {pace}, routing={args.routing}{what}")
    # Transport alone has no results that could be right.
    verdict = numerics.Verdict() if args.ablation == "only-moves" else world.check(batches[0])
    verdict.problems += bench.check_arm(alone, batches[0], place).problems
    problem = world.pace_problem(batches[0])
    if problem is not None:
        verdict.problems.append(problem)
    place.say(f"  numerics {verdict.rel_err} worst block {verdict.worst_block:.1e}")
    for text in verdict.problems[:5]:
        place.say(f"    WRONG {text}")
    found = []
    for op in (op for op in args.ops if op != "step" and not verdict.problems):
        variants = [world.variant("virtual", op, batches), bench.make_variant(alone, op, batches)]
        found.append(_record(args, op, shape, tokens, world, variants, place, verdict, batches, alone))
        world.settle()
    world.close()
    alone.close()
    return found


def _record(
    args: argparse.Namespace,
    op: str,
    shape: Any,
    tokens: int,
    world: VirtualRanks,
    variants: list[timing.Variant],
    place: Place,
    verdict: Any,
    batches: list[Any],
    alone: Any,
) -> dict[str, Any]:
    """Time one op; prints, and returns its record."""
    times = timing.measure(variants, device=place.device, rounds=args.rounds, warmups=args.warmups, group=None)
    took, one = times["virtual"], times[alone.name]
    rows = int((batches[0].topk_ids >= 0).sum().item())
    rate = 0.0 if args.ablation == "only-moves" else bench.tflops(op, shape, rows, took.ms)
    bytes_out = world.remote_bytes(batches[0])
    place.say(
        f"  {op:<17} {took.ms:8.3f} ms  p10 {took.p10:.3f}  p90 {took.p90:.3f}  {rate:.1f} TFLOP/s; one rank "
        f"{one.ms:.3f} ms: x{took.ms / one.ms:.3f}; {bytes_out / 1e6:.0f} MB over the busiest link of a forward"
    )
    bench.list_kernels(args, variants, place)
    measured = {
        "ms": round(took.ms, 4),
        "p10": round(took.p10, 4),
        "p90": round(took.p90, 4),
        "n": took.n,
        "host_us": round(took.host_us, 1),
        "one_rank_ms": round(one.ms, 4),
        "tflops": round(rate, 1),
        "rel_err": verdict.rel_err,
        "remote_bytes": bytes_out,
        "virtual_ranks": args.virtual_ranks,
        "pacing_GBs": args.pacing or 0,
    }
    empty = ("baseline", "baseline_ms", "ratio", "peak_mib", "clock_mhz", "power_w", "sustained_ms", "dense_tflops")
    torch.cuda.synchronize()
    return {**bench.configuration(args, op, shape, tokens, alone, place), **dict.fromkeys(empty), **measured}
