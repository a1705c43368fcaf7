# SPDX-License-Identifier: Apache-2.0
"""A stand-in for libcuda.so.1 (stub.c lists its environment variables) and helpers to build and read it.

Tests run the code that meets the stub in a process of its own, `run_with_stub(code, PK_STUB_DRIVER="12090")`: once a
process has the stub, everything in it that asks for a driver, torch included, finds the stub. `load_stub()` is for code
that runs in such a process and wants the log.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from build_tools import host_shim

SOURCE = Path(__file__).with_name("stub.c")
ROOT = Path(__file__).resolve().parents[2]


def build_stub(*, old: bool = False) -> Path:
    """Path of a compiled stub named libcuda.so.1; compiled once per content. `old`: without cuLibrary."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    out = (
        Path(tempfile.gettempdir())
        / f"prime-kernels-stub-{os.getuid()}-{digest}{'-old' if old else ''}"
        / "libcuda.so.1"
    )
    if out.exists():
        return out
    compiler = host_shim.find_compiler()
    if compiler is None:
        raise host_shim.ShimError("no C compiler found; the driver stub cannot be built")
    out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = out.with_name(f"{out.name}.{os.getpid()}")
    flags = ["-std=gnu11", "-O1", "-g0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    extra = ["-DPK_STUB_OLD", "-Wno-unused-variable"] if old else []
    command = [compiler, *flags, *extra, str(SOURCE), "-o", str(staged), "-lpthread", "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    os.replace(staged, out)
    return out


class Stub:
    """The stub loaded into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._lib.stub_log.restype = ctypes.c_char_p

    def reset(self) -> None:
        """Empties the log."""
        self._lib.stub_reset()

    def calls(self, name: str | None = None) -> list[dict[str, object]]:
        """The recorded calls, oldest first; of one name if given."""
        lines = self._lib.stub_log().decode().splitlines()
        return [c for c in map(json.loads, lines) if name in (None, c["call"])]


def load_stub() -> Stub:
    """Builds the stub if need be and loads it as this process's libcuda.so.1."""
    return Stub(build_stub())


def stub_environment(*, old: bool = False, **settings: str) -> dict[str, str]:
    """The environment for a subprocess that is to find the stub as its driver, with the given PK_STUB_ variables."""
    env = dict(os.environ)
    folder = str(build_stub(old=old).parent)
    env["LD_LIBRARY_PATH"] = f"{folder}:{env['LD_LIBRARY_PATH']}" if env.get("LD_LIBRARY_PATH") else folder
    return env | settings


def run_with_stub(code: str, *, old: bool = False, **settings: str) -> str:
    """Output of `python -c code` with the stub as its driver; `stub` in `code` is a `Stub`, for its log.

    Raises:
        AssertionError: the process failed; its output is in the message.
    """
    path = build_stub(old=old)
    prelude = f"from pathlib import Path\nfrom tests.stub_cuda import Stub\nstub = Stub(Path({str(path)!r}))\n"
    env = stub_environment(old=old, **settings)
    command = [sys.executable, "-c", prelude + code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
