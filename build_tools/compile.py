# SPDX-License-Identifier: Apache-2.0
"""One kernel through the compilers: entry .cu -> normalised PTX (nvcc) -> cubin (ptxas), each step kept by content."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from build_tools import entries
from build_tools.toolchain import PackSet, Toolchain, fingerprint
from build_tools.variants import KERNELS

_PTXAS = ("-O3", "-v", "--warn-on-spills", "--warn-on-local-memory-usage")
_VERSION = re.compile(r"^\.version (\d+\.\d+)$", re.M)
_COMMENT = re.compile(r"^\s*//.*\n|^\s*\n", re.M)
# nvcc names internal symbols after the file and the process id; the numbers must not reach the cubin.
_INTERNAL = re.compile(r"_INTERNAL_[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}_\d+")


class BuildError(RuntimeError):
    """A compiler failed, or a cubin is not what its variant says."""


@dataclass(frozen=True)
class Job:
    """One cubin to make."""

    entry: entries.Entry
    arch: str
    pack_set: PackSet

    def __str__(self) -> str:
        return f"{self.entry.variant.key} ({self.arch}, {self.pack_set.name})"


def _digest(*parts: str | bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(f"{len(data)}\0".encode() + data)
    return sha.hexdigest()


def _run(command: list[str], tools: Toolchain, what: str) -> str:
    done = subprocess.run(command, env=tools.environment(), capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} exited {done.returncode} for {what}:\n{done.stderr.strip()[-6000:]}")
    return done.stdout + done.stderr


def publish(path: Path, data: bytes) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_bytes(data)
    os.replace(staged, path)


def normalise(ptx: str) -> str:
    """PTX without comments and process ids: equal sources give equal text."""
    names: dict[str, str] = {}
    text = _COMMENT.sub("", ptx)
    return _INTERNAL.sub(lambda m: names.setdefault(m[0], f"_INTERNAL_pk_{len(names)}"), text)


def lower_version(ptx: str, wanted: str) -> str:
    """PTX whose .version is at most `wanted`; ptxas refuses the text if it uses anything newer."""

    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    found = _VERSION.search(ptx)
    if found is None:
        raise BuildError("the PTX has no .version line")
    return ptx if number(found[1]) <= number(wanted) else _VERSION.sub(f".version {wanted}", ptx, count=1)


def make_ptx(entry: entries.Entry, arch: str, tools: Toolchain, out: Path) -> str:
    """Normalised PTX of an entry, from the store below `out` if it is there."""
    key = _digest("ptx", entry.fingerprint(), arch, fingerprint(), " ".join(entries.OPTIONS))
    stored = out / "ptx" / f"{key}.ptx"
    if stored.exists():
        return stored.read_text()
    source = out / "generated" / entry.variant.entry_name
    with tempfile.TemporaryDirectory(prefix="prime-kernels-") as folder:
        made = Path(folder) / "kernel.ptx"
        command = [str(tools.nvcc), "-ptx", f"-arch={arch}", *entries.OPTIONS, f"-I{KERNELS}"]
        output = _run([*command, str(source), "-o", str(made)], tools, f"{entry.variant.key} ({arch})")
        if output.strip():
            print(output.strip(), file=sys.stderr)
        text = normalise(made.read_text())
    publish(stored, text.encode())
    return text


def make_cubin(job: Job, ptx: str, tools: Toolchain, out: Path) -> tuple[bytes, str]:
    """(cubin, output of ptxas -v), from the store below `out` if they are there."""
    text = lower_version(ptx, job.pack_set.ptx_version)
    key = _digest("cubin", text, job.arch, job.pack_set.version, " ".join(_PTXAS))
    stored, log = out / "cubin" / f"{key}.cubin", out / "cubin" / f"{key}.log"
    if stored.exists() and log.exists():
        return stored.read_bytes(), log.read_text()
    with tempfile.TemporaryDirectory(prefix="prime-kernels-") as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        command = [str(job.pack_set.ptxas), f"-arch={job.arch}", *_PTXAS, str(source), "-o", str(made)]
        output = _run(command, tools, str(job))
        output = re.sub(r"^.*Compile time = .*\n?", "", output, flags=re.M)
        publish(log, output.encode())
        publish(stored, made.read_bytes())
        return stored.read_bytes(), output
