# SPDX-License-Identifier: Apache-2.0
"""A loader without a driver: real `Kernel` objects with the structs of the sources, whose launches are kept."""

from __future__ import annotations

import ctypes
import functools
import time
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from build_tools.entries import Entry, generate
from build_tools.variants import read_variants
from prime_kernels.loader.abi import PkLaunch
from prime_kernels.loader.arch import Target
from prime_kernels.loader.args import RECORD
from prime_kernels.loader.launch import Kernel
from prime_kernels.loader.manifest import ArgField
from prime_kernels.loader.meta import LaunchMeta, Spec

VARIANTS = {variant.key: variant for variant in read_variants()}


class Seen(NamedTuple):
    """One launch as the host library would get it."""

    name: str
    grid: int
    stream: int
    args: bytes
    maps: bytes
    kernel: Kernel
    thread: int

    def values(self) -> dict[str, Any]:
        """Arguments by name, read back from the struct."""
        packer = self.kernel.packer
        return dict(zip(packer.names, packer._struct.unpack(self.args), strict=True))

    def map_addresses(self) -> dict[str, int]:
        """Address of every tensor map."""
        found = [RECORD.unpack_from(self.maps, at)[0] for at in range(0, len(self.maps), RECORD.size)]
        return dict(zip(self.kernel.packer.map_names, found, strict=True))


@functools.cache
def entry_of(key: str) -> Entry:
    """The generated entry of a variant; reading the sources takes a while."""
    return generate(VARIANTS[key])


class FakeLoader:
    """Stands in for `prime_kernels.loader`.

    Attributes:
        seen: Launches so far; none where `keep` is False, which costs a launch no time.
        status: What every launch returns.
        pause: Seconds that a launch lets other threads run before it reads its request.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.seen: list[Seen] = []
        self.status, self.pause = 0, 0.0
        self._keys: list[str] = []
        self._kernels: dict[str, Kernel] = {}
        launch = self._launch if keep else (lambda address: 0)
        self._host: Any = SimpleNamespace(
            lib=SimpleNamespace(pk_host_launch=launch), error_name=lambda status: "CUDA_ERROR_MADE_UP"
        )

    def _launch(self, address: int) -> int:
        if self.pause:
            time.sleep(self.pause)
        request = PkLaunch.from_address(address)
        key = self._keys[request.kernel - 1]
        args = ctypes.string_at(request.args, request.args_bytes)
        maps = ctypes.string_at(request.maps, request.num_maps * RECORD.size)
        grid = tuple(request.grid)
        assert grid[1:] == (1, 1)
        self.seen.append(
            Seen(VARIANTS[key].kernel, grid[0], request.stream, args, maps, self._kernels[key], get_ident())
        )
        return self.status

    def load_kernel(self, key: str, *, device: int | None = None) -> Kernel:
        """As `prime_kernels.loader.load_kernel`."""
        if key not in self._kernels:
            entry = entry_of(key)
            fields = tuple(ArgField(*cast("tuple[str, str, int, int]", tuple(field))) for field in entry.fields)
            meta = LaunchMeta(256, 0, 1, 1, 0, entry.args.size, 0)
            spec = Spec(key, VARIANTS[key].kernel, Target(9, 0, "a"), meta, fields, 32, 0, "test")
            self._keys.append(key)
            self._kernels[key] = Kernel(self._host, spec, len(self._keys), 0, 132)
        return self._kernels[key]
