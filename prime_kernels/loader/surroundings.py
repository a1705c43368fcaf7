# SPDX-License-Identifier: Apache-2.0
"""Facts about this Python environment and host that decide whether an installation can be trusted."""

from __future__ import annotations

import os
import re

from prime_kernels.errors import ArtifactError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution

# Libraries that must not be mapped twice with different majors.
_CUDA_LIBRARY = re.compile(r"/(lib(?:cudart|nvrtc|cublas|nvJitLink))\.so\.(\d+)")


def owners(found: Iterable[Distribution], module: str = "prime_kernels") -> list[tuple[str, str, str]]:
    """(name, version, folder) of every distribution whose files include the module, in search order."""
    result = {}
    for dist in found:
        record = dist.read_text("RECORD") or ""
        if f"\n{module}/__init__.py," in "\n" + record:
            where = str(dist.locate_file(""))
            result[where, dist.metadata["Name"]] = (dist.metadata["Name"], dist.version, where)
    return list(result.values())


def conflict(found: list[tuple[str, str, str]]) -> ArtifactError | None:
    """The error for a module that several distributions own (E12), or None."""
    if len(found) < 2:
        return None
    text = " and ".join(f"{name} {version} in {where}" for name, version, where in found)
    return ArtifactError(
        f"the module prime_kernels is owned by {len(found)} distributions: {text}.",
        code="E12",
        facts={"owners": found},
        remedy="Uninstall all of them, then install the one you want.",
    )


def in_container() -> str | None:
    """Name of the container runtime this process is in, as far as it shows; None outside."""
    for path, name in (("/run/.containerenv", "podman"), ("/.dockerenv", "docker")):
        if os.path.exists(path):
            return name
    return None


def mixed_cuda(maps: str) -> dict[str, list[str]]:
    """Majors by library where the text of /proc/self/maps shows more than one."""
    found: dict[str, set[str]] = {}
    for library, major in _CUDA_LIBRARY.findall(maps):
        found.setdefault(library, set()).add(major)
    return {library: sorted(majors) for library, majors in found.items() if len(majors) > 1}
