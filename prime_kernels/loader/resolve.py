# SPDX-License-Identifier: Apache-2.0
"""Finds the cubin of a kernel: installed packs, read-only caches, cache, just-in-time compiler, in that order.

Every step leaves a decision in the trace, which is what errors and `prime-kernels explain` print.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from prime_kernels.errors import ArtifactError, BackendUnavailable, PrimeKernelsError
from prime_kernels.loader import arch, jit, meta, nvrtc, select
from prime_kernels.loader.packs import FOLDER as PACKS_FOLDER
from prime_kernels.loader.packs import open_installed
from prime_kernels.loader.select import Accepted, Decision, Rejected
from prime_kernels.loader.store import Store
from prime_kernels.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from prime_kernels.loader.manifest import Entry, Sources
    from prime_kernels.loader.meta import Spec
    from prime_kernels.loader.packs import Pack
    from prime_kernels.settings import Settings

LOG = logging.getLogger("prime_kernels.loader")


@dataclass(frozen=True)
class Installation:
    """What this process can take kernels from: opened packs and sources with their folders, the cache, the settings."""

    packs: tuple[Pack, ...]
    sources: Sources | None
    store: Store
    settings: Settings
    packs_folder: Path = PACKS_FOLDER
    sources_folder: Path = jit.FOLDER

    @classmethod
    def open(
        cls, config: Settings, *, packs_folder: Path = PACKS_FOLDER, sources_folder: Path = jit.FOLDER
    ) -> Installation:
        """Open packs and sources; nothing is written.

        Raises:
            ArtifactError: A manifest or a pack is damaged (E10).
        """
        opened = tuple(open_installed(packs_folder))
        return cls(opened, jit.read_sources(sources_folder), Store(config), config, packs_folder, sources_folder)

    def facts_by_key(self) -> dict[str, Mapping[str, Any]]:
        """Facts of every key that packs or sources know, shipped ones first."""
        found: dict[str, Mapping[str, Any]] = {}
        for pack in self.packs:
            for key, entry in pack.header.entries.items():
                found.setdefault(key, entry.facts)
        for key, row in (self.sources.entries if self.sources else {}).items():
            found.setdefault(key, row.facts)
        return found


@lru_cache(maxsize=1)
def installation() -> Installation:
    """The installation of this process, opened at the first call."""
    config = settings()
    # Only if it was asked for: an application's own logging is its own business.
    if any(name == "PRIME_KERNELS_LOG" for name, _ in config.variables):
        logger = logging.getLogger("prime_kernels")
        logger.setLevel(config.log.upper())
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
    return Installation.open(config)


_warm, _warming = False, 0


def finish_warmup() -> None:
    """From now on PRIME_KERNELS_JIT=error-after-warmup refuses to compile. For the end of a job's first step."""
    global _warm
    _warm = True


@contextmanager
def warming_up() -> Iterator[None]:
    """Inside, PRIME_KERNELS_JIT=error-after-warmup lets kernels compile; a body that ends well finishes the warm-up."""
    global _warming
    _warming += 1
    try:
        yield
    finally:
        _warming -= 1
    finish_warmup()


def _jit_off(mode: str) -> bool:
    return mode == "never" or (mode == "error-after-warmup" and _warm and not _warming)


def _cached(unit: jit.Unit, target: arch.Target, driver: int, at: Installation) -> tuple[bytes, str] | None:
    """A cached build of these very sources by any NVRTC that the driver can follow."""
    from prime_kernels.loader.entry import CacheKey, nvrtc_of

    for build in at.store.builds(unit.src_fp, unit.hdr_fp):
        if nvrtc_of(build)[0] <= driver // 1000:
            hit = at.store.read(CacheKey(build, target, unit.entry.key))
            if hit is not None:
                return hit.cubin, hit.origin
    return None


def not_found(key: str, cc: tuple[int, int], trace: Sequence[Decision]) -> BackendUnavailable:
    """The error for a kernel that nothing holds (E09); its text ends with the trace."""
    return BackendUnavailable(
        f"no kernel {key} for sm_{cc[0]}{cc[1]}. Tried:\n{select.trace_text(trace)}\n",
        code="E09",
        facts={"key": key, "cc": f"{cc[0]}.{cc[1]}", "trace": select.trace_text(trace).splitlines()},
        remedy="Run `prime-kernels list` for what is installed; reinstall if a shipped kernel is missing.",
    )


def read_entry(pack: Pack, row: Entry) -> tuple[bytes, Spec]:
    """The verified cubin of a pack entry and its spec.

    Raises:
        ArtifactError: Hash, ELF header, kernel or argument layout differ from the pack's header (E05, E10, E11).
    """
    data = pack.cubin(row)
    common: dict[str, Any] = {"key": row.key, "symbol": row.symbol, "arch": row.arch, "args": row.args}
    return data, meta.make_spec(data, **common, args_hash=row.args_hash, origin=pack.name)


def _check_sources(pack: Pack, row: Entry, at: Installation) -> None:
    """Refuse a pack that was built from other sources than those beside it: one of the two is stale."""
    source = at.sources.entries.get(row.key) if at.sources is not None else None
    if source is not None and source.src_fp != row.src_fp:
        raise ArtifactError(
            f"{row.key} in pack {pack.name} was built from sources {row.src_fp[:12]}, "
            f"{at.sources_folder} holds {source.src_fp[:12]}: two builds are mixed.",
            code="E11",
            facts={"key": row.key, "pack": str(pack.path), "sources": str(at.sources_folder)},
            remedy="Reinstall prime-kernels; in a source tree run `python -m build_tools.stage` after building packs.",
        )


def resolve(
    key: str, cc: tuple[int, int], driver: int, at: Installation, *, build: bool = True
) -> tuple[tuple[bytes, Spec] | None, list[Decision]]:
    """Find a kernel, compiling it if that is what it takes.

    Args:
        key: Kernel key.
        cc: Compute capability of the device.
        driver: CUDA version of the driver.
        at: Where to look.
        build: False stops before compiling.

    Returns:
        The verified cubin with its spec (None if `build` is False and it would have to be compiled), and the trace.

    Raises:
        ArtifactError: The pack that was chosen is damaged (E10, E11).
        CompileError: It has to be compiled and cannot be (E30, E31, E32).
        BackendUnavailable: Nothing holds it, with the trace (E09).
    """
    trace = select.choose(key, cc, driver, [pack.header for pack in at.packs], forced=at.settings.pack)
    chosen = select.first_accepted(trace)
    if chosen is not None and chosen.entry is not None:
        pack = next(p for p in at.packs if p.name == chosen.where)
        _check_sources(pack, chosen.entry, at)
        return read_entry(pack, chosen.entry), trace
    target = arch.default_target(cc)
    unit = jit.read_unit(at.sources, key, at.sources_folder) if at.sources is not None else None
    if unit is None or target is None:
        trace.append(Rejected("jit", key, "no sources of this kernel are installed"))
        raise not_found(key, cc, trace)
    if target not in unit.entry.archs:
        names = ", ".join(map(str, unit.entry.archs))
        trace.append(Rejected("jit", key, f"written for {names}, not for {target}"))
        raise not_found(key, cc, trace)
    hit = _cached(unit, target, driver, at)
    if hit is not None:
        trace.append(Accepted(hit[1], key))
        return (hit[0], jit.describe(hit[0], unit.entry, target, hit[1])), trace
    trace.append(Rejected("cache", key, "not there"))
    return _compile(unit, target, driver, at, trace, build=build), trace


def _compile(
    unit: jit.Unit, target: arch.Target, driver: int, at: Installation, trace: list[Decision], *, build: bool
) -> tuple[bytes, Spec] | None:
    key, mode = unit.entry.key, at.settings.jit
    compiler, tried = nvrtc.find(at.settings.nvrtc)
    problem: PrimeKernelsError | None
    if _jit_off(mode):
        shipped = [name for pack in at.packs for name in pack.header.entries]
        problem = jit.switched_off(key, target, mode, shipped)
    else:
        problem = jit.unbuildable(compiler, target, driver) if compiler else nvrtc.missing(tried)
    if problem is not None or compiler is None:
        error = problem or nvrtc.missing(tried)
        trace.append(Rejected("jit", key, error.message))
        if build:
            raise error
        return None
    trace.append(Accepted(f"nvrtc {compiler.release}", key))
    if not build:
        return None
    if mode == "warn":
        LOG.warning("E31: %s for %s is not shipped; `prime-kernels warmup` would compile it ahead", key, target)
    cache_key = unit.cache_key(compiler.release, target)
    hit = at.store.get_or_build(
        cache_key, lambda: jit.compile_unit(unit, compiler, target, at.store), f"nvrtc {compiler.release}"
    )
    return hit.cubin, jit.describe(hit.cubin, unit.entry, target, hit.origin)


def check_family(name: str, cc: tuple[int, int], driver: int) -> None:
    """Refuse a kernel family that is not complete on a device: every op of it needs one kernel that would run.

    Raises:
        BackendUnavailable: No key of the family is installed, or some op has none for this device (E09).
    """
    at = installation()
    facts = at.facts_by_key()
    ops: dict[str, list[Decision]] = {}
    served: set[str] = set()
    for key in (decision.key for decision in select.keys_for(name, facts, None)):
        op = str(facts[key].get("op", key))
        try:
            trace = resolve(key, cc, driver, at, build=False)[1]
        except BackendUnavailable:
            trace = select.choose(key, cc, driver, [pack.header for pack in at.packs], forced=at.settings.pack)
        ops.setdefault(op, []).extend(trace)
        if select.first_accepted(trace):
            served.add(op)
    missing = [op for op in ops if op not in served]
    if missing or not ops:
        raise not_found(missing[0] if missing else name, cc, ops[missing[0]] if missing else [])
