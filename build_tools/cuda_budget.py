# SPDX-License-Identifier: Apache-2.0
"""Rules for kernels_src/: sizes, layers, and which words may stand where."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from build_tools.cuda_text import functions, strip

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = "kernels_src"
MAX_BYTES = 24 * 1000
MAX_LINES = 600
MAX_KERNEL_LINES = 80
MAX_FUNCTION_LINES = 120
MAX_DEPTH = 5
MAX_PARAMETERS = 6
# A wrapper of one instruction takes one parameter per operand.
MAX_PARAMETERS_PTX = 10
MAX_TEMPLATE_PARAMETERS = 4
MAX_COLUMNS = 100
MAX_COLUMNS_PTX = 120
MAX_OVERLAP = 0.40
# Fewer equal lines are the frame that headers of one kind share (includes, members of one contract), not a copy.
MIN_SHARED_LINES = 20

# A file may include files of its own folder and of folders with a smaller number.
LAYERS = {
    "common": 0,
    "ptx": 1,
    "dtype": 2,
    "layout": 3,
    "profile": 3,
    "schedule": 4,
    "pipeline": 4,
    "comm": 4,
    "mma": 5,
    "epilogue": 5,
    "roles": 6,
    "moe": 7,
}
# The arch-free half of the mma folder: the names that a policy must have.
POLICY = "mma/policy.cuh"
ARCH_FILES = ("ptx/wgmma.cuh", "ptx/tcgen05.cuh")

_INCLUDE = re.compile(r"""^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)""", re.MULTILINE)
_ARCH = re.compile(r"\w*(?:wgmma|tcgen05|sm_?90|sm_?100|__CUDA_ARCH)\w*", re.IGNORECASE)
_ASM = re.compile(r"\b(?:__)?asm(?:__)?\b")
_KERNEL = re.compile(r"\b(?:__global__|PK_GLOBAL|PK_KERNEL)\b")


class Violation(NamedTuple):
    """One broken rule: where, which, and by how much."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _sizes(path: str, text: str) -> Iterator[Violation]:
    size, lines = len(text.encode()), text.count("\n")
    if size > MAX_BYTES:
        yield Violation(path, 1, "file-size", f"{size} bytes, at most {MAX_BYTES}")
    if lines > MAX_LINES:
        yield Violation(path, 1, "file-size", f"{lines} lines, at most {MAX_LINES}")
    columns = MAX_COLUMNS_PTX if path.startswith(f"{ROOT}/ptx/") else MAX_COLUMNS
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > columns:
            yield Violation(path, number, "line-length", f"{len(line)} columns, at most {columns}")


def _functions(path: str, text: str) -> Iterator[Violation]:
    parameters = MAX_PARAMETERS_PTX if path.startswith(f"{ROOT}/ptx/") else MAX_PARAMETERS
    for function in functions(text):
        kernel = _KERNEL.search(function.head) is not None
        limit = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
        kind = "kernel body" if kernel else "function"
        for rule, got, allowed, unit in (
            ("kernel-length" if kernel else "function-length", function.lines, limit, "lines"),
            ("nesting", function.depth, MAX_DEPTH, "levels of braces"),
            ("parameters", function.parameters, parameters, "parameters"),
            ("template-parameters", function.template_parameters, MAX_TEMPLATE_PARAMETERS, "template parameters"),
        ):
            if got > allowed:
                yield Violation(path, function.line, rule, f"{kind} {function.name}: {got} {unit}, at most {allowed}")


def _words(path: str, text: str) -> Iterator[Violation]:
    inner = path.removeprefix(f"{ROOT}/")
    code = strip(text)
    for match in re.finditer(r"\bgetenv\b", code):
        yield Violation(path, _line_of(code, match.start()), "environment", "native code reads no environment variable")
    for match in re.finditer(r"\b(?:multimem|cuMulticast)\w*", code):
        yield Violation(path, _line_of(code, match.start()), "multicast", f"{match.group()}: no NVLink multicast")
    if inner.startswith("host/"):
        return
    if not inner.startswith("ptx/"):
        for match in _ASM.finditer(code):
            yield Violation(path, _line_of(code, match.start()), "ptx-only", "asm belongs in kernels_src/ptx/")
    if not inner.startswith("mma/") and inner not in ARCH_FILES:
        without_includes = re.sub(r"^[ \t]*#[ \t]*include[^\n]*", lambda m: " " * len(m.group()), code, flags=re.M)
        for match in _ARCH.finditer(without_includes):
            where = "kernels_src/mma/ and " + ", ".join(ARCH_FILES)
            line = _line_of(code, match.start())
            yield Violation(path, line, "arch-words", f"{match.group()} belongs in {where}")


def resolve(path: str, target: str, paths: Mapping[str, str]) -> str | None:
    """Path of the file that `#include "target"` in `path` means: next to it, else below kernels_src."""
    beside = (PurePosixPath(path).parent / target).as_posix()
    parts: list[str] = []
    for part in beside.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    for candidate in ("/".join(parts), f"{ROOT}/{target}"):
        if candidate in paths:
            return candidate
    return None


def _allowed(source: str, target: str) -> bool:
    here, there = source.split("/")[0], target.split("/")[0]
    if here == there:
        return True
    if here not in LAYERS or there not in LAYERS:
        return False
    if there == "mma" and here != "moe":
        return target == POLICY and LAYERS[here] >= LAYERS["mma"]
    return LAYERS[there] < LAYERS[here]


def _includes(path: str, text: str, paths: Mapping[str, str]) -> Iterator[Violation]:
    source = path.removeprefix(f"{ROOT}/")
    if source.startswith("host/"):
        return
    for match in _INCLUDE.finditer(text):
        line = _line_of(text, match.start() + len(match.group()) - len(match.group().lstrip()))
        quoted, external = match.groups()
        target = None if external else resolve(path, quoted, paths)
        if target is None:
            name = external or quoted
            yield Violation(path, line, "external-include", f"{name}: device sources include kernels_src only")
        elif not _allowed(source, target.removeprefix(f"{ROOT}/")):
            yield Violation(path, line, "layering", f"{source} may not include {target.removeprefix(f'{ROOT}/')}")


def _comparable(text: str) -> Counter[str]:
    lines = (" ".join(line.split()) for line in strip(text).splitlines())
    return Counter(line for line in lines if len(line) > 3 and not line.startswith("#"))


def _overlaps(files: Mapping[str, str]) -> Iterator[Violation]:
    prepared = {path: _comparable(text) for path, text in files.items() if path.endswith(".cuh")}
    for (path, one), (other, two) in combinations(sorted(prepared.items()), 2):
        smaller = min(one.total(), two.total())
        shared = (one & two).total()
        if shared >= MIN_SHARED_LINES and shared > MAX_OVERLAP * smaller:
            share = f"{shared} of {smaller} lines ({shared / smaller:.0%}) also stand in {other}"
            yield Violation(path, 1, "overlap", f"{share}, at most {MAX_OVERLAP:.0%}")


def check(files: Mapping[str, str]) -> Iterator[Violation]:
    """Check native sources.

    Args:
        files: Path from the repository root (with '/') -> text, for every .cuh, .cu, .h and .c below kernels_src/.

    Returns:
        The broken rules, file by file.
    """
    for path, text in sorted(files.items()):
        if path.endswith(".cuh"):
            yield from _sizes(path, text)
        if not path.startswith(f"{ROOT}/host/"):
            yield from _functions(path, text)
        yield from _words(path, text)
        yield from _includes(path, text, files)
    yield from _overlaps(files)
