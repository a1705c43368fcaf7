# SPDX-License-Identifier: Apache-2.0
"""The steps of one_gpu.py: which commands, what in their output decides, what is worth a line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import one_gpu_reports as reports
from benchmarks import stamp
from benchmarks.watchdog import Finished, run_watched

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
SHAPES = {"30b": "qwen3-30b-a3b", "235b": "qwen3-235b-a22b"}
TOKENS = "16384"
REFERENCE_TESTS = "test_torch_backends.py"
# Of virtual ranks, 16384 tokens in all: shape, ranks, GB/s of a rank's link that keep what as many GPUs would have.
VIRTUAL = {"30b-2": ("30b", 2, 165.0), "235b-2": ("235b", 2, 165.0), "30b-8": ("30b", 8, 41.25)}
MAX_FIRST_CALL_S, MAX_LAUNCH_US, MAX_COMPILE_S, GEMM_SHARE = 0.3, 10.0, 3.0, 0.9


class StepError(Exception):
    """A step failed: why, in a line, and lines that help."""

    def __init__(self, reason: str, details: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.details = list(details)


@dataclass(frozen=True)
class Job:
    """What a step works with: where logs go, a folder for itself, and the time at which it must be over."""

    name: str
    out: Path
    scratch: Path
    deadline: float

    def run(
        self,
        what: str,
        command: Sequence[str],
        *,
        limit_s: float,
        codes: Sequence[int] | None = (0,),
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> Finished:
        """Run a command, its log beside the others.

        Raises:
            StepError: it did not end, or with none of `codes` (None: any).
        """
        left = self.deadline - time.monotonic()
        if left < 1:
            raise StepError(f"no time left for {what or self.name}")
        parts = [self.name.replace(":", "-"), *([what] if what else [])]
        log = self.out / f"{'-'.join(parts)}.log"
        merged = {**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})}
        done = run_watched(command, log=log, limit_s=min(limit_s, left), env=merged, cwd=cwd)
        if done.rc is None or (codes is not None and done.rc not in codes):
            raise StepError(f"{what or self.name}: {done.ending()}; {log.name}", done.tail(reports.MAX_DETAILS))
        return done


@dataclass(frozen=True)
class Step:
    """One entry of the table. `alone`: nothing else may use the machine meanwhile, since it is timed."""

    name: str
    limit_s: float
    work: Callable[[Job], list[str]]
    alone: bool = False


def pytest_step(name: str, path: Path, limit_s: float, *options: str) -> Step:
    """One test file in a process of its own."""

    def work(job: Job) -> list[str]:
        command = [PYTHON, "-m", "pytest", str(path), *options, "-q", "--tb=short", "--color=no"]
        done = job.run("", [*command, "-p", "no:cacheprovider"], limit_s=limit_s, codes=None)
        counts = reports.pytest_counts(done.text)
        if done.rc != 0:
            reasons = reports.pytest_failures(done.text) or done.tail(reports.MAX_DETAILS)
            raise StepError(f"{counts or done.ending()}; {name.replace(':', '-')}.log", reasons)
        return [counts]

    return Step(name, limit_s, work)


def recorded(job: Job, command: list[str], record: bool, limit_s: float) -> tuple[Finished, list[str]]:
    """Run a benchmark; records go to the job's files, and a note says why there are none."""
    fits, why_not = stamp.read_stamp(ROOT)
    recording = record and fits is not None
    results = job.scratch / "results"
    options = ["--record", "--results", str(results)] if recording else []
    done = job.run("", [*command, *options], limit_s=limit_s, codes=None)
    for path in results.rglob("*.jsonl") if recording else []:
        shutil.copy(path, job.out / f"results__{path.parent.name}__{path.name}")
    return done, [] if recording else [f"NOT RECORDED: {why_not or 'as asked'}"]


def bench_step(name: str, shape: str, *, record: bool) -> Step:
    def work(job: Job) -> list[str]:
        command = [PYTHON, "benchmarks/bench.py", "forward", "backward", "--backend", "cuda", "--tokens", TOKENS]
        done, note = recorded(job, [*command, "--shapes", shape], record, 150)
        lines, wrongs = reports.bench_lines(done.text), reports.bench_wrongs(done.text)
        if done.rc != 0 or len(lines) != 2:
            raise StepError(f"{done.ending()}, {len(lines)} of 2 ops timed", [*lines, *wrongs, *done.tail(8)])
        return [*lines, *(f"another arm: {wrong}" for wrong in wrongs), *note]

    return Step(name, 160, work, alone=True)


def virtual_step(name: str, shape: str, ranks: int, pace: float, *, record: bool) -> Step:
    """Expert parallelism among virtual ranks, in turns with one rank."""

    def work(job: Job) -> list[str]:
        command = [PYTHON, "benchmarks/bench.py", "forward", "backward", "--shapes", shape, "--rounds", "15"]
        command += ["--virtual-ranks", str(ranks), "--tokens", str(int(TOKENS) // ranks), "--pacing", str(pace)]
        done, note = recorded(job, command, record, 90)
        lines = [line.strip() for line in done.text.splitlines() if "; one rank " in line]
        if done.rc != 0 or len(lines) != 2:
            wrongs = reports.bench_wrongs(done.text)
            raise StepError(f"{done.ending()}, {len(lines)} of 2 ops timed", [*lines, *wrongs, *done.tail(8)])
        return [*lines, *note]

    return Step(name, 100, work, alone=True)


def bare_environment(packages: Path) -> dict[str, str]:
    """Variables under which `packages` is where prime_kernels comes from."""
    return {"PYTHONPATH": str(packages)}


def probe(job: Job, what: str, parts: Sequence[str], packages: Path, **env: str) -> dict[str, Any]:
    """Run gpu_probe.py outside the repository against the package below `packages`; its report.

    Raises:
        StepError: it failed, asked another package, or a result was wrong or not repeatable.
    """
    place = job.scratch / f"{job.name}-{what}"
    place.mkdir()
    shutil.copy(ROOT / "benchmarks" / "gpu_probe.py", place)
    environment = bare_environment(packages) | env
    done = job.run(what, [PYTHON, "gpu_probe.py", *parts], limit_s=60, env=environment, cwd=place)
    found = reports.last_json(done.text)
    if found is None:
        raise StepError(f"{what} printed no report", done.tail(reports.MAX_DETAILS))
    if not Path(found["package"]).resolve().is_relative_to(packages.resolve()):
        raise StepError(f"{what} asked {found['package']}, not the package in {packages}")
    for word in ("right", "repeatable"):
        bad = [key for key, fine in found[word].items() if not fine]
        if bad:
            raise StepError(f"{what}: not {word}: {', '.join(bad)}")
    return found


def over(limits: Mapping[str, tuple[float, float]], unit: str) -> list[str]:
    """What exceeds its limit, in words."""
    return [f"{name} {got:.3g} {unit}, at most {most:g}" for name, (got, most) in limits.items() if got > most]


def short_key(key: str) -> str:
    return key.split("|")[0]


def install_wheel(job: Job) -> tuple[Path, str]:
    """(folder with the installed wheel beside the system's torch, a line about its packs)."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise StepError(f"dist/ holds {len(wheels)} wheels; need one")
    target = job.scratch / "wheel"
    pip = [PYTHON, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check"]
    job.run("pip", [*pip, "--target", str(target), str(wheels[0])], limit_s=60, cwd=job.scratch)
    packs = [folder / "prime_kernels" / "_packs" / "MANIFEST.json" for folder in (target, ROOT)]
    same = all(path.is_file() for path in packs) and len({path.read_bytes() for path in packs}) == 1
    return target, f"{wheels[0].name}, packs {'as in the tree' if same else 'DIFFER from the tree: an older build?'}"


def wheel(job: Job) -> list[str]:
    """The wheel as a user has it: installed elsewhere, asked from elsewhere."""
    target, what = install_wheel(job)
    (job.scratch / "elsewhere").mkdir()
    doctor = [PYTHON, "-m", "prime_kernels", "doctor", "--json"]
    where: dict[str, Any] = {"env": bare_environment(target), "cwd": job.scratch / "elsewhere"}
    done = job.run("doctor", doctor, limit_s=60, codes=None, **where)
    said = reports.last_json(done.text) or {}
    verdict = " ".join([str(said.get("result", "silent")), *said.get("codes", ())])
    small = probe(job, "passengers", ["passengers", "gemm", "launch"], target)
    whole = probe(job, "layer", ["layer"], target)
    compiled = {key: origin for found in (small, whole) for key, origin in found["origins"].items()}
    compiled = {key: origin for key, origin in compiled.items() if "/" not in origin}
    first, parts, host = small["first_call_s"], whole["layer_s"], small["launch_us"]
    moved, general = host["moved"], host["general"]
    first_key, first_s = next(iter(first.items()))
    layer_s = parts["create"] + parts["forward"]
    lines = [
        f"{what}; doctor {verdict}; passengers, GEMM and layer right and repeatable",
        f"first call {short_key(first_key)} {first_s:.3f} s, layer {layer_s:.3f} s "
        f"({', '.join(f'{name} {took:.3f}' for name, took in parts.items())})",
        f"launch of {short_key(host['key'])} {host['median']:.1f} us (p90 {host['p90']:.1f}) with {host['maps']} maps, "
        f"{moved['median']:.1f} us where all addresses are new; general path: {short_key(general['key'])} "
        f"{general['median']:.1f} us with {general['maps']}",
    ]
    limits = {f"first call of {first_key}": (first_s, MAX_FIRST_CALL_S), "of the layer": (layer_s, MAX_FIRST_CALL_S)}
    problems = over(limits, "s") + over({"launch": (host["median"], MAX_LAUNCH_US)}, "us")
    problems += [f"{key} came from {origin}, not from a pack" for key, origin in compiled.items()]
    if done.rc != 0 or verdict != "ok":
        problems.append(f"doctor: {verdict}, {done.ending()}")
    if problems:
        raise StepError("; ".join(problems), lines)
    return lines


def path_without_nvcc() -> str:
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder and not Path(folder, "nvcc").exists())


def jit(job: Job) -> list[str]:
    """The same kernels without packs: compiled in the process, cached, and the bits of the packed ones."""
    bare, cache = job.scratch / "bare", job.scratch / "cache"
    ignored = shutil.ignore_patterns("_packs", "__pycache__")
    shutil.copytree(ROOT / "prime_kernels", bare / "prime_kernels", ignore=ignored)
    cache.mkdir(mode=0o700)
    private = {"PRIME_KERNELS_CACHE_DIR": str(cache), "PATH": path_without_nvcc()}
    parts = ["passengers", "gemm", "layer", "--time-loads"]
    packed = probe(job, "packed", parts, ROOT)
    built = probe(job, "built", parts, bare, **private)
    cached = probe(job, "cached", parts, bare, **private)
    took = built["load_s"]
    each = ", ".join(f"{short_key(key)} {s:.2f}" for key, s in took.items())
    lines = [
        f"{len(took)} kernels compiled in {sum(took.values()):.2f} s, the slowest {max(took.values()):.2f} s ({each})",
        f"from the cache {sum(cached['load_s'].values()):.3f} s, packed {sum(packed['load_s'].values()):.3f} s for all",
    ]
    problems = over({key: (s, MAX_COMPILE_S) for key, s in took.items()}, "s")
    for what, found, origin in (("packed", packed, "/"), ("built", built, "built"), ("cached", cached, "cache")):
        problems += [f"{what}: {key} came from {got}" for key, got in found["origins"].items() if origin not in got]
    for found in (built, cached):
        wrong = [key for key, bits in packed["digests"].items() if found["digests"].get(key) != bits]
        problems += [f"{key} has other bits than the packed one" for key in wrong]
    if problems:
        raise StepError("; ".join(problems), lines)
    return [*lines, f"bits of the packed ones: {', '.join(short_key(key) for key in packed['digests'])}"]


def sanitizer_step(tool: str, *, expect_errors: bool = False) -> Step:
    """compute-sanitizer over a small forward and backward; with `expect_errors`, over a read past an end."""
    what = "control" if expect_errors else tool

    def work(job: Job) -> list[str]:
        program = shutil.which("compute-sanitizer")
        if program is None:
            raise StepError("compute-sanitizer is not on PATH")
        command = [program, "--tool", tool, "--kernel-name", "kernel_substring=pk_", "--report-api-errors", "no"]
        command += ["--require-cuda-init", "no"]
        command += [PYTHON, "-m", "tests.sanitizer.small", *(["--read-past-the-end"] if expect_errors else [])]
        done = job.run("", command, limit_s=90, codes=None, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        summary = reports.sanitizer_summary(done.text)
        if summary is None:
            raise StepError(f"{done.ending()} without a summary", done.tail(reports.MAX_DETAILS))
        errors, line = summary
        if expect_errors:
            if not errors:
                raise StepError("a read past the end was not noticed: the other runs prove nothing", [line])
            return [f"a read past the end is noticed: {line}"]
        said = reports.last_json(done.text)
        if errors or done.rc != 0 or said is None:
            raise StepError(f"{line}; {done.ending()}", reports.sanitizer_findings(done.text) + done.tail(6))
        return [f"{line}; {said['launches']} launches of {said['kernels']} kernels, worst error {said['worst']:.1e}"]

    return Step(f"sanitizer:{what}", 95, work)


def demo(job: Job) -> list[str]:
    folder = job.scratch / "demo"
    command = [PYTHON, "-m", "prime_kernels", "demo", "--json", "--device", "cuda", "--out", str(folder)]
    done = job.run("", command, limit_s=90)
    for path in folder.glob("*.png"):
        shutil.copy(path, job.out / f"demo-{path.name}")
    said = reports.last_json(done.text)
    if said is None or said["backend"] != "cuda":
        raise StepError(f"backend {said and said['backend']}, need cuda", done.tail(reports.MAX_DETAILS))
    return [
        f"{said['backend']} on {said['device']}: loss {said['first_loss']:.4f} -> {said['final_loss']:.4f} "
        f"(plain {said['plain_final_loss']:.4f}), curves differ by {said['max_relative_difference']:.1e} of "
        f"{said['allowed_difference']:.0e}, step {said['step_ms']:.2f} ms (plain {said['plain_step_ms']:.2f})"
    ]


def grouped_gemm(job: Job) -> list[str]:
    command = [PYTHON, "benchmarks/bench_grouped_gemm.py", "--out", str(job.out / "grouped_gemm.jsonl")]
    done = job.run("", command, limit_s=120, codes=None)
    lines, short = reports.gemm_rates(done.text, GEMM_SHARE)
    if done.rc != 0 or short or not lines:
        raise StepError("; ".join(short) or done.ending(), lines or done.tail(reports.MAX_DETAILS))
    return lines


def all_steps(*, record: bool = True) -> list[Step]:
    """Every step, the important ones first."""
    tests = [path for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")) if path.name != REFERENCE_TESTS]
    return [
        *(
            pytest_step(f"gpu-tests:{path.stem.removeprefix('test_')}", path, 200, "--require-gpu", "-m", "not soak")
            for path in tests
        ),
        *(bench_step(f"bench:{short}", shape, record=record) for short, shape in SHAPES.items()),
        *(
            virtual_step(f"virtual:{name}", SHAPES[short], ranks, pace, record=record)
            for name, (short, ranks, pace) in VIRTUAL.items()
        ),
        Step("wheel", 120, wheel, alone=True),
        Step("jit", 120, jit, alone=True),
        sanitizer_step("memcheck"),
        sanitizer_step("racecheck"),
        sanitizer_step("memcheck", expect_errors=True),
        Step("demo", 95, demo),
        pytest_step("reference-cuda", ROOT / "tests" / "gpu" / REFERENCE_TESTS, 150, "--require-gpu"),
        Step("grouped-gemm", 130, grouped_gemm, alone=True),
    ]


def as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(rows), indent=1) + "\n"
