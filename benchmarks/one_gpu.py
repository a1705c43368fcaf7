# SPDX-License-Identifier: Apache-2.0
"""Everything that one GPU can tell about this checkout: `python benchmarks/one_gpu.py --out DIR`.

GPU tests, recorded benchmarks, the wheel in dist/, the just-in-time path, compute-sanitizer, the demo and the grouped
GEMMs, each as processes of their own that are stopped when they hang. A failure never ends the run; logs and results
are flat files in DIR, and a table comes last. Needs packs and host library staged (`make stage`), build/stamp.json for
records (`make stamp`), and dist/*.whl for the step `wheel` (`make wheel`).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import watchdog  # noqa: E402  (after the path of the package)
from benchmarks.one_gpu_steps import Job, Step, StepError, all_steps, as_json  # noqa: E402

MAX_LINE = 230


@dataclass
class Outcome:
    """A row of the table; `verdict` is ok, FAILED or not run."""

    step: str
    verdict: str
    seconds: float
    lines: list[str]
    details: list[str] = field(default_factory=list)


def parse(argv: list[str] | None, steps: Sequence[Step]) -> argparse.Namespace:
    """Command line; argparse exits with 2 on a bad one."""
    parser = argparse.ArgumentParser(prog="one_gpu.py", description=__doc__)
    names = ", ".join(dict.fromkeys(step.name.split(":")[0] for step in steps))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="logs, results, summary")
    parser.add_argument("--only", default="", metavar="A,B", help=f"of {names}; or one part, as bench:30b")
    parser.add_argument("--skip", default="", metavar="A,B")
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="then what is left is not run")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes at once where nothing is timed")
    parser.add_argument("--no-record", action="store_true", help="measure, but write no records")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    args = parser.parse_args(argv)
    for word in filter(None, [*args.only.split(","), *args.skip.split(",")]):
        if not any(is_named(step, [word]) for step in steps):
            parser.error(f"no step {word!r}; there are {', '.join(step.name for step in steps)}")
    return args


def is_named(step: Step, words: Sequence[str]) -> bool:
    """Whether a word is the step's name or the part of it before the colon."""
    return step.name in words or step.name.split(":")[0] in words


def choose(steps: Sequence[Step], only: str, skip: str) -> list[Step]:
    """The steps that are asked for, in their order."""
    wanted, unwanted = (list(filter(None, words.split(","))) for words in (only, skip))
    return [step for step in steps if (not wanted or is_named(step, wanted)) and not is_named(step, unwanted)]


def run_step(step: Step, out: Path, scratch: Path, deadline: float) -> Outcome:
    """One step, whatever happens in it."""
    began = time.monotonic()
    if deadline - began < 2:
        return Outcome(step.name, "not run", 0.0, ["no time left"])
    try:
        lines = step.work(Job(step.name, out, scratch, min(deadline, began + step.limit_s)))
        return Outcome(step.name, "ok", time.monotonic() - began, lines)
    except StepError as error:
        return Outcome(step.name, "FAILED", time.monotonic() - began, [str(error)], error.details)
    except Exception as error:  # a fault of this program must not cost the other steps
        return Outcome(step.name, "FAILED", time.monotonic() - began, [f"{type(error).__name__}: {error}"])


def run_steps(steps: Sequence[Step], out: Path, *, jobs: int, budget_s: float) -> Iterator[Outcome]:
    """Run the steps: neighbours that time nothing at once, `jobs` at a time, the others alone."""
    deadline = time.monotonic() + budget_s
    watchdog.allow()
    with tempfile.TemporaryDirectory(prefix="prime-kernels-one-gpu-") as folder:
        scratch = Path(folder)
        for alone, group in groupby(steps, key=lambda step: step.alone):
            with ThreadPoolExecutor(1 if alone else jobs) as pool:
                try:
                    yield from pool.map(lambda step: run_step(step, out, scratch, deadline), group)
                except BaseException:
                    # Interrupted: the pool waits for its threads, and they for their processes.
                    pool.shutdown(wait=False, cancel_futures=True)
                    watchdog.stop_all()
                    raise


def table(outcomes: Sequence[Outcome]) -> str:
    """The rows, then what is known about failures."""
    width = max(len(outcome.step) for outcome in outcomes)
    rows = []
    for outcome in outcomes:
        head = f"{outcome.step:<{width}}  {outcome.verdict:<7}  {outcome.seconds:6.1f} s"
        first, *others = [line[:MAX_LINE] for line in outcome.lines] or [""]
        rows.append(f"{head}  {first}".rstrip())
        rows += [f"{'':<{len(head)}}  {line}" for line in others]
    for outcome in outcomes:
        if outcome.details:
            rows += ["", f"{outcome.step}:", *(f"  {line[:MAX_LINE]}" for line in outcome.details)]
    bad = [outcome.step for outcome in outcomes if outcome.verdict != "ok"]
    rows += ["", f"{len(outcomes) - len(bad)} of {len(outcomes)} steps ok" + (f"; {', '.join(bad)}" if bad else "")]
    return "\n".join(rows)


def interrupt(_number: int, _frame: object) -> None:
    """SIGTERM as Ctrl-C, so that nothing is left running."""
    raise KeyboardInterrupt


def main(argv: list[str] | None = None, steps: Sequence[Step] | None = None) -> int:
    """Run what is asked for; 0 if all of it was ok, else 1."""
    given = all_steps() if steps is None else steps
    args = parse(argv, given)
    if args.no_record and steps is None:
        given = all_steps(record=False)
    chosen = choose(given, args.only, args.skip)
    if args.list:
        print("\n".join(f"{step.name}{' (alone)' if step.alone else ''}" for step in chosen))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    previous = signal.signal(signal.SIGTERM, interrupt)
    outcomes: list[Outcome] = []
    try:
        for outcome in run_steps(chosen, out, jobs=args.jobs, budget_s=args.budget):
            print(f"{outcome.step}: {outcome.verdict} after {outcome.seconds:.0f} s", flush=True)
            outcomes.append(outcome)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
    missing = [step.name for step in chosen[len(outcomes) :]]
    outcomes += [Outcome(name, "not run", 0.0, ["interrupted"]) for name in missing]
    text = table(outcomes)
    (out / "summary.txt").write_text(text + "\n")
    (out / "summary.json").write_text(as_json([asdict(outcome) for outcome in outcomes]))
    print(f"\n{text}", flush=True)
    return int(any(outcome.verdict != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
