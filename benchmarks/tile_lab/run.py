# SPDX-License-Identifier: Apache-2.0
"""Tile lab: measure candidate anatomies of a grouped GEMM on the layer's tile types.

`python benchmarks/tile_lab/run.py build` compiles lab.cu to build/tile_lab.cubin with the compiler that PyPI carries,
without a GPU. `run.py measure --out DIR` runs every case in a process of its own that is stopped when it hangs (one
H200, some minutes), appends to DIR/tile_lab.jsonl and prints one table. `run.py table FILE` prints that of a file.

Every expert of every result is checked against fp32 torch before and after the timing; a wrong case has no time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import watchdog  # noqa: E402  (after the path of the package)
from benchmarks.tile_lab import table  # noqa: E402
from build_tools import resource_report, toolchain  # noqa: E402

SOURCE = Path(__file__).resolve().with_name("lab.cu")
CUBIN = ROOT / "build" / "tile_lab.cubin"
RECORDS = "tile_lab.jsonl"
SHAPES = {"30b": "qwen3-30b-a3b", "235b": "qwen3-235b-a22b"}
SMALL = (
    "g1_i_c2", "g1_i_c1", "g1_iii_c2", "g2_i_c2", "g2_i_c1", "g2_iii_c2", "g2_ii_c2", "d2_i_c2", "d2_i_c1", "w_i_c2",
    "w_i_c1", "w_iii_c2", "w32_i_c2",
)  # fmt: skip
LARGE = ("g1_i_c2", "g2_i_c2", "d2_i_c2", "w_i_c2", "w32_i_c2")
CASES = tuple((name, shape) for shape, names in (("30b", SMALL), ("235b", LARGE)) for name in names)

_ENTRY = re.compile(r"^.*Compiling entry function '(\w+)'.*$", re.M)
_ADVICE = re.compile(r"^.*\bC7[56]\d\d\b.*$", re.M)


class BuildError(RuntimeError):
    """The compiler failed, or its kernels must not be measured."""


def build_report(log: str) -> tuple[list[str], list[str]]:
    """(a line per kernel, what is wrong) from the output of ptxas -v."""
    parts = _ENTRY.split(log)
    lines, found = [], [line.strip() for line in _ADVICE.findall(log)]
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        usage = resource_report.parse_log(text)
        lines.append(f"{name}: {usage.registers} registers")
        if usage.stack or usage.spill_stores or usage.spill_loads:
            found.append(f"{name} keeps {usage.stack} bytes of stack, spills {usage.spill_stores} bytes")
    if not lines:
        found.append("no kernel was compiled")
    return lines, found


def build(out: Path) -> list[str]:
    """Compile lab.cu to `out`; a line per kernel.

    Raises:
        BuildError: nvcc failed, or a kernel spills or has its tensor-core instructions serialised.
        toolchain.ToolchainError: the compiler could not be installed.
    """
    tools = toolchain.ensure()
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [str(tools.nvcc), "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
    done = subprocess.run(
        [*command, "-o", str(out), str(SOURCE)], env=tools.environment(), capture_output=True, text=True, timeout=900
    )
    log = done.stdout + done.stderr
    if done.returncode:
        raise BuildError(f"nvcc exited {done.returncode}:\n{log.strip()[-6000:]}")
    lines, found = build_report(log)
    if found:
        out.unlink()
        raise BuildError("\n".join(found))
    return lines


def about() -> dict[str, Any]:
    """What a record says about where it was measured."""
    import torch

    from benchmarks import stamp, telemetry

    stamped, why = stamp.read_stamp(ROOT)
    if stamped is None:
        print(f"no commit in the record: {why}", flush=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": telemetry.query_gpu(0)["driver"],
        "torch": torch.__version__,
        "commit": stamped and stamped["commit"],
        "dirty": stamped and stamped["dirty"],
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def run_case(name: str, shape: str, out: Path) -> None:
    """Check and time one case in this process; one record into `out`."""
    from benchmarks.tile_lab import timed

    record = {"case": name, "shape": shape, **about(), **timed.run(CUBIN.read_bytes(), name, SHAPES[shape])}
    out.write_text(json.dumps(record) + "\n")


def watched_case(name: str, shape: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """The record of one case, run in a process of its own; one with "error" if it left none. A failure's log stays."""
    log = folder / f"tile_lab-{name}-{shape}.log"
    with tempfile.TemporaryDirectory(prefix="prime-kernels-tile-lab-") as scratch:
        out = Path(scratch) / "record.jsonl"
        command = [sys.executable, str(Path(__file__).resolve()), "case", "--name", name, "--shape", shape]
        env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        done = watchdog.run_watched([*command, "--out", str(out)], log=log, limit_s=limit_s, env=env, cwd=ROOT)
        found = table.read(out) if out.is_file() else []
    if done.rc == 0 and len(found) == 1:
        if "error" not in found[0]:
            log.unlink()
        return found[0]
    last = "; ".join(done.tail(1)) or "no output"
    return {"case": name, "shape": shape, "error": f"{done.ending()}: {last}"}


def measure(
    cases: Sequence[tuple[str, str]], folder: Path, *, limit_s: float, budget_s: float
) -> Iterator[dict[str, Any]]:
    """Run the cases one after the other and append their records; each gets at most `limit_s` seconds."""
    deadline = time.monotonic() + budget_s
    for name, shape in cases:
        left = deadline - time.monotonic()
        if left < 5:
            record: dict[str, Any] = {"case": name, "shape": shape, "error": "not run, no time left"}
        else:
            record = watched_case(name, shape, folder, min(limit_s, left))
        with (folder / RECORDS).open("a") as file:
            file.write(json.dumps(record) + "\n")
        yield record


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line; argparse exits with 2 on a bad one."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build")
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True, metavar="DIR")
    measuring.add_argument("--only", default="", metavar="TEXT", help="cases whose name@shape contains this")
    measuring.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="of one case")
    measuring.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="of all cases")
    one = verbs.add_parser("case", help="one case in this process; for measure's use")
    one.add_argument("--name", required=True)
    one.add_argument("--shape", required=True, choices=SHAPES)
    one.add_argument("--out", type=Path, required=True, metavar="FILE")
    verbs.add_parser("table").add_argument("file", type=Path)
    return parser.parse_args(argv)


def interrupt(_number: int, _frame: object) -> None:
    """SIGTERM as Ctrl-C, so that no case is left running."""
    raise KeyboardInterrupt


def run_measure(args: argparse.Namespace) -> int:
    """Measure what is asked for, print the records and the table; 0 if every case has times, else 1."""
    cases = [case for case in CASES if args.only in "@".join(case)]
    if not cases or not CUBIN.is_file():
        print(f"no case has {args.only!r} in its name" if not cases else f"{CUBIN} is missing; run.py build makes it")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    previous = signal.signal(signal.SIGTERM, interrupt)
    records: list[dict[str, Any]] = []
    try:
        for record in measure(cases, args.out.resolve(), limit_s=args.limit, budget_s=args.budget):
            records.append(record)
            print(json.dumps(record), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(f"\n{table.render(records)}", flush=True)
    return int(len(records) < len(cases) or any("error" in record for record in records))


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    args = parse(argv)
    if args.verb == "measure":
        return run_measure(args)
    if args.verb == "case":
        run_case(args.name, args.shape, args.out)
    elif args.verb == "table":
        print(table.render(table.read(args.file)))
    else:
        try:
            print("\n".join(build(CUBIN)))
        except (BuildError, toolchain.ToolchainError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
