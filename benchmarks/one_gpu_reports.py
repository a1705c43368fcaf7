# SPDX-License-Identifier: Apache-2.0
"""What matters in the output of the commands that one_gpu.py runs: pure functions from text to a few lines."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DETAILS = 12
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)")
_OP = r"^  (forward\+backward|forward|backward) +"
_TIME = re.compile(_OP + r"(\S+) +([\d.]+) ms  p10 ([\d.]+)  p90 ([\d.]+).* host (\d+)")
_NOTE = re.compile(_OP + r"((?:no )?ratio|sustained)(:? .*)$")
_RATE = re.compile(r"^  (\S+) +(\S+) +([\d.]+) ms .* ([\d.]+) TFLOP/s(?:.* deep_gemm's anchor ([\d.]+))?")
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed)(.*)")


def pytest_counts(text: str) -> str:
    """ "12 passed, 1 failed" of the last line that counts; "" if there is none."""
    for line in reversed(text.splitlines()):
        found = _COUNTS.findall(line)
        if found and re.search(r" in [\d.]+s", line):
            return ", ".join(f"{number} {word}" for number, word in found)
    return ""


def pytest_failures(text: str) -> list[str]:
    """Names of failed tests and the lines that say why, each once, not too many."""
    lines = [line.rstrip() for line in text.splitlines() if re.match(r"^(E  |FAILED |ERROR |E$)", line)]
    named = [line.split(" - ")[0] for line in lines if not line.startswith("E ")]
    reasons = [line for line in lines if line.startswith("E ") and line.strip() != "E"]
    return [line[:180] for line in dict.fromkeys([*named[:MAX_DETAILS], *reasons])][: 2 * MAX_DETAILS]


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object, or the object that the whole text is."""
    for part in (*reversed(text.splitlines()), text):
        if part.lstrip().startswith("{"):
            try:
                found = json.loads(part)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None


def bench_lines(text: str, target: str = "cuda") -> list[str]:
    """One line for each timed op: the target's median and spread, the other arms, the ratio or why there is none."""
    times: dict[str, dict[str, tuple[str, ...]]] = {}
    notes: dict[str, list[str]] = {}
    for line in text.splitlines():
        if timed := _TIME.match(line):
            times.setdefault(timed[1], {})[timed[2]] = timed.groups()[2:]
        elif note := _NOTE.match(line):
            notes.setdefault(note[1], []).append(note[2] + note[3])
    found = []
    for op, arms in times.items():
        if target not in arms:
            continue
        ms, p10, p90, host = arms[target]
        others = "  ".join(f"{name} {took[0]}" for name, took in arms.items() if name != target)
        said = "  ".join(note.split("; the recipe without")[0] for note in notes.get(op, []))
        found.append(f"{op} {ms} ms ({p10}-{p90}, host {host} us)  {others}  {said}")
    return found


def bench_wrongs(text: str) -> list[str]:
    """Lines about arms whose results are wrong."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith("WRONG")][:MAX_DETAILS]


def gemm_rates(text: str, share: float) -> tuple[list[str], list[str]]:
    """(a line for each shape with the rate of every problem, what is below `share` of DeepGEMM's anchor or wrong)."""
    shapes: dict[str, list[str]] = {}
    short, shape = [], "?"
    for line in text.splitlines():
        if head := re.match(r"^(\S+) tokens=", line):
            shape = head[1]
        elif rate := _RATE.match(line):
            problem, arm, _, got, anchor = rate.groups()
            if arm != "prime_kernels":
                continue
            of = f"/{anchor} {float(got) / float(anchor):.0%}" if anchor else ""
            shapes.setdefault(shape, []).append(f"{problem} {got}{of}")
            if anchor and float(got) < share * float(anchor):
                short.append(f"{shape} {problem}: {got} TFLOP/s is below {share:.0%} of {anchor}")
        elif " WRONG " in line:
            short.append(f"{shape} {line.strip()}")
    return [f"{name}: {', '.join(rates)} TFLOP/s" for name, rates in shapes.items()], short


def sanitizer_summary(text: str) -> tuple[int, str] | None:
    """(errors or hazards, the summary line) of a compute-sanitizer run; None if it never came to one."""
    found = list(_SUMMARY.finditer(text))
    if not found:
        return None
    return int(found[-1][2]), found[-1][0].strip()


def sanitizer_findings(text: str) -> list[str]:
    """The first lines of what the sanitizer reports, without its frame."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    heads = [line for line in lines if line and not line.startswith(("COMPUTE-SANITIZER", "Saved host", "Host Frame"))]
    return [line[:180] for line in dict.fromkeys(heads)][:MAX_DETAILS]
