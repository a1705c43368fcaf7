# SPDX-License-Identifier: Apache-2.0
"""Compiles the host library (`kernels_src/host/prime_host.c`) with the system's C compiler.

Usage: python -m build_tools.host_shim [--out PATH]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "kernels_src" / "host" / "prime_host.c"
HEADER = ROOT / "kernels_src" / "host" / "prime_host.h"
IN_TREE = ROOT / "prime_kernels" / "_host" / "libprime_host.so"

# -nostdlib: no NEEDED entry, no GLIBC version. -ffreestanding and -fno-tree-loop-distribute-patterns: the library has
# its own memcpy and memset, which the compiler must not turn into calls of themselves.
COMPILE = "-std=c11 -O2 -fPIC -g0 -Wall -Wextra -Werror -ffreestanding -fvisibility=hidden -fno-stack-protector"
TUNING = "-fno-tree-loop-distribute-patterns -fno-asynchronous-unwind-tables"
LINK = "-shared -nostdlib -Wl,-soname,libprime_host.so,--build-id=none,--hash-style=gnu,-z,relro,-z,now,-z,noexecstack"
FLAGS = [*COMPILE.split(), *TUNING.split(), *LINK.split()]


class ShimError(RuntimeError):
    """The host library could not be compiled."""


def find_compiler(machine: str | None = None) -> str | None:
    """The C compiler: $CC, then cc, gcc, clang; for another machine <machine>-linux-gnu-gcc. None if there is none."""
    if machine not in (None, platform.machine()):
        return shutil.which(f"{machine}-linux-gnu-gcc")
    for name in (os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def build(out: Path = IN_TREE, *, compiler: str | None = None, machine: str | None = None) -> Path:
    """Compiles the library to `out`, unless `out` is newer than its sources; `machine` None is that of this Python.

    Raises:
        ShimError: no C compiler, or it failed (its output is in the message).
    """
    compiler = compiler or find_compiler(machine)
    if compiler is None and machine not in (None, platform.machine()):
        raise ShimError(
            f"no {machine}-linux-gnu-gcc found; install it, for example `apt install gcc-{machine}-linux-gnu`"
        )
    if compiler is None:
        raise ShimError("no C compiler found (tried $CC, cc, gcc, clang); install one, for example `apt install gcc`")
    newest = max(p.stat().st_mtime_ns for p in (SOURCE, HEADER, Path(__file__)))
    if out.exists() and out.stat().st_mtime_ns > newest:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.{os.getpid()}")
    arch = ["-mno-outline-atomics"] if "aarch64" in (machine or sysconfig.get_platform()) else []
    command = [compiler, *FLAGS, *arch, f"-I{HEADER.parent}", "-o", str(staged), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise ShimError(f"{compiler} exited {done.returncode} for {SOURCE.name}:\n{done.stderr.strip()}")
    os.replace(staged, out)
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line entry; prints the path of the library."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.host_shim", description=__doc__)
    parser.add_argument("--out", type=Path, default=IN_TREE)
    args = parser.parse_args(argv)
    try:
        print(build(args.out))
    except ShimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
