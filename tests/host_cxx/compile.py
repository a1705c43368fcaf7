# SPDX-License-Identifier: Apache-2.0
"""Compiles the test programs of this folder with the host compiler, each once for all that it can include."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from build_tools import toolchain
from build_tools.variants import KERNELS, ROOT, read_variants

FOLDER = Path(__file__).resolve().parent
CACHE = ROOT / "build" / "host_cxx"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers")
FLAGS = ("-std=c++20", "-O1", *WARNINGS)

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


def cutlass_headers() -> tuple[Path, ...] | str:
    """Include folders of CUTLASS and of the CUDA headers it needs, or a sentence that says what is missing."""
    spec = importlib.util.find_spec("deep_gemm")
    homes = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    for home in (*homes, ROOT / "build" / "deep_gemm" / "deep_gemm"):
        if (home / "include" / "cute" / "tensor.hpp").is_file():
            break
    else:
        return "no CUTLASS here; run pip install --no-deps --target build/deep_gemm sgl-deep-gemm==0.1.4"
    cuda = toolchain.installed()
    if cuda is None:
        return "CUTLASS needs the CUDA headers in build/toolchain; run python -m build_tools.toolchain"
    include = cuda.nvcc.parents[1] / "include"
    return home / "include", include, include / "cccl"


def variants_header() -> str:
    """EACH_VARIANT(X): X(key, max_regs, type) for every row of variants.toml."""
    variants = read_variants()
    includes = [f'#include "{header}"' for header in sorted({v.header for v in variants})]
    rows = [f'    X("{v.key}", {v.max_regs}u, {v.type})' for v in variants]
    return "\n".join([*includes, "#define EACH_VARIANT(X) \\", " \\\n".join(rows), ""])


def _device_sources() -> dict[str, bytes]:
    """Device headers by place: kernels/ is kernels_src/; simulated/ is the same with sim/ptx in the place of ptx/."""
    found: dict[str, bytes] = {"kernels/variants.hpp": variants_header().encode()}
    for path in sorted(KERNELS.rglob("*.cuh")):
        name = path.relative_to(KERNELS).as_posix()
        found[f"kernels/{name}"] = path.read_bytes()
        if not name.startswith("ptx/"):
            found[f"simulated/{name}"] = found[f"kernels/{name}"]
    for path in sorted((FOLDER / "sim" / "ptx").glob("*.cuh")):
        found[f"simulated/ptx/{path.name}"] = path.read_bytes()
    return found


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


@functools.cache
def tree() -> Path:
    """A folder with the device headers; one folder per content, so that what was compiled stays what it was."""
    sources = _device_sources()
    folder = CACHE / f"tree-{_digest([part for name in sources for part in (name.encode(), sources[name])])}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=CACHE, prefix="new-"))
        for name, content in sources.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(content)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first, with the same content
            shutil.rmtree(scratch)
    return folder


def build(program: str, *, compiler: str, others: tuple[Path, ...] = ()) -> Path:
    """The executable of a program; compiled only if its sources, the compiler or the options are new.

    Args:
        program: Name of a .cpp file of this folder, without the suffix.
        compiler: Name or path of a C++20 compiler.
        others: Include folders of other projects; they bring the words of CUDA, so the shim stays out.

    Raises:
        AssertionError: it does not compile; the message is the compiler's.
    """
    source = FOLDER / f"{program}.cpp"
    headers = [path.read_bytes() for path in sorted(FOLDER.rglob("*.hpp"))]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    kernels = tree() / ("simulated" if b'"sim/' in source.read_bytes() else "kernels")
    options = [*FLAGS, f"-I{FOLDER}", *(f"-isystem{folder}" for folder in (kernels, *others))]
    options += [] if others else ["-include", "shim.hpp"]
    digest = _digest([source.read_bytes(), *headers, version, *(o.encode() for o in options)])
    out = CACHE / f"{program}-{digest}"
    if not out.is_file():
        scratch = out.with_name(f"{out.name}.{os.getpid()}")
        command = [compiler, *options, str(source), "-o", str(scratch)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stderr[:8000]}"
        scratch.rename(out)
    return out
