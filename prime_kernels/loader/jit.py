# SPDX-License-Identifier: Apache-2.0
"""Compiles a kernel from the shipped sources: what goes in, under which name it is cached, whether what comes out fits.

Sources and headers are handed to NVRTC from memory with package-relative names, so neither the cubin nor its cache key
knows where the package is installed.
"""

from __future__ import annotations

import hashlib
import logging
import posixpath
import re
import time
from dataclasses import dataclass
from pathlib import Path

from prime_kernels.errors import ArtifactError, CompileError
from prime_kernels.loader import manifest, meta, nvrtc
from prime_kernels.loader.entry import CacheKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from prime_kernels.loader.arch import Target
    from prime_kernels.loader.manifest import SourceEntry, Sources
    from prime_kernels.loader.meta import Spec
    from prime_kernels.loader.nvrtc import Nvrtc
    from prime_kernels.loader.store import Store

LOG = logging.getLogger("prime_kernels.loader")
FOLDER = Path(__file__).resolve().parent.parent / "_src"
ENTRIES = "ENTRIES.json"
# Beside what nvcc gets: NVRTC compiles no host code, so an unmarked constexpr function is meant for the device.
NVRTC_OPTIONS = ("-default-device",)
_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)"([^"]+)"', re.M)


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit with everything it includes.

    Attributes:
        entry: Its line of ENTRIES.json.
        source: Text of the entry file.
        headers: Text of every included file by package-relative name.
        options: Compiler options but for the target.
        src_fp: 16 hex digits over name and text of the entry file.
        hdr_fp: 8 hex digits over headers and options.
    """

    entry: SourceEntry
    source: str
    headers: dict[str, str]
    options: tuple[str, ...]
    src_fp: str
    hdr_fp: str

    def cache_key(self, release: str, target: Target) -> CacheKey:
        """Name in the cache of what NVRTC `release` makes of this unit."""
        return CacheKey(f"{self.src_fp}-nvrtc{release}-{self.hdr_fp}", target, self.entry.key)


def read_sources(folder: Path = FOLDER) -> Sources | None:
    """ENTRIES.json of the shipped sources; None if this installation carries none.

    Raises:
        ArtifactError: It is malformed (E10).
    """
    path = folder / ENTRIES
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return manifest.parse_sources(data, str(path))


def _read(folder: Path, name: str, via: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise manifest.bad(str(folder / name), f"included by {via}, cannot be read ({err})") from err


def _rooted(name: str, text: str) -> tuple[str, list[str]]:
    """Text whose quoted includes name files from the sources' root, and those names.

    NVRTC looks in-memory headers up by the very text of the directive; the sources write it relative to themselves.
    """
    found = []

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
        if target.startswith(("../", "/")):
            raise manifest.bad(name, f'#include "{match[2]}" leaves the sources')
        found.append(target)
        return f'{match[1]}"{target}"'

    return _INCLUDE.sub(replace, text), found


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    hasher = hashlib.sha256()
    for name, text in parts:
        hasher.update(f"{name}\0{len(text.encode())}\0".encode() + text.encode())
    return hasher.hexdigest()


def read_unit(sources: Sources, key: str, folder: Path = FOLDER) -> Unit | None:
    """Read an entry file and all that it includes.

    Args:
        sources: The parsed ENTRIES.json.
        key: Kernel key.
        folder: Where the sources are.

    Returns:
        The unit; None if the key is not among the sources.

    Raises:
        ArtifactError: A file is missing or an include leaves the folder (E10).
    """
    entry = sources.entries.get(key)
    if entry is None:
        return None
    raw = _read(folder, entry.file, ENTRIES)
    # The entry's own includes are written from the root already.
    source, queue = _rooted("", raw)
    headers: dict[str, str] = {}
    while queue:
        name = queue.pop()
        if name not in headers:
            headers[name], more = _rooted(name, _read(folder, name, entry.file))
            queue += more
    ordered = dict(sorted(headers.items()))
    options = (*sources.options, *NVRTC_OPTIONS)
    src_fp = _digest([(entry.file, source)])[:16]
    hdr_fp = _digest([*ordered.items(), ("options", " ".join(options))])[:8]
    return Unit(entry, source, ordered, options, src_fp, hdr_fp)


def unbuildable(compiler: Nvrtc, target: Target, driver: int | None) -> CompileError | None:
    """The error for a compiler whose cubin for `target` could not be made or not be loaded (E30), or None.

    Args:
        compiler: The NVRTC found.
        target: Target of the device.
        driver: CUDA version of the driver that is to load it; None if that is not known.
    """
    reason = compiler.cannot_build(target)
    if reason is None and driver is not None and compiler.version[0] > driver // 1000:
        reason = (
            f"NVRTC {compiler.release} ({compiler.path}) makes cubins that a driver for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10} does not load"
        )
    return None if reason is None else nvrtc.too_old(reason, compiler, target)


def switched_off(key: str, target: Target, mode: str, shipped: Iterable[str]) -> CompileError:
    """The error for a kernel that would have to be compiled although that is switched off (E31)."""
    family = key.split("|", 1)[0]
    near = sorted({name for name in shipped if name.split("|", 1)[0] == family})[:5]
    why = "after warm-up" if mode == "error-after-warmup" else "PRIME_KERNELS_JIT=never"
    return CompileError(
        f"{key} for {target} is in no pack and no cache, and compiling is off ({why}). "
        f"Shipped: {', '.join(near) or 'nothing of this family'}.",
        code="E31",
        facts={"key": key, "target": str(target), "mode": mode, "nearest": near},
        remedy=f"Run `prime-kernels warmup --arch {target}` before, or set PRIME_KERNELS_JIT=auto.",
    )


def describe(cubin: bytes, entry: SourceEntry, target: Target, origin: str) -> Spec:
    """Spec of a compiled entry after all checks (see `meta.make_spec`)."""
    return meta.make_spec(
        cubin,
        key=entry.key,
        symbol=entry.kernel,
        arch=target,
        args=entry.args,
        args_hash=entry.args_hash,
        origin=origin,
    )


def compile_unit(unit: Unit, compiler: Nvrtc, target: Target, store: Store | None = None) -> bytes:
    """Compile and check a unit.

    Args:
        unit: What to compile.
        compiler: With what.
        target: For what.
        store: Where the whole log of a failure is kept; None keeps it in the error's facts only.

    Returns:
        The cubin: one kernel, right target, right argument layout. Spills are logged, not refused.

    Raises:
        CompileError: It does not compile, or what came out is not what was promised (E32).
    """
    key = unit.entry.key
    LOG.warning("compiling %s for %s with NVRTC %s, once; takes seconds", key, target, compiler.release)
    begin = time.monotonic()
    options = (f"--gpu-architecture={target}", *unit.options)
    try:
        cubin, _ = nvrtc.compile_cubin(compiler, unit.entry.file, unit.source, unit.headers, options)
        spec = describe(cubin, unit.entry, target, "built")
    except CompileError as err:
        path = store.keep_log(key, str(err.facts.get("log", ""))) if store is not None and err.code == "E32" else None
        if path is None:
            raise
        facts = {**err.facts, "log_path": path}
        raise CompileError(f"{err.message}Full log: {path}.", code=err.code, facts=facts, remedy=err.remedy) from err
    except ArtifactError as err:
        raise CompileError(
            f"NVRTC {compiler.release} made something else of {key} than was promised: {err.message}",
            facts={**err.facts, "nvrtc": compiler.release, "target": str(target)},
            remedy="This is a bug of prime-kernels: report it with `prime-kernels doctor --json`.",
        ) from err
    if spec.stack_bytes:
        LOG.warning("%s spills: %d bytes of stack per thread, need 0 for full speed", key, spec.stack_bytes)
    LOG.warning("compiled %s for %s in %.1f s, %d registers", key, target, time.monotonic() - begin, spec.regs)
    return cubin
