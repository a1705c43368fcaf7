# SPDX-License-Identifier: Apache-2.0
"""What ptxas says about each cubin, and what is wrong with it: spills, stack, serialised wgmma, register sums.

Usage: python -m build_tools.resource_report [build/report.json] [--against OLD.json]
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
META_BYTES = 72
META_SCHEMA = 1
MAX_ROLES = 4

# ptxas advisories that mean slow code: C7508 and C7602 (setmaxnreg ignored), C7510 (wgmma serialised), and their kin.
_ADVICE = re.compile(r"\bC7[5-6]\d\d\b")
_PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class LaunchMeta:
    """struct LaunchMeta of kernels_src/common/launch_meta.cuh. Roles are (threads, registers per thread)."""

    schema: int
    threads: int
    smem_bytes: int
    cluster: int
    min_ctas: int
    protocol: int
    args_bytes: int
    args_hash: str
    roles: tuple[tuple[int, int], ...]

    @staticmethod
    def unpack(data: bytes) -> LaunchMeta:
        """Reads the struct from a cubin's `pk_launch_meta`."""
        if len(data) != META_BYTES:
            raise ValueError(f"LaunchMeta has {len(data)} bytes, need {META_BYTES}")
        schema, threads, smem, cluster, min_ctas, protocol, args_bytes, _, args_hash = struct.unpack_from("<8IQ", data)
        numbers = struct.unpack_from(f"<{2 * MAX_ROLES}I", data, 40)
        roles = tuple((t, r) for t, r in zip(numbers[:MAX_ROLES], numbers[MAX_ROLES:], strict=True) if t)
        return LaunchMeta(schema, threads, smem, cluster, min_ctas, protocol, args_bytes, f"{args_hash:016x}", roles)


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel as ptxas printed them."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem_static: int
    advice: tuple[str, ...] = field(default=())


def parse_log(text: str) -> Usage:
    """Reads the output of `ptxas -v` for a file with one kernel; worst numbers over all its functions."""
    rows = [tuple(map(int, m.groups())) for m in _PROPERTIES.finditer(text)]
    registers = [int(m[1]) for m in _USED.finditer(text)]
    if not rows or len(registers) != 1:
        raise ValueError(f"ptxas -v described {len(registers)} kernels, need 1:\n{text.strip()}")
    stack, stores, loads = (max(row[i] for row in rows) for i in range(3))
    smem = _SMEM.search(text)
    advice = tuple(line.strip() for line in text.splitlines() if _ADVICE.search(line))
    return Usage(registers[0], stack, stores, loads, int(smem[1]) if smem else 0, advice)


def problems(usage: Usage, meta: LaunchMeta, max_regs: int = 255) -> list[str]:
    """Sentences about what must not ship; empty when all is well."""
    found = []
    if usage.spill_stores or usage.spill_loads:
        found.append(f"spills {usage.spill_stores} bytes of stores and {usage.spill_loads} of loads")
    elif usage.stack:
        found.append(f"keeps {usage.stack} bytes of stack (an array indexed at run time, or a call)")
    found += [f"ptxas advises: {line}" for line in usage.advice]
    if usage.registers > max_regs:
        found.append(f"uses {usage.registers} registers, the row in variants.toml allows {max_regs}")
    granted = -(-usage.registers // 8) * 8
    if granted * meta.threads * meta.min_ctas > 65536:
        found.append(f"{granted} registers x {meta.threads} threads x {meta.min_ctas} CTAs exceed the file of 65536")
    wanted = sum(threads * registers for threads, registers in meta.roles)
    if wanted > granted * meta.threads:
        found.append(
            f"its roles want {wanted} registers, the launch grants {granted} x {meta.threads} = "
            f"{granted * meta.threads}: setmaxnreg.inc would wait for ever"
        )
    return found


def row(key: str, arch: str, pack_set: str, usage: Usage, meta: LaunchMeta, found: list[str]) -> dict[str, Any]:
    """One record of the report."""
    place = {"key": key, "arch": arch, "set": pack_set}
    return {**place, **asdict(usage), "threads": meta.threads, "smem_dynamic": meta.smem_bytes, "problems": found}


def render(rows: list[dict[str, Any]]) -> str:
    """The report as a table."""
    head = ("KEY", "ARCH", "SET", "REGS", "SPILL", "STACK", "SMEM", "THREADS")
    table: list[tuple[str, ...]] = [head]
    for r in rows:
        spills, smem = r["spill_stores"] + r["spill_loads"], r["smem_static"] + r["smem_dynamic"]
        cells = (r["key"], r["arch"], r["set"], r["registers"], spills, r["stack"], smem, r["threads"])
        table.append(tuple(map(str, cells)))
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += [f"PROBLEM {r['key']} {r['arch']}/{r['set']}: {p}" for r in rows for p in r["problems"]]
    return "\n".join(lines)


def changes(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """Lines on cubins whose registers, stack or shared memory differ from an older report."""
    before = {(r["key"], r["arch"], r["set"]): r for r in old}
    lines = []
    for record in new:
        past = before.get((record["key"], record["arch"], record["set"]))
        for name in ("registers", "stack", "smem_static", "smem_dynamic"):
            if past and past[name] != record[name]:
                place = f"{record['key']} {record['arch']}/{record['set']}"
                lines.append(f"{place}: {name} {past[name]} -> {record[name]}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Command line entry; exit 1 when the report holds a problem."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.resource_report", description=__doc__)
    parser.add_argument("report", type=Path, nargs="?", default=ROOT / "build" / "report.json")
    parser.add_argument("--against", type=Path, help="an older report; differences are printed")
    args = parser.parse_args(argv)
    if not args.report.is_file():
        print(f"error: no {args.report}; run python -m build_tools.build_cubins first", file=sys.stderr)
        return 2
    rows = json.loads(args.report.read_text())
    print(render(rows))
    if args.against:
        print("\n".join(changes(json.loads(args.against.read_text()), rows)) or "no difference")
    return 1 if any(r["problems"] for r in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
