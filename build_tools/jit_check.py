# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for every target that one NVRTC knows, as a machine without packs would; needs no GPU.

Usage: python -m build_tools.jit_check [--nvrtc 12.8.93] [--jobs N]

The NVRTC comes from PyPI into build/nvrtc/<version>. Each result passes the loader's own checks: one kernel, the
promised symbol, argument layout and target.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from build_tools import stage
from build_tools.variants import ROOT, archs_of, read_variants
from prime_kernels.errors import PrimeKernelsError
from prime_kernels.loader import arch, jit, nvrtc, resolve, warmup
from prime_kernels.settings import Settings

NEWEST = "13.0.88"


class CheckError(RuntimeError):
    """The NVRTC could not be had."""


def package_of(version: str) -> str:
    """Requirement of the wheel that holds this NVRTC."""
    name = "nvidia-cuda-nvrtc-cu12" if version.startswith("12.") else "nvidia-cuda-nvrtc"
    return f"{name}=={version}"


def fetch(version: str, into: Path) -> Path:
    """Path of libnvrtc, installed below `into` if it is not there yet.

    Raises:
        CheckError: pip failed or the wheel holds no libnvrtc.
    """
    folder = into / version
    if not list(folder.glob("nvidia/*/lib/libnvrtc.so.*")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command = [*pip, "--only-binary", ":all:", "--target", str(folder), package_of(version)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            raise CheckError(f"pip could not install {package_of(version)}:\n{done.stderr.strip()[-2000:]}")
    found = sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*"))
    if not found:
        raise CheckError(f"{package_of(version)} holds no libnvrtc.so")
    return found[0]


def _compile(item: tuple[str, str, Settings, Path]) -> str | None:
    key, target, config, sources = item
    at = resolve.Installation.open(config, packs_folder=sources / "none", sources_folder=sources)
    try:
        warmup.build(key, arch.parse(target), at)
    except PrimeKernelsError as error:
        return str(error)
    return None


def check(library: Path, jobs: int) -> tuple[int, list[str]]:
    """Kernels compiled, and one line for each that failed.

    Raises:
        CheckError: the library does not load, or knows none of our targets.
    """
    compiler, tried = nvrtc.find(str(library))
    if compiler is None:
        raise CheckError(f"{library} is no usable NVRTC: {'; '.join(tried)}")
    targets = [arch.parse(name) for name in archs_of(read_variants())]
    known = [target for target in targets if jit.unbuildable(compiler, target, None) is None]
    if not known:
        raise CheckError(f"NVRTC {compiler.release} knows none of {', '.join(map(str, targets))}")
    with tempfile.TemporaryDirectory(prefix="prime-kernels-jit-") as folder:
        sources = stage.stage_sources(Path(folder))
        config = Settings(cache_dir=f"{folder}/cache", tmp_dir=folder, nvrtc=str(library))
        at = resolve.Installation.open(config, packs_folder=sources / "none", sources_folder=sources)
        items = [(key, str(target), config, sources) for key, target in warmup.todo(at, known, [None])]
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(_compile, items))
    failed = [f"{key} {target}: {error}" for (key, target, *_), error in zip(items, results, strict=True) if error]
    print(f"NVRTC {compiler.release}: {len(items)} kernels for {', '.join(map(str, known))}, {len(failed)} failed")
    return len(items), failed


def main(argv: list[str] | None = None) -> int:
    """Command line entry; exit 1 when a kernel does not compile or none did."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.jit_check", description=__doc__)
    parser.add_argument("--nvrtc", default=NEWEST, help=f"version of the PyPI package (default {NEWEST})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    try:
        count, failed = check(fetch(args.nvrtc, ROOT / "build" / "nvrtc"), args.jobs)
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(failed))
    return 1 if failed or not count else 0


if __name__ == "__main__":
    raise SystemExit(main())
