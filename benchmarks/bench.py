# SPDX-License-Identifier: Apache-2.0
"""Measure the expert layer: `python benchmarks/bench.py forward backward --backend cuda --tokens 16384 --record`.

Ops are forward, backward, forward+backward, and step (a whole training step of a small model, see step.py).

For every shape: numerics of every arm first, on poisoned memory; then the arms against each other, interleaved round by
round; then the target alone for some seconds, with clock and power. A configuration whose numerics fail has no time.
`--ep N` starts N processes, one per GPU. Records go to benchmarks/results/<gpu>/<date>-<sha>.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (after the path of the package)
from torch import Tensor  # noqa: E402

from benchmarks import numerics, records, routing, stamp, telemetry, timing, virtual  # noqa: E402
from benchmarks.baselines import LOCAL_RECIPE, RECIPE, Arm, local_recipe_arm, package_arm, recipe_arm  # noqa: E402
from benchmarks.cost import Shape, tflops  # noqa: E402
from benchmarks.place import Place, process_group  # noqa: E402
from build_tools.tomlfile import read_toml  # noqa: E402

HERE = Path(__file__).resolve().parent
DEFAULT_SHAPES = "qwen3-30b-a3b,qwen3-235b-a22b"
L2_BYTES = 64 * 2**20  # at least the L2 of every supported GPU; input sets together exceed it twice
DENSE = 8192  # side of the square GEMM whose rate is the ceiling
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; argparse exits with 2 on a bad one."""
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__)
    parser.add_argument("ops", nargs="+", choices=records.OPS, metavar="op")
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help="names of shapes.toml, comma separated")
    parser.add_argument("--tokens", default="16384", help="tokens per rank, comma separated")
    parser.add_argument("--backend", default="cuda", choices=["cuda", "grouped", "reference"])
    parser.add_argument("--engine", default="torch", choices=["torch", "deep_gemm"], help="of the grouped backend")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp8", "fp8_bwd", "mxfp8"])
    parser.add_argument("--routing", default="uniform", choices=routing.KINDS)
    parser.add_argument("--save", default="preact", choices=["preact", "inputs", "full"])
    parser.add_argument("--wgrad-dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--reserve-sms", type=int)
    parser.add_argument("--num-sms", type=int)
    parser.add_argument("--arms", default="fused,grouped", help="of step: fused, grouped, reference, comma separated")
    parser.add_argument("--documents", default="packed-4k", choices=["packed-4k", "single-16k"], help="of step")
    parser.add_argument("--ep", type=int, default=1, help="GPUs of the expert-parallel group")
    parser.add_argument(
        "--virtual-ranks", type=int, default=0, metavar="R", help="ranks of one GPU; --tokens is of each"
    )
    parser.add_argument("--pacing", type=float, metavar="GB/s", help="of every virtual rank's link, each way")
    parser.add_argument("--ablation", choices=["chained", "only-moves"], help="see virtual.py")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--sustain", type=float, default=3.0, metavar="SECONDS", help="0: skip")
    parser.add_argument("--no-baseline", action="store_true", help="time the target alone; records carry no ratio")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list the N longest kernels of every arm")
    parser.add_argument("--record", action="store_true", help="append records; needs a fitting build/stamp.json")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the records")
    args = parser.parse_args(argv)
    known = read_shapes()
    for name in args.shapes.split(","):
        if name not in known:
            parser.error(f"shape {name!r} is not one of {', '.join(known)}")
    if problem := virtual.ablation_problem(args):
        parser.error(problem)
    if args.record and args.device != "cuda":
        parser.error("records are of GPUs; --record needs --device cuda")
    return args


def read_shapes() -> dict[str, Shape]:
    """shapes.toml."""
    table = read_toml(HERE / "shapes.toml")
    return {name: Shape(name=name, **sizes) for name, sizes in table.items()}


def make_batches(shape: Shape, tokens: int, kind: str, place: Place) -> list[numerics.Batch]:
    """Input sets that share weights, more of them the smaller they are; random, different on every rank."""
    gen = torch.Generator(place.device).manual_seed(1000 + place.rank)
    local = shape.num_experts // place.ep

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(sizes, dtype=torch.bfloat16, device=place.device)
        return out.normal_(0.0, scale, generator=gen)

    w_gate_up = normal(local, 2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5)
    w_down = normal(local, shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5)
    sets = max(2, min(16, -(-2 * L2_BYTES // (4 * tokens * shape.hidden))))
    batches = []
    for _ in range(sets):
        x, dy = normal(tokens, shape.hidden), normal(tokens, shape.hidden)
        ids, weights = routing.draw_routes(kind, tokens, shape.topk, shape.num_experts, gen)
        batches.append(numerics.Batch(x, ids, weights, dy, w_gate_up, w_down))
    for tensor in (w_gate_up, w_down, *(t for b in batches for t in (b.x, b.topk_weights))):
        tensor.requires_grad_()
    return batches


def leaves_of(batch: numerics.Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.x, batch.topk_weights, batch.w_gate_up, batch.w_down


def call_forward(arm: Arm, batch: numerics.Batch) -> Tensor:
    return arm.layer(batch.x, batch.topk_ids, batch.topk_weights, batch.w_gate_up, batch.w_down)


def make_variant(arm: Arm, op: str, batches: list[numerics.Batch]) -> timing.Variant:
    """What is timed: the forward that saves for backward, the gradients of all inputs and weights, or both."""

    def pick(index: int) -> numerics.Batch:
        return batches[index % len(batches)]

    def gradients(y: Tensor, batch: numerics.Batch) -> Any:
        return torch.autograd.grad(y, leaves_of(batch), batch.dy)

    if op == "forward":
        return timing.Variant(arm.name, pick, lambda batch: call_forward(arm, batch))
    if op == "backward":
        return timing.Variant(
            arm.name,
            lambda index: (call_forward(arm, pick(index)), pick(index)),
            lambda prepared: gradients(*prepared),
        )
    return timing.Variant(arm.name, pick, lambda batch: gradients(call_forward(arm, batch), batch))


def check_arm(arm: Arm, batch: numerics.Batch, place: Place) -> numerics.Verdict:
    """Numerics of one arm on poisoned memory."""
    leaves = leaves_of(batch)
    numerics.poison(place.device, [batch.dy, *(leaf.detach() for leaf in leaves)])
    y = call_forward(arm, batch)
    grads = torch.autograd.grad(y, leaves, batch.dy)
    outputs = numerics.Outputs(y.detach(), *grads)
    with torch.no_grad():
        verdict = numerics.check_layer(batch, outputs, group=place.group)
    if place.slowest(float(bool(verdict.problems))) and not verdict.problems:
        verdict.problems.append("another rank found problems")
    return verdict


def peak_mib(variant: timing.Variant, place: Place) -> float | None:
    """Most memory allocated during one call above what was there before it, plus the runtime's symmetric memory."""
    if place.device.type != "cuda":
        return None
    torch.cuda.synchronize(place.device)
    before = torch.cuda.memory_allocated(place.device)
    torch.cuda.reset_peak_memory_stats(place.device)
    result = variant.timed(variant.prepare(0))
    torch.cuda.synchronize(place.device)
    del result
    return round((torch.cuda.max_memory_allocated(place.device) - before) / 2**20, 1)


def dense_tflops(place: Place) -> float | None:
    """Rate of one large square bf16 GEMM on this GPU in this run: the ceiling the layer's rate is read against."""
    if place.device.type != "cuda":
        return None
    a, b = (torch.randn(DENSE, DENSE, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    variant = timing.Variant("dense", lambda index: (a, b), lambda pair: pair[0] @ pair[1])
    took = timing.measure([variant], device=place.device, rounds=10, warmups=3, group=None)["dense"]
    return round(2 * DENSE**3 / (took.ms * 1e-3) / 1e12, 1)


def make_arms(args: argparse.Namespace, shape: Shape, tokens: int, place: Place) -> list[Arm]:
    """The target first; then, unless it goes without, the recipe, on one GPU also locally, and the unfused backend."""
    options = {
        "precision": args.precision,
        "save": args.save,
        "wgrad_dtype": DTYPES[args.wgrad_dtype],
        "num_sms": args.num_sms,
        "reserve_sms": args.reserve_sms,
    }
    common: dict[str, Any] = {"tokens": tokens, "device": place.device, "group": place.group}
    arms = [package_arm(args.backend, shape, engine=args.engine, **common, **options)]
    if not args.no_baseline:
        arms.append(recipe_arm(shape, group=place.exchange))
        if place.ep == 1:
            arms.append(local_recipe_arm(shape))
        if args.backend == "cuda":
            arms.append(package_arm("grouped", shape, save=args.save, **common))
    return arms


def run_shape(args: argparse.Namespace, shape: Shape, tokens: int, place: Place) -> list[dict[str, Any]]:
    """Check and time one shape at one token count; returns records without stamp fields."""
    torch._dynamo.reset()  # compiled helpers are specialised to widths, and their number per process is limited
    batches = make_batches(shape, tokens, args.routing, place)
    arms = make_arms(args, shape, tokens, place)
    place.say(f"\n{shape.name} tokens={tokens} ep={place.ep} routing={args.routing} input sets={len(batches)}")
    good: list[Arm] = []
    verdicts: dict[str, numerics.Verdict] = {}
    for arm in arms:
        verdict = verdicts[arm.name] = check_arm(arm, batches[0], place)
        errors = " ".join(f"{name}={error:.1e}" for name, error in verdict.rel_err.items())
        place.say(f"  {arm.name:<22} numerics {errors} worst block {verdict.worst_block:.1e}")
        for problem in verdict.problems[:5]:
            place.say(f"    WRONG {problem}")
        if not verdict.problems:
            good.append(arm)
    found = []
    if arms[0] in good:
        ceiling = dense_tflops(place)
        for op in (op for op in args.ops if op != "step"):
            found.append(run_op(args, op, shape, tokens, good, batches, place, verdicts[arms[0].name], ceiling))
    for arm in arms:
        arm.close()
    return found


def run_op(
    args: argparse.Namespace,
    op: str,
    shape: Shape,
    tokens: int,
    arms: list[Arm],
    batches: list[numerics.Batch],
    place: Place,
    verdict: numerics.Verdict,
    ceiling: float | None,
) -> dict[str, Any]:
    """Time one op of the arms, the first being the target; prints, and returns the target's record."""
    variants = [make_variant(arm, op, batches) for arm in arms]
    times = timing.measure(variants, device=place.device, rounds=args.rounds, warmups=args.warmups, group=place.group)
    medians = {name: place.slowest(took.ms) for name, took in times.items()}
    target, took = arms[0], times[arms[0].name]
    rows = int((batches[0].topk_ids >= 0).sum().item())
    sustained, clock, power = sustain_target(args, variants[0], place)
    for name, one in times.items():
        place.say(
            f"  {op:<17} {name:<22} {medians[name]:8.3f} ms  p10 {one.p10:.3f}  p90 {one.p90:.3f}"
            f"  {tflops(op, shape, rows, medians[name]):6.1f} TFLOP/s  host {one.host_us:.0f} us"
        )
    list_kernels(args, variants, place)
    ratio, problem = judge_ratio(args, op, shape, tokens, place, medians, target.name)
    place.say(f"  {op:<17} {f'ratio {ratio}' if ratio else f'no ratio: {problem}'}{side_note(medians)}")
    if sustained is not None:
        place.say(f"  {op:<17} sustained {sustained:.3f} ms at {clock} MHz, {power} W; dense {ceiling} TFLOP/s")
    measured = {
        "ratio": ratio,
        "tflops": round(tflops(op, shape, rows, medians[target.name]), 1),
        "rel_err": verdict.rel_err,
        "peak_mib": peak_mib(variants[0], place),
        "clock_mhz": clock,
        "power_w": power,
        "sustained_ms": None if sustained is None else round(sustained, 4),
        "dense_tflops": ceiling,
        "p10": round(place.slowest(took.p10), 4),
        "p90": round(place.slowest(took.p90), 4),
        "n": took.n,
        "host_us": round(took.host_us, 1),
    }
    return {**configuration(args, op, shape, tokens, target, place), **compared(medians, target.name), **measured}


def judge_ratio(
    args: argparse.Namespace,
    op: str,
    shape: Shape,
    tokens: int,
    place: Place,
    medians: dict[str, float],
    target: str,
) -> tuple[float | None, str | None]:
    """(baseline / target, None), or (None, why it may not be recorded)."""
    if RECIPE not in medians:
        return None, "there is no baseline"
    problem = records.ratio_problem(
        read_toml(HERE / "anchors.toml"),
        shape=shape.name,
        ep=place.ep,
        op=op,
        tokens=tokens,
        routing=args.routing,
        baseline_ms=medians[RECIPE],
    )
    return (None, problem) if problem else (round(medians[RECIPE] / medians[target], 3), None)


def side_note(medians: dict[str, float]) -> str:
    """How much of the recipe's time its exchange with itself is, on one GPU."""
    if LOCAL_RECIPE not in medians:
        return ""
    return f"; the recipe without its exchange: {medians[LOCAL_RECIPE]:.3f} ms of {medians[RECIPE]:.3f}"


def compared(medians: dict[str, float], target: str) -> dict[str, Any]:
    """Fields of a record that hold the medians of the arms."""
    baseline_ms = round(medians[RECIPE], 4) if RECIPE in medians else None
    fields = {
        "ms": round(medians[target], 4),
        "baseline": None if baseline_ms is None else RECIPE,
        "baseline_ms": baseline_ms,
    }
    # Beside the fused backend the package's own unfused one ran, and on one GPU the recipe without its exchange.
    others = {"grouped_ms": "grouped", "local_baseline_ms": LOCAL_RECIPE}
    return fields | {name: round(medians[arm], 4) for name, arm in others.items() if arm in {*medians} - {target}}


def configuration(
    args: argparse.Namespace, op: str, shape: Shape, tokens: int, target: Arm, place: Place
) -> dict[str, Any]:
    """Fields of a record that say what was measured."""
    return {
        "op": op,
        "shape": shape.name,
        "ep": place.ep,
        "tokens": tokens,
        "precision": args.precision,
        "routing": args.routing,
        "save": args.save,
        "cubin": getattr(getattr(target.runtime, "implementation", None), "cubin_digest", None),
        "backend": target.backend,
        "engine": target.engine,
        "ablation": args.ablation,
        "main_grad": False,
        "wgrad_dtype": args.wgrad_dtype,
        "reserve_sms": args.reserve_sms,
        "num_sms": args.num_sms,
    }


def list_kernels(args: argparse.Namespace, variants: list[timing.Variant], place: Place) -> None:
    """Print where the device time of one call goes."""
    for variant in variants if args.kernels else []:
        rows = timing.kernel_times(variant, place.device)
        place.say(f"    {variant.name}: {sum(us for _, us, _ in rows) / 1e3:.3f} ms on the device")
        for name, us, count in rows[: args.kernels]:
            place.say(f"      {us / 1e3:8.3f} ms {count:4d} x {name[:96]}")


def sustain_target(
    args: argparse.Namespace, variant: timing.Variant, place: Place
) -> tuple[float | None, float | None, float | None]:
    """(mean ms over some seconds without a pause, median clock in MHz, median power in W)."""
    if args.sustain <= 0:
        return None, None, None
    with telemetry.Sampler(place.device.index or 0) as sampler:
        ms, _ = timing.sustain(variant, device=place.device, seconds=args.sustain, group=place.group)
    return place.slowest(ms), sampler.median("clock_mhz"), sampler.median("power_w")


def run_all(args: argparse.Namespace, place: Place) -> int:
    """Every shape at every token count; exit status."""
    fits, why_not = stamp.read_stamp(ROOT)
    if args.record and fits is None:
        place.say(f"not recording: {why_not}")
        return 3
    shapes, wrong = read_shapes(), False
    for name in args.shapes.split(","):
        for tokens in map(int, args.tokens.split(",")):
            if args.virtual_ranks:
                from benchmarks.run_virtual import run_virtual as run_layer  # imports this module
            else:
                run_layer = run_shape
            found = run_layer(args, shapes[name], tokens, place) if set(args.ops) - {"step"} else []
            if "step" in args.ops:
                from benchmarks.step import run_step  # imports this module

                found += run_step(args, shapes[name], tokens, place)
            wrong = wrong or not found
            if args.record and place.rank == 0:
                for record in found:
                    path = records.append_record(args.results, {**record, **provenance(place, fits)})
                    place.say(f"  recorded in {path}")
    return 1 if wrong else 0


def provenance(place: Place, fits: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of a record that say where and from which sources it comes."""
    assert fits is not None
    return {
        "gpu": torch.cuda.get_device_name(place.device),
        "driver": telemetry.query_gpu(place.device.index or 0)["driver"],
        "torch": torch.__version__,
        "commit": fits["commit"],
        "dirty": fits["dirty"],
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One process of `--ep N`."""
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    with process_group(device, Path(folder), rank=rank, ranks=args.ep) as group:
        status = run_all(args, Place(device, group, rank, args.ep, group))
    if status:
        sys.exit(status)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; exit status 0, 1 after wrong numerics, 2 or 3 on misuse."""
    args = parse(argv)
    if args.device == "cuda" and torch.cuda.device_count() < args.ep:
        print(f"--ep {args.ep} needs {args.ep} GPUs; torch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        if args.ep > 1:
            torch.multiprocessing.spawn(run_rank, (args, folder), nprocs=args.ep)
            return 0
        device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
        if args.no_baseline or args.virtual_ranks or set(args.ops) == {"step"}:
            return run_all(args, Place(device, None, 0, 1))
        with process_group(device, Path(folder)) as alone:
            return run_all(args, Place(device, None, 0, 1, alone))


if __name__ == "__main__":
    sys.exit(main())
