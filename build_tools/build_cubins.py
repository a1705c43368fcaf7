# SPDX-License-Identifier: Apache-2.0
"""variants.toml -> entry .cu -> PTX (nvcc) -> cubins (one ptxas a pack set) -> packs and a resource report.

Usage: python -m build_tools.build_cubins [--out build] [--arch sm_90a ...] [--set cu130 ...] [--jobs N] [--twice]

Every step is keyed by the content of its inputs, so an unchanged source is never compiled again. `--twice` builds a
second time from nothing in another folder and fails unless the packs are byte-identical.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_tools import entries, pack, resource_report
from build_tools.compile import BuildError, Job, make_cubin, make_ptx, publish
from build_tools.toolchain import Toolchain, ToolchainError, ensure
from build_tools.variants import ROOT, Variant, archs_of, read_variants
from prime_kernels.loader import elf

BUILD = ROOT / "build"


@dataclass(frozen=True)
class Selection:
    """What to build: these variants, those of their targets that are in `archs`, for these pack sets."""

    variants: tuple[Variant, ...]
    archs: tuple[str, ...]
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Made:
    """A finished cubin with its pack entry and report row."""

    job: Job
    cubin: bytes
    entry: dict[str, Any]
    report: dict[str, Any]


def describe(job: Job, cubin: bytes, log: str, frontend: str) -> Made:
    """Checks a cubin against its variant and writes its pack entry.

    Raises:
        BuildError: it holds other kernels than one, or its LaunchMeta disagrees with the argument layout.
    """
    variant, facts = job.entry.variant, elf.inspect(cubin)
    if list(facts.kernels) != [variant.kernel] or entries.META_SYMBOL not in facts.symbols:
        raise BuildError(f"{job}: holds kernels {list(facts.kernels)} and symbols {list(facts.symbols)}")
    if facts.sm != int(job.arch[3:-1]):
        raise BuildError(f"{job}: the cubin says sm_{facts.sm}")
    meta = resource_report.LaunchMeta.unpack(facts.symbols[entries.META_SYMBOL])
    kernel = facts.kernels[variant.kernel]
    layout = (meta.schema, meta.args_bytes, meta.args_hash, kernel.param_bytes)
    wanted = (resource_report.META_SCHEMA, job.entry.args.size, job.entry.args_hash, job.entry.args.size)
    if layout != wanted:
        raise BuildError(f"{job}: LaunchMeta and parameters say {layout}, the argument struct gives {wanted}")
    usage = resource_report.parse_log(log)
    found = resource_report.problems(usage, meta, variant.max_regs)
    entry = {
        "key": variant.key,
        "kernel": variant.kernel,
        "symbol": variant.kernel,
        "arch": job.arch,
        "toolkit": job.pack_set.version,
        "frontend": frontend,
        "elf_abi": facts.abi_version,
        "min_driver": job.pack_set.min_driver,
        "regs": usage.registers,
        "smem_static": usage.smem_static,
        "smem_bytes": meta.smem_bytes,
        "threads": meta.threads,
        "cluster": meta.cluster,
        "min_ctas": meta.min_ctas,
        "protocol": meta.protocol,
        "args_bytes": meta.args_bytes,
        "args_hash": meta.args_hash,
        "args": job.entry.fields,
        "src_fp": job.entry.fingerprint(),
        "status": "supported" if job.arch in variant.supported else "compiled",
        "facts": variant.facts,
    }
    report = resource_report.row(variant.key, job.arch, job.pack_set.name, usage, meta, found)
    return Made(job, cubin, entry, report)


def _write_packs(made: list[Made], tools: Toolchain, out: Path, *, whole: bool) -> None:
    """Writes packs and manifest; a whole build also removes packs of targets that no variant has any more."""
    written: set[Path] = set()
    groups: dict[tuple[str, str], list[Made]] = {}
    for item in made:
        groups.setdefault((item.job.pack_set.name, item.job.arch), []).append(item)
    for (set_name, arch), members in sorted(groups.items()):
        chosen = tools.sets[set_name]
        header = {"set": set_name, "arch": arch, "toolkit": chosen.version, "min_driver": chosen.min_driver}
        path = out / "packs" / set_name / f"{arch}{pack.SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, pack.write_pack(header, [(m.entry, m.cubin) for m in members]))
        written.add(path)
    for stale in set((out / "packs").glob(f"*/*{pack.SUFFIX}")) - written if whole else ():
        stale.unlink()
    pack.write_manifest(out / "packs")


def build(tools: Toolchain, out: Path, wanted: Selection, jobs: int) -> list[dict[str, Any]]:
    """Builds the selected packs below `out`; returns the report's rows, sorted.

    Raises:
        BuildError, entries.EntryError, structs.StructError: see there.
    """
    for name in ("generated", "ptx", "cubin", "packs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    made_entries = [entries.generate(v) for v in wanted.variants]
    for entry in made_entries:
        publish(out / "generated" / entry.variant.entry_name, entry.text.encode())

    def work(unit: tuple[entries.Entry, str]) -> list[Made]:
        entry, arch = unit
        ptx, finished = make_ptx(entry, arch, tools, out), []
        for name in wanted.sets:
            job = Job(entry, arch, tools.sets[name])
            finished.append(describe(job, *make_cubin(job, ptx, tools, out), tools.frontend_version))
        return finished

    units = [(e, a) for e in made_entries for a in e.variant.archs if a in wanted.archs]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        made = [item for group in pool.map(work, units) for item in group]
    whole = set(wanted.archs) == set(archs_of(wanted.variants)) and set(wanted.sets) == set(tools.sets)
    _write_packs(made, tools, out, whole=whole)
    rows = sorted((m.report for m in made), key=lambda r: (r["key"], r["arch"], r["set"]))
    (out / "report.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return rows


def differences(one: Path, other: Path) -> list[str]:
    """Names of packs that are not byte-identical below two folders."""
    names = {p.relative_to(f).as_posix() for f in (one, other) for p in f.glob(f"*/*{pack.SUFFIX}")}
    same = [n for n in names if (one / n).is_file() and (other / n).is_file()]
    equal = {n for n in same if (one / n).read_bytes() == (other / n).read_bytes()}
    return sorted(names - equal)


def _again(args: argparse.Namespace, tools: Toolchain, wanted: Selection) -> int:
    second = Path(tempfile.mkdtemp(prefix="prime-kernels-second-build-"))
    try:
        build(tools, second, wanted, args.jobs)
        differ = differences(args.out / "packs", second / "packs")
    finally:
        shutil.rmtree(second, ignore_errors=True)
    print(f"second build: {', '.join(differ)} differ" if differ else "second build: packs are byte-identical")
    return 1 if differ else 0


def main(argv: list[str] | None = None) -> int:
    """Command line entry; exit 1 on a problem in the report, a failed compile or a difference."""
    variants = read_variants()
    parser = argparse.ArgumentParser(prog="python -m build_tools.build_cubins", description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILD)
    parser.add_argument("--arch", action="append", choices=archs_of(variants), help="default: all of variants.toml")
    parser.add_argument("--set", action="append", choices=["cu129", "cu130"], dest="sets", help="default: both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--twice", action="store_true", help="build again from nothing and compare")
    args = parser.parse_args(argv)
    try:
        tools = ensure()
        print("\n".join(tools.check()))
        wanted = Selection(variants, tuple(args.arch or archs_of(variants)), tuple(args.sets or sorted(tools.sets)))
        rows = build(tools, args.out, wanted, args.jobs)
        print(resource_report.render(rows))
        status = 1 if any(r["problems"] for r in rows) else 0
        return status or (_again(args, tools, wanted) if args.twice else 0)
    except (BuildError, ToolchainError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
