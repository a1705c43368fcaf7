# SPDX-License-Identifier: Apache-2.0
"""Size, layer and vocabulary rules of this repository; `python build_tools/check_budget.py` prints what breaks them.

Native sources have their rules in cuda_budget.py; this module holds those for Python and for every text file.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from build_tools import cuda_budget  # noqa: E402  (the path has to be set first when this file is run as a script)
from build_tools.cuda_budget import Violation  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_MODULE_BYTES = 12 * 1000
MAX_TEST_BYTES = 20 * 1000
MAX_FUNCTION_LINES = 60
MAX_DEPTH = 5
LARGER = ("tests/", "benchmarks/")
ENVIRONMENT_READER = "prime_kernels/settings.py"

NATIVE = (".cuh", ".cu", ".h", ".c")
# File kinds that can carry a comment, and so carry the licence line.
COMMENTED = (*NATIVE, ".py", ".pyi", ".toml", ".yml", ".yaml", ".md", ".txt", ".sh", ".cfg", ".cc", ".cpp")
COMMENTED_NAMES = ("Makefile", ".gitignore", ".clang-format", ".ci/run")
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "shared", "__pycache__", ".hypothesis"}
SPDX = "SPDX-License-Identifier: Apache-2.0"

_UNFINISHED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
_ENVIRONMENT = ("environ", "environb", "getenv", "getenvb")
_NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)


def _is_text(path: str) -> bool:
    return path.endswith(COMMENTED) or path in COMMENTED_NAMES


def read_tree(root: Path) -> dict[str, str]:
    """Texts of the sources below `root`, by path with '/': what git tracks or would add, else every file."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=root, capture_output=True, text=True, check=False)
    if listing.returncode == 0 and Path(top.stdout.strip() or "/").resolve() == root.resolve():
        names = listing.stdout.decode().split("\0")
    else:
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        names = [path.as_posix() for path in found if not SKIPPED_FOLDERS & set(path.parts)]
    return {
        name: (root / name).read_text(encoding="utf-8")
        for name in sorted(set(names))
        if name and _is_text(name) and (root / name).is_file() and not (root / name).is_symlink()
    }


def _text_rules(path: str, text: str) -> Iterator[Violation]:
    if text and SPDX not in "\n".join(text.splitlines()[:3]):
        yield Violation(path, 1, "spdx", f"needs '{SPDX}' on its first line")
    for number, line in enumerate(text.splitlines(), 1):
        if _UNFINISHED.search(line):
            yield Violation(path, number, "unfinished", "finish it or open an issue; no marks in the sources")


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: a public call's description is not what makes it hard to read."""
    end = function.end_lineno or function.lineno
    lines = end - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def _depth(node: ast.AST) -> int:
    """Deepest nesting of compound statements below `node`; an elif is as deep as its if."""
    deepest = 0
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            chained = isinstance(node, ast.If) and name == "orelse" and len(value) == 1 and isinstance(child, ast.If)
            deepest = max(deepest, _depth(child) + (isinstance(child, _NESTING) and not chained))
    return deepest


def _environment_reads(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _ENVIRONMENT and isinstance(node.value, ast.Name):
            if node.value.id in ("os", "posix"):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            yield from (node.lineno for alias in node.names if alias.name in _ENVIRONMENT)


def _python_rules(path: str, text: str) -> Iterator[Violation]:
    limit = MAX_TEST_BYTES if path.startswith(LARGER) else MAX_MODULE_BYTES
    size = len(text.encode())
    if size > limit:
        yield Violation(path, 1, "module-size", f"{size} bytes, at most {limit}")
    tree = ast.parse(text, filename=path)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines, depth = _body_lines(node), _depth(node)
            if lines > MAX_FUNCTION_LINES:
                message = f"{node.name}: {lines} lines without docstring, at most {MAX_FUNCTION_LINES}"
                yield Violation(path, node.lineno, "function-length", message)
            if depth > MAX_DEPTH:
                yield Violation(path, node.lineno, "nesting", f"{node.name}: {depth} levels, at most {MAX_DEPTH}")
        elif isinstance(node, ast.ClassDef) and path.startswith("tests/") and node.name.startswith("Test"):
            yield Violation(path, node.lineno, "test-class", f"{node.name}: tests are plain functions")
    if path.startswith("prime_kernels/") and path != ENVIRONMENT_READER:
        for line in _environment_reads(tree):
            yield Violation(path, line, "environment", f"the environment is read in {ENVIRONMENT_READER} only")


def check(files: Mapping[str, str]) -> list[Violation]:
    """Check a tree.

    Args:
        files: Path from the repository root (with '/') -> text.

    Returns:
        Every broken rule, in the order of the paths.
    """
    found: list[Violation] = []
    for path, text in files.items():
        found += _text_rules(path, text)
        if path.endswith((".py", ".pyi")):
            found += _python_rules(path, text)
    native = {p: t for p, t in files.items() if p.startswith(f"{cuda_budget.ROOT}/") and p.endswith(NATIVE)}
    found += cuda_budget.check(native)
    return sorted(found)


def main(argv: list[str] | None = None) -> int:
    """Print the broken rules of a tree; 0 if there is none, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="repository root (default: this one)")
    files = read_tree(parser.parse_args(argv).root)
    found = check(files)
    for violation in found:
        print(violation)
    print(f"{len(files)} files checked, {len(found)} rules broken")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
