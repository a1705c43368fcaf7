# SPDX-License-Identifier: Apache-2.0
"""Compiles the test programs of this folder with the host compiler, each once for all that it can include."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from build_tools.variants import KERNELS, ROOT, read_variants

FOLDER = Path(__file__).resolve().parent
CACHE = ROOT / "build" / "host_cxx"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers")
FLAGS = ("-std=c++20", "-O1", *WARNINGS, "-include", "shim.hpp")

_CASE = re.compile(r"^CASE\((\w+)\)", re.M)


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, then c++, g++, clang++; None when there is none."""
    for name in (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


def programs() -> dict[str, list[str]]:
    """Cases of every test program, by the program's name."""
    return {path.stem: _CASE.findall(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.cpp"))}


def variants_header() -> str:
    """EACH_VARIANT(X): X(key, max_regs, type) for every row of variants.toml."""
    variants = read_variants()
    includes = [f'#include "{header}"' for header in sorted({v.header for v in variants})]
    rows = [f'    X("{v.key}", {v.max_regs}u, {v.type})' for v in variants]
    return "\n".join([*includes, "#define EACH_VARIANT(X) \\", " \\\n".join(rows), ""])


@functools.cache
def _sources() -> dict[str, bytes]:
    """What a program may include, by its path in the build: the kernels, this folder, the generated table."""
    found = {f"kernels/{p.relative_to(KERNELS).as_posix()}": p for p in sorted(KERNELS.rglob("*.cuh"))}
    found |= {p.relative_to(FOLDER).as_posix(): p for p in sorted(FOLDER.rglob("*.[hc][pu][ph]"))}
    found |= {p.relative_to(FOLDER).as_posix(): p for p in sorted(FOLDER.rglob("*.cuh"))}
    texts = {name: path.read_bytes() for name, path in found.items() if not name.endswith(".cpp")}
    return texts | {"variants.hpp": variants_header().encode()}


def _places(name: str) -> list[str]:
    """Where a source is put. A simulated kernel is the kernel itself with sim/ptx in the place of ptx/."""
    if name.startswith("sim/ptx/"):
        return [f"simulated/{name.removeprefix('sim/')}"]
    if name.startswith("kernels/") and not name.startswith("kernels/ptx/"):
        return [name, f"simulated/{name.removeprefix('kernels/')}"]
    return [name]


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


@functools.cache
def tree() -> Path:
    """A folder with everything that programs include; device headers of one content have one folder."""
    sources = _sources()
    folder = CACHE / f"tree-{_digest([part for name in sources for part in (name.encode(), sources[name])])}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=CACHE, prefix="new-"))
        for name, content in sources.items():
            for place in _places(name):
                (scratch / place).parent.mkdir(parents=True, exist_ok=True)
                (scratch / place).write_bytes(content)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first, with the same content
            shutil.rmtree(scratch)
    return folder


def build(program: str, *, compiler: str, extra: tuple[str, ...] = ()) -> Path:
    """The executable of a program; compiled only if its sources, the compiler or the options are new.

    Args:
        program: Name of a .cpp file of this folder, without the suffix.
        compiler: Name or path of a C++20 compiler.
        extra: More options, for example include paths of an optional package.

    Raises:
        AssertionError: it does not compile; the message is the compiler's.
    """
    include = tree()
    source = FOLDER / f"{program}.cpp"
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    kernels = "simulated" if b'"sim/' in source.read_bytes() else "kernels"
    options = (*FLAGS, f"-I{include}", "-isystem", f"{include}/{kernels}", *extra)
    out = CACHE / f"{program}-{_digest([source.read_bytes(), version, *(o.encode() for o in options)])}"
    if not out.is_file():
        scratch = out.with_name(f"{out.name}.{os.getpid()}")
        command = [compiler, *options, str(source), "-o", str(scratch)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stderr[:8000]}"
        scratch.rename(out)
    return out
