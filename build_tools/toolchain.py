# SPDX-License-Identifier: Apache-2.0
"""The private CUDA compiler of the build: the wheels of toolchain.toml, unpacked into build/toolchain/<fingerprint>/.

Never a system nvcc: every tool is named by its path in that folder, and the environment it runs in has no CUDA
variable.

Usage: python -m build_tools.toolchain    installs what is missing, then prints each tool, its version and its origin
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from build_tools.tomlfile import read_toml

ROOT = Path(__file__).resolve().parent.parent
DECLARATION = Path(__file__).with_name("toolchain.toml")
HOME = ROOT / "build" / "toolchain"


class ToolchainError(RuntimeError):
    """The compiler could not be installed, or is not the one that was declared."""


@dataclass(frozen=True)
class PackSet:
    """One assembler and the driver its cubins need. `ptxas` is an absolute path."""

    name: str
    ptxas: Path
    version: str
    ptx_version: str
    min_driver: int


@dataclass(frozen=True)
class Toolchain:
    """An installed toolchain. `declaration` is the parsed toolchain.toml."""

    folder: Path
    declaration: dict[str, Any]

    @property
    def nvcc(self) -> Path:
        """The front end."""
        return self.folder / str(self.declaration["frontend"]["nvcc"])

    @property
    def frontend_version(self) -> str:
        """Version of the front end, e.g. "13.0.88"."""
        return str(self.declaration["frontend"]["version"])

    @cached_property
    def sets(self) -> dict[str, PackSet]:
        """Pack sets by name."""
        rows = self.declaration["sets"].items()
        return {
            name: PackSet(name, self.folder / row["ptxas"], row["version"], row["ptx_version"], row["min_driver"])
            for name, row in rows
        }

    def environment(self) -> dict[str, str]:
        """What the tools run with: no CUDA variable, no flag variable of nvcc, the toolchain's bin first on PATH."""
        drop = re.compile(r"CUDA|NVCC|NVVM|^CPATH$|_INCLUDE_PATH$")
        env = {k: v for k, v in os.environ.items() if not drop.search(k)}
        env["PATH"] = f"{self.nvcc.parent}{os.pathsep}{env.get('PATH', '')}"
        env["LC_ALL"] = "C"
        return env

    def check(self) -> list[str]:
        """One line a tool: its version and path.

        Raises:
            ToolchainError: a tool is absent or has another version than declared.
        """
        tools = [("nvcc", self.nvcc, self.frontend_version)]
        tools += [(f"ptxas ({s.name})", s.ptxas, s.version) for s in self.sets.values()]
        lines = []
        for label, path, wanted in tools:
            if not path.is_file():
                raise ToolchainError(f"{label} is not at {path}; delete {self.folder} and run this again")
            text = subprocess.run(
                [str(path), "--version"], env=self.environment(), capture_output=True, text=True, timeout=60, check=True
            ).stdout
            found = re.search(r"V(\d+\.\d+\.\d+)", text)
            if found is None or found[1] != wanted:
                raise ToolchainError(f"{label} at {path} says {found and found[1]}; toolchain.toml declares {wanted}")
            lines.append(f"{label} {wanted} from PyPI: {path}")
        return lines


def fingerprint() -> str:
    """Identity of the declaration: 16 hex digits."""
    return hashlib.sha256(DECLARATION.read_bytes()).hexdigest()[:16]


def installed() -> Toolchain | None:
    """The declared toolchain if it is unpacked already, else None; downloads nothing."""
    folder = HOME / fingerprint()
    return Toolchain(folder, read_toml(DECLARATION)) if (folder / ".complete").exists() else None


def _install(packages: list[dict[str, str]], folder: Path) -> None:
    requirements = folder / "requirements.txt"
    rows = [f"{p['name']}=={p['version']} --hash=sha256:{p['sha256']}" for p in packages]
    requirements.write_text("\n".join(rows) + "\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--no-compile", "--target", str(folder)]
    done = subprocess.run([*command, "-r", str(requirements)], capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise ToolchainError(f"pip could not install the compiler wheels:\n{done.stderr.strip()[-2000:]}")


def ensure() -> Toolchain:
    """The declared toolchain, installed if need be.

    Raises:
        ToolchainError: pip failed, a digest differs, or a tool has the wrong version.
    """
    have = installed()
    if have is not None:
        return have
    declaration = read_toml(DECLARATION)
    final = HOME / fingerprint()
    staged = HOME / f".{final.name}.{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        _install(declaration["package"], staged)
        Toolchain(staged, declaration).check()
        (staged / ".complete").touch()
        if not final.exists():
            os.replace(staged, final)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return Toolchain(final, declaration)


def main() -> int:
    """Command line entry."""
    try:
        print("\n".join(ensure().check()))
    except ToolchainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
