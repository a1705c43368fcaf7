# SPDX-License-Identifier: Apache-2.0
"""What `doctor` finds out: one section per topic, each guarded, none of which needs a GPU, torch or a CUDA context."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distributions
from importlib.metadata import version as installed_version
from pathlib import Path

import prime_kernels
from prime_kernels.errors import ArtifactError, CompileError, PrimeKernelsError
from prime_kernels.loader import device, hostlib, nvrtc, packs, places, resolve, select, surroundings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from prime_kernels.loader.hostlib import DeviceFacts, Host
    from prime_kernels.loader.resolve import Installation
    from prime_kernels.settings import Settings

    Counts = dict[tuple[int, int], tuple[int, int, list[PrimeKernelsError]]]

OK, DEGRADED, UNUSABLE = 0, 1, 2
RESULTS = ("ok", "degraded", "unusable")


@dataclass
class Section:
    """One line (or a few) of the report.

    Attributes:
        name: Topic.
        lines: Text.
        data: The same for programs.
        level: `OK`, `DEGRADED` or `UNUSABLE`.
        codes: Error codes behind the level.
    """

    name: str
    lines: list[str]
    data: Any = None
    level: int = OK
    codes: list[str] = field(default_factory=list)

    @classmethod
    def failed(cls, name: str, error: PrimeKernelsError, level: int = UNUSABLE) -> Section:
        """The section of a topic that raised."""
        data = {"error": str(error), "code": error.code}
        return cls(name, [f"{error.code}  {error.message}", f"      {error.remedy}"], data, level, [error.code])


def _package(at: Installation) -> Section:
    owned = surroundings.owners(distributions())
    manifest = packs.read_manifest()
    data = {
        "version": prime_kernels.__version__,
        "path": str(Path(prime_kernels.__file__).parent),
        "commit": manifest.commit if manifest else None,
        "packs": [pack.name for pack in at.packs],
        "kernels": sum(len(pack.header.entries) for pack in at.packs),
        "sources": len(at.sources.entries) if at.sources else 0,
        "owners": owned,
    }
    shipped = ", ".join(pack.name for pack in at.packs) or "none, kernels are compiled at first use"
    lines = [f"{data['version']}  {data['path']}", f"packs: {shipped}"]
    error = surroundings.conflict(owned)
    if error is None:
        return Section("package", lines, data)
    broken = Section.failed("package", error, DEGRADED)
    return Section("package", [*lines, *broken.lines], data, DEGRADED, broken.codes)


def _host() -> Section:
    try:
        wsl = "microsoft" in Path("/proc/version").read_text().lower()
    except OSError:
        wsl = False
    data = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "container": surroundings.in_container(),
        "wsl": wsl,
    }
    extra = f", container: {data['container']}" if data["container"] else ""
    text = f"{data['system']}, {data['libc']}, Python {data['python']}{extra}{', WSL' if wsl else ''}"
    return Section("host", [text], data)


def _driver(host: Host, at: Installation) -> tuple[Section, int | None]:
    version = host.driver_version()
    usable = select.usable_sets(version, [pack.header for pack in at.packs])
    release = device.installed_release()
    data = {"cuda": version, "release": release, "usable_packs": list(usable), "binding": host.name}
    text = f"{release or '?'} (CUDA {select.version_text(version)})  packs usable: {', '.join(usable) or 'none'}"
    newest = max((pack.header.min_driver for pack in at.packs), default=0)
    old = f"too old for the newest pack, which needs CUDA {select.version_text(newest)}"
    note = [old] if newest > version else []
    return Section("driver", [text, *note], data, DEGRADED if note else OK), version


def _kernels(cc: tuple[int, int], driver: int, at: Installation) -> tuple[int, int, list[PrimeKernelsError]]:
    """(kernels that are there, kernels to be compiled, errors of the rest) on a device of this kind."""
    ready, built, problems = 0, 0, []
    for key in at.facts_by_key():
        try:
            found = select.first_accepted(resolve.resolve(key, cc, driver, at, build=False)[1])
        except PrimeKernelsError as error:
            problems.append(error)
            continue
        compiled = found is not None and found.where.startswith("nvrtc")
        ready, built = ready + (found is not None and not compiled), built + compiled
    return ready, built, problems


def _gpu(facts: DeviceFacts, driver: int, at: Installation, counts: Counts) -> Section:
    name = f"gpu {facts.ordinal}"
    data: dict[str, Any] = {
        "name": facts.name,
        "cc": f"{facts.cc[0]}.{facts.cc[1]}",
        "sm_count": facts.sm_count,
        "bytes": facts.total_bytes,
        "mig": device.is_mig(facts),
        "uuid": facts.uuid,
    }
    line = f"{facts.name}  sm_{facts.cc[0]}{facts.cc[1]}  {facts.sm_count} SMs  {facts.total_bytes / 1e9:.0f} GB"
    headers = [pack.header for pack in at.packs]
    try:
        device.check(facts, driver, headers, at.settings.pack)
    except PrimeKernelsError as error:
        section = Section.failed(name, error)
        return Section(name, [line, *section.lines], data | section.data, UNUSABLE, section.codes)
    # Every kernel is read and verified; once per kind of GPU is enough.
    if facts.cc not in counts:
        counts[facts.cc] = _kernels(facts.cc, driver, at)
    ready, built, problems = counts[facts.cc]
    data |= {"kernels_ready": ready, "kernels_to_compile": built, "errors": [str(error) for error in problems]}
    codes = sorted({error.code for error in problems})
    level = UNUSABLE if ready + built == 0 else DEGRADED if built or problems else OK
    text = f"{ready} kernels ready, {built} to be compiled at first use" if built else f"{ready} kernels ready"
    return Section(name, [f"{line}  {text}", *(str(error) for error in problems[:1])], data, level, codes)


def _torch() -> Section:
    try:
        version = installed_version("torch")
    except PackageNotFoundError:
        return Section("torch", ["not installed (needed by mega_moe, by nothing else)"], {"version": None})
    return Section("torch", [version], {"version": version})


def _nvrtc(settings: Settings, needed: bool) -> Section:
    found, tried = nvrtc.find(settings.nvrtc)
    if found is None:
        error: CompileError = nvrtc.missing(tried)
        if needed:
            return Section.failed("nvrtc", error, DEGRADED)
        return Section("nvrtc", ["not found; only needed for kernels that are not shipped"], {"tried": list(tried)})
    data = {"version": found.release, "path": found.path, "source": found.source, "jit": settings.jit}
    return Section("nvrtc", [f"{found.release}  ({found.source})  jit: {settings.jit}"], data)


def _nvshmem() -> Section:
    data: dict[str, str | None] = {}
    for name in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12", "nvshmem4py-cu13"):
        try:
            data[name] = installed_version(name)
        except PackageNotFoundError:
            data[name] = None
    there = [f"{name} {version}" for name, version in data.items() if version]
    return Section("nvshmem", [", ".join(there) or "not installed (optional)"], data)


def _cache(settings: Settings) -> Section:
    uid, refused, usable = os.geteuid(), [], None
    for source, path in places.candidates(settings, uid):
        place, fd = places.probe(source, path, uid, shared=settings.cache_shared, create=False)
        if fd is not None:
            os.close(fd)
        if place.refused is None:
            usable = place
            break
        refused.append(place)
    data = {
        "path": usable.path if usable else None,
        "filesystem": usable.filesystem if usable else None,
        "refused": [{"path": p.path, "source": p.source, "reason": p.refused} for p in refused],
        "read_only": list(settings.cache_ro),
    }
    lines = [f"{usable.path}  {usable.filesystem}" if usable else "memory only"]
    if usable and usable.network:
        lines.append("network file system: locks are kept on this node, worst case one compile per node")
    lines += [f"E20  {place.path} ({place.source}) refused: {place.refused}" for place in refused]
    bad = usable is None or any(place.source == "PRIME_KERNELS_CACHE_DIR" for place in refused)
    return Section("cache", lines, data, DEGRADED if bad else OK, ["E20"] if bad else [])


def _environment(settings: Settings) -> Section | None:
    if not settings.variables and not settings.unknown:
        return None
    lines = [f"{name}={value}" for name, value in settings.variables]
    lines += [f"{name} means nothing to prime-kernels" for name in settings.unknown]
    return Section("env", lines, dict(settings.variables))


def _mapped() -> Section | None:
    try:
        mixed = surroundings.mixed_cuda(Path("/proc/self/maps").read_text(errors="replace"))
    except OSError:
        mixed = {}
    if not mixed:
        return None
    text = "; ".join(f"{library} {' and '.join(majors)}" for library, majors in mixed.items())
    return Section("cuda", [f"two CUDA majors are mapped in this process: {text}"], mixed, DEGRADED)


def _guard(name: str, probe: Callable[[], Section | None], level: int = UNUSABLE) -> Section | None:
    try:
        return probe()
    except PrimeKernelsError as error:
        return Section.failed(name, error, level)


def collect(settings: Settings) -> list[Section]:
    """All sections, in the order of the report.

    Args:
        settings: The process's settings.
    """
    sections: list[Section | None] = []
    at = None
    try:
        at = resolve.Installation.open(settings)
    except ArtifactError as error:
        sections.append(Section.failed("package", error))
    if at is not None:
        installed = at
        sections.append(_guard("package", lambda: _package(installed)))
    sections.append(_host())
    needed = False
    try:
        host = hostlib.host()
        if at is not None:
            section, driver = _driver(host, at)
            sections.append(section)
            counts: Counts = {}
            gpus = [_gpu(facts, driver or 0, at, counts) for facts in device.machine(host).devices]
            sections += gpus or [Section.failed("gpu", device.no_device())]
            needed = any(gpu.data.get("kernels_to_compile") for gpu in gpus)
    except PrimeKernelsError as error:
        sections.append(Section.failed("driver", error))
    probes = [_torch, lambda: _nvrtc(settings, needed), _nvshmem, lambda: _cache(settings)]
    sections += [_guard("probe", probe) for probe in [*probes, lambda: _environment(settings), _mapped]]
    return [section for section in sections if section is not None]
