# SPDX-License-Identifier: Apache-2.0
"""Measure a whole training step of a small decoder with different expert layers: `bench.py step` ends up here.

Arms: fused (the "cuda" backend), grouped (the unfused backend), identity (the experts left out: the most any expert
layer could gain). They take turns on one model, one batch and one optimizer, so that nothing else differs. A stock
trainer is not among them; a record of one would name it in "stock".
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import bench, numerics, telemetry, timing
from benchmarks.baselines import Arm, package_arm
from benchmarks.cost import Shape, tflops
from benchmarks.model import Around, Decoder, MasterAdamW, identity_layer, make_routes, sum_shared_gradients
from benchmarks.place import Place
from build_tools.tomlfile import read_toml

ARMS = {"fused": "cuda", "grouped": "grouped", "reference": "reference"}
DOCUMENTS = {"packed-4k": 4096, "single-16k": 16384}
MAX_LOSS_DIFFERENCE = 2e-3  # relative, between two arms at equal parameters: bf16 rounding of a few layers
MAX_NORM_DIFFERENCE = 2e-2


class Steps:
    """One training step at a time, with the experts of the chosen arm."""

    def __init__(self, args: argparse.Namespace, shape: Shape, tokens: int, place: Place) -> None:
        sizes = read_toml(bench.HERE / "models.toml")[shape.name]
        self.around = Around(**sizes)
        self.place = place
        torch.manual_seed(7)  # the same dense parameters on every rank
        self.model = Decoder(shape, self.around, shape.num_experts // place.ep, place.device)
        gen = torch.Generator(place.device).manual_seed(100 + place.rank)
        length = min(DOCUMENTS[args.documents], tokens)
        ids = torch.randint(0, self.around.vocabulary, (tokens // length, length), generator=gen, device=place.device)
        self.ids = ids
        self.routes = make_routes(shape, self.around, tokens, args.routing, gen)
        self.optimizer = MasterAdamW(list(self.model.parameters()), lr=1e-5)

    def gradients(self) -> torch.Tensor:
        """Forward and backward; the loss."""
        loss: torch.Tensor = self.model(self.ids, self.routes)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def run(self, _prepared: Any = None) -> None:
        """A whole step."""
        self.gradients()
        sum_shared_gradients(self.model, self.place.group)
        self.optimizer.step()

    def probe(self, arm: Arm) -> tuple[float, float]:
        """(loss, norm of all gradients) of an arm at the current parameters, which stay as they are."""
        self.model.use(arm.layer)
        loss = self.gradients().item()
        norms = torch.stack([p.grad.float().norm() for p in self.model.parameters() if p.grad is not None])
        self.model.zero_grad()
        return loss, float(norms.norm())

    def variant(self, arm: Arm) -> timing.Variant:
        """The arm's step, ready to be timed."""

        def prepare(_index: int) -> None:
            self.model.use(arm.layer)

        return timing.Variant(arm.name, prepare, self.run)


def make_arms(args: argparse.Namespace, shape: Shape, tokens: int, place: Place) -> list[Arm]:
    """The arms named on the command line, and identity."""
    options: dict[str, Any] = {"tokens": tokens, "device": place.device, "group": place.group, "save": args.save}
    arms = []
    for name in args.arms.split(","):
        precision = args.precision if name == "fused" else "bf16"
        made = package_arm(ARMS[name], shape, precision=precision, **options)
        arms.append(Arm(name, made.layer, made.backend, made.engine, made.runtime))
    return [*arms, Arm("identity", identity_layer, None, None)]


def run_step(args: argparse.Namespace, shape: Shape, tokens: int, place: Place) -> list[dict[str, Any]]:
    """Check the arms, time them in turns, print, and return a record of each."""
    torch._dynamo.reset()
    arms = make_arms(args, shape, tokens, place)
    verdicts = check_arms(args, arms[:-1], shape, tokens, place)
    if any(verdict.problems for verdict in verdicts.values()):
        return []
    steps = Steps(args, shape, tokens, place)
    probes = {arm.name: steps.probe(arm) for arm in arms[:-1]}
    if not agree(probes, place):
        return []
    variants = [steps.variant(arm) for arm in arms]
    times = timing.measure(variants, device=place.device, rounds=args.rounds, warmups=args.warmups, group=place.group)
    medians = {name: place.slowest(took.ms) for name, took in times.items()}
    found = []
    for arm, variant in zip(arms, variants, strict=True):
        took, share = times[arm.name], 1.0 - medians["identity"] / medians[arm.name]
        place.say(
            f"  step {args.documents} {arm.name:<10} {medians[arm.name]:9.2f} ms  p10 {took.p10:.2f}"
            f"  p90 {took.p90:.2f}  experts {share:.0%}  {tokens / medians[arm.name] * 1e3:.0f} tokens/s per GPU"
        )
        if arm.name in verdicts:
            found.append(make_record(args, arm, variant, steps, verdicts[arm.name], times, medians, shape, tokens))
    for arm in arms:
        arm.close()
    return found


def check_arms(
    args: argparse.Namespace, arms: list[Arm], shape: Shape, tokens: int, place: Place
) -> dict[str, numerics.Verdict]:
    """Numerics of every arm's layer by itself."""
    batch = bench.make_batches(shape, tokens, args.routing, place)[0]
    verdicts = {arm.name: bench.check_arm(arm, batch, place) for arm in arms}
    for name, verdict in verdicts.items():
        for problem in verdict.problems[:5]:
            place.say(f"  {name}: WRONG {problem}")
    return verdicts


def agree(probes: dict[str, tuple[float, float]], place: Place) -> bool:
    """Whether all arms see the same loss and gradient norm."""
    (first, (loss, norm)), *others = probes.items()
    good = True
    for name, (other_loss, other_norm) in others:
        off = abs(other_loss / loss - 1), abs(other_norm / norm - 1)
        if not (off[0] < MAX_LOSS_DIFFERENCE and off[1] < MAX_NORM_DIFFERENCE):
            place.say(f"  WRONG {name} against {first}: loss differs by {off[0]:.1e}, gradient norm by {off[1]:.1e}")
            good = False
    return place.slowest(float(not good)) == 0.0


def make_record(
    args: argparse.Namespace,
    arm: Arm,
    variant: timing.Variant,
    steps: Steps,
    verdict: numerics.Verdict,
    times: dict[str, timing.Timing],
    medians: dict[str, float],
    shape: Shape,
    tokens: int,
) -> dict[str, Any]:
    """The record of one arm; the grouped arm of the same run is its baseline, without an anchor and so no ratio."""
    took, place = times[arm.name], steps.place
    with telemetry.Sampler(place.device.index or 0) as sampler:
        sustained, _ = timing.sustain(variant, device=place.device, seconds=args.sustain, group=place.group)
    rows = tokens * shape.topk * steps.around.layers
    return {
        **bench.configuration(args, "step", shape, tokens, arm, place),
        "arm": arm.name,
        "documents": args.documents,
        "identity_ms": round(medians["identity"], 4),
        "moe_share": round(1.0 - medians["identity"] / medians[arm.name], 4),
        "ms": round(medians[arm.name], 4),
        "p10": round(place.slowest(took.p10), 4),
        "p90": round(place.slowest(took.p90), 4),
        "n": took.n,
        "host_us": round(took.host_us, 1),
        "baseline": "grouped" if "grouped" in medians else None,
        "baseline_ms": round(medians["grouped"], 4) if "grouped" in medians else None,
        "ratio": None,
        # Of the experts alone, forward twice (checkpointing) and backward, over the whole step.
        "tflops": round(
            tflops("forward", shape, rows, medians[arm.name])
            + tflops("forward+backward", shape, rows, medians[arm.name]),
            1,
        ),
        "rel_err": verdict.rel_err,
        "peak_mib": bench.peak_mib(variant, place),
        "clock_mhz": sampler.median("clock_mhz"),
        "power_w": sampler.median("power_w"),
        "sustained_ms": round(place.slowest(sustained), 4),
        "dense_tflops": None,
    }
