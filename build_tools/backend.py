# SPDX-License-Identifier: Apache-2.0
"""The PEP 517 backend: setuptools, with the host library, the JIT's sources and ready packs put in place first.

It never compiles CUDA. Packs come from $PRIME_KERNELS_PACKS (a folder with MANIFEST.json), else from build/packs when
they were built from these sources; without packs the result compiles its kernels at first use.
$PRIME_KERNELS_REQUIRE=1 turns missing packs into an error. An editable install works without a C compiler too: the
loader then says what it lacks.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import get_requires_for_build_sdist as get_requires_for_build_sdist
from setuptools.build_meta import get_requires_for_build_wheel as get_requires_for_build_wheel
from setuptools.command.bdist_wheel import bdist_wheel

from build_tools import host_shim, pack, stage
from build_tools.variants import ROOT

Settings = dict[str, Any] | None
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_sdist = build_meta.build_sdist


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """One wheel for every Python: platform-specific files, no extension module of any CPython ABI."""

    def initialize_options(self) -> None:
        """Makes setuptools install into platlib, which auditwheel demands of a wheel that holds a shared library."""
        super().initialize_options()
        self.distribution.has_ext_modules = lambda: True

    def finalize_options(self) -> None:
        """Not pure, whatever setuptools found."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform>."""
        return "py3", "none", super().get_tag()[2]


def _say(message: str) -> None:
    print(f"prime-kernels build: {message}", file=sys.stderr)


def stage_packs() -> bool:
    """Puts ready packs in place; returns whether there are any. See the module's first lines for where they come from.

    Raises:
        pack.PackError: the named packs are missing, damaged or stale, or none were found and they are required.
    """
    named = os.environ.get("PRIME_KERNELS_PACKS", "")
    required = os.environ.get("PRIME_KERNELS_REQUIRE", "0") not in ("", "0")
    folder = Path(named) if named else ROOT / "build" / "packs"
    shutil.rmtree(stage.PACKAGE / "_packs", ignore_errors=True)
    try:
        stage.stage_packs(folder)
    except pack.PackError as error:
        if named or required:
            raise
        _say(f"no packs ({error}); kernels will be compiled at first use")
        return False
    _say(f"packs from {folder}")
    return True


def _clean() -> None:
    """Removes what an earlier build left in setuptools' folders: files deleted since would ship again."""
    for path in [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist.*")]:
        shutil.rmtree(path, ignore_errors=True)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Builds a wheel tagged py3-none-linux_<machine>; build_tools/make_wheel.py turns it into a manylinux one."""
    _clean()
    host_shim.build()
    stage.stage_sources()
    stage_packs()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """An editable install: the host library if there is a C compiler, the sources, and packs if there are any."""
    try:
        host_shim.build()
    except host_shim.ShimError as error:
        _say(f"no host library: {error}")
    stage.stage_sources()
    stage_packs()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
