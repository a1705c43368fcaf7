# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel into a fresh environment without torch and asks it about itself; needs no GPU.

Usage: python -m build_tools.smoke_install dist/*.whl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# Runs in the fresh environment: what an import may not do.
_IMPORT = """
import sys
import prime_kernels
heavy = sorted({"torch", "numpy", "ctypes"} & sys.modules.keys())
assert not heavy, f"import prime_kernels brought {heavy}"
print(prime_kernels.__version__)
"""


class SmokeError(RuntimeError):
    """The installed package does not behave."""


def _run(command: list[str], *, expect: tuple[int, ...] = (0,)) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PRIME_KERNELS_PACK")}
    folder = tempfile.gettempdir()  # never the source tree, whose package would shadow the installed one
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode not in expect:
        raise SmokeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def smoke(wheel: Path) -> list[str]:
    """Installs `wheel` and checks import, packs, an answer without a GPU, and the report; returns what it saw.

    Raises:
        SmokeError: a command failed or said something else than it should.
    """
    seen = []
    with tempfile.TemporaryDirectory(prefix="prime-kernels-smoke-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", str(wheel.resolve())])
        _run([*pip, "packaging"])
        seen.append(f"version {_run([python, '-c', _IMPORT]).strip()}")
        tool = str(Path(folder, "bin", "prime-kernels"))
        seen.append(_run([tool, "verify"]).strip())
        rows = json.loads(_run([tool, "list", "--json"]))
        if not rows:
            raise SmokeError("prime-kernels list shows no kernel")
        report = json.loads(_run([tool, "doctor", "--json"], expect=(0, 1, 2)))
        if Path(report["package"]["path"]).is_relative_to(Path(folder).resolve()) is False:
            raise SmokeError(f"doctor speaks of {report['package']['path']}, not of the installed package")
        unexpected = set(report["codes"]) - {"E01", "E03"}
        if unexpected:
            raise SmokeError(f"doctor reports {sorted(unexpected)}:\n{json.dumps(report, indent=1)}")
        seen.append(f"doctor {report['result']} {report['codes']}")
    return seen


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.smoke_install", description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+")
    args = parser.parse_args(argv)
    try:
        for wheel in args.wheels:
            print(wheel.name, *smoke(wheel), sep="\n  ")
    except SmokeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
