# SPDX-License-Identifier: Apache-2.0
"""NVRTC by ctypes: find it, load it, compile one source to a cubin. Needs neither GPU nor driver nor CUDA toolkit."""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from prime_kernels.errors import CompileError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from prime_kernels.loader.arch import Target

_LIBRARY = re.compile(r"libnvrtc\.so(?:\.[0-9.]+)?")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.([0-9]+)\.([0-9]+)(?:\.[0-9]+)?")
_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_MAX_ERROR_LINES = 20
PIP_LINE = "Run: pip install 'nvidia-cuda-nvrtc>=13,<14'"


def mapped_libraries(maps: str) -> list[str]:
    """Paths of NVRTC libraries in the text of /proc/self/maps, each once, in order."""
    paths = (line.split(None, 5)[5].strip() for line in maps.splitlines() if "libnvrtc" in line and line.count("/"))
    return list(dict.fromkeys(path for path in paths if _LIBRARY.fullmatch(Path(path).name)))


def _mapped() -> list[str]:
    try:
        return mapped_libraries(Path("/proc/self/maps").read_text(errors="replace"))
    except OSError:
        return []


def _from_distributions() -> Iterator[str]:
    from importlib.metadata import PackageNotFoundError, files

    for name in _DISTRIBUTIONS:
        try:
            found = files(name) or []
        except PackageNotFoundError:
            continue
        yield from sorted(str(file.locate()) for file in found if _LIBRARY.fullmatch(file.name))


def candidates(override: str | None) -> Iterator[tuple[str, str]]:
    """(where it was found, path or soname) of every NVRTC to try. An override is the only candidate."""
    if override:
        yield "PRIME_KERNELS_NVRTC", override
        return
    yield from (("already mapped in this process", path) for path in _mapped())
    yield from (("installed package", path) for path in _from_distributions())
    yield from (("system", name) for name in _SONAMES)


@dataclass(frozen=True)
class Nvrtc:
    """A loaded NVRTC.

    Attributes:
        path: What was passed to the dynamic loader.
        source: How it was found.
        version: As reported, e.g. (13, 0).
        release: Version for cache keys, e.g. "13.0.88"; "13.0" where the build number cannot be learnt.
        archs: Numbers of the targets that it supports, e.g. 90.
    """

    path: str
    source: str
    version: tuple[int, int]
    release: str
    archs: tuple[int, ...]
    lib: Any

    def cannot_build(self, target: Target) -> str | None:
        """Why this NVRTC does not build for a target, or None."""
        if self.version < target.min_toolkit:
            need = ".".join(map(str, target.min_toolkit))
            return f"NVRTC {self.release} ({self.path}) does not know {target}; need {need} or newer"
        if target.sm not in self.archs:
            return f"NVRTC {self.release} ({self.path}) supports {', '.join(map(str, self.archs))}, need {target.sm}"
        return None


def _preload_builtins(path: str) -> None:
    # NVRTC opens its builtins by bare name; loaded by path from a wheel, that only succeeds if they are mapped already.
    folder = Path(path).parent
    if not Path(path).is_absolute() or not folder.is_dir():
        return
    for file in sorted(folder.iterdir()):
        if _BUILTINS.fullmatch(file.name):
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _release(path: str, version: tuple[int, int]) -> str:
    """Version with the build number of the package that owns the file, if one does."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    short = f"{version[0]}.{version[1]}"
    for name in _DISTRIBUTIONS:
        try:
            found = installed(name)
        except PackageNotFoundError:
            continue
        if path in _from_distributions() and found.startswith(short + "."):
            return found
    return short


def _open(source: str, path: str) -> Nvrtc:
    _preload_builtins(path)
    lib = ctypes.CDLL(path)
    major, minor, count = c_int(), c_int(), c_int()
    lib.nvrtcGetErrorString.restype = c_char_p
    _check(lib, lib.nvrtcVersion(byref(major), byref(minor)), "asking for its version")
    _check(lib, lib.nvrtcGetNumSupportedArchs(byref(count)), "asking for its targets")
    archs = (c_int * count.value)()
    _check(lib, lib.nvrtcGetSupportedArchs(archs), "asking for its targets")
    version = (major.value, minor.value)
    return Nvrtc(path, source, version, _release(path, version), tuple(archs), lib)


@lru_cache(maxsize=4)
def find(override: str | None) -> tuple[Nvrtc | None, tuple[str, ...]]:
    """The first NVRTC that loads.

    Args:
        override: Path that must be used; None searches this process, installed packages, the system.

    Returns:
        It (None if there is none) and why each earlier candidate was not used.
    """
    tried: list[str] = []
    for source, path in candidates(override):
        try:
            return _open(source, path), tuple(tried)
        except (OSError, AttributeError, CompileError) as err:
            tried.append(f"{path} ({source}): {err}")
    return None, tuple(tried)


def missing(tried: Sequence[str]) -> CompileError:
    """The error for a process without a usable NVRTC (E30)."""
    return CompileError(
        "this kernel has to be compiled and no NVRTC was found; tried: " + ("; ".join(tried) or "nothing") + ".",
        code="E30",
        facts={"tried": list(tried), "needed": "12.0"},
        remedy=f"{PIP_LINE}, or set PRIME_KERNELS_NVRTC to a libnvrtc.",
    )


def too_old(reason: str, nvrtc: Nvrtc, target: Target) -> CompileError:
    """The error for an NVRTC that does not know the target (E30)."""
    return CompileError(
        f"{reason}.",
        code="E30",
        facts={"path": nvrtc.path, "version": nvrtc.release, "target": str(target)},
        remedy=f"{PIP_LINE}, or set PRIME_KERNELS_NVRTC to a newer libnvrtc.",
    )


def _check(lib: Any, status: int, doing: str) -> None:
    if status:
        text = lib.nvrtcGetErrorString(status).decode(errors="replace")
        raise CompileError(
            f"NVRTC failed while {doing}: {text} ({status}).",
            facts={"nvrtc_result": status, "doing": doing},
            remedy="Check the NVRTC installation with `prime-kernels doctor`.",
        )


def _fetch(lib: Any, program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    _check(lib, getattr(lib, f"nvrtcGet{what}Size")(program, byref(size)), f"reading the size of {what}")
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer), f"reading {what}")
    return buffer.raw[: size.value]


def error_lines(log: str) -> list[str]:
    """The lines of a compiler log that name an error, or its first lines if none does; at most 20."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines)[:_MAX_ERROR_LINES]


def compile_cubin(
    nvrtc: Nvrtc, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]
) -> tuple[bytes, str]:
    """Compile one translation unit from memory.

    Args:
        nvrtc: What to compile with.
        name: Name of the source in messages.
        source: Its text.
        headers: Text of every file that may be included, by the name that the include directive uses.
        options: Compiler options; one of them is --gpu-architecture=sm_...

    Returns:
        The cubin and the log (empty if there were no warnings). The interpreter lock is not held meanwhile.

    Raises:
        CompileError: The source does not compile (E32); facts hold the first error lines and the whole log.
    """
    lib, program = nvrtc.lib, c_void_p()
    texts = (c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (c_char_p * len(headers))(*(path.encode() for path in headers))
    create = lib.nvrtcCreateProgram
    _check(lib, create(byref(program), source.encode(), name.encode(), len(headers), texts, names), "taking the source")
    try:
        array = (c_char_p * len(options))(*(option.encode() for option in options))
        status = lib.nvrtcCompileProgram(program, len(options), array)
        log = _fetch(lib, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status:
            lines = error_lines(log) or [lib.nvrtcGetErrorString(status).decode(errors="replace")]
            raise CompileError(
                f"NVRTC {nvrtc.release} cannot compile {name}:\n" + "\n".join(lines) + "\n",
                code="E32",
                facts={"source": name, "nvrtc": nvrtc.release, "options": list(options), "errors": lines, "log": log},
                remedy="This is a bug of prime-kernels: report it with `prime-kernels doctor --json`.",
            )
        return _fetch(lib, program, "CUBIN"), log
    finally:
        lib.nvrtcDestroyProgram(byref(program))
