# SPDX-License-Identifier: Apache-2.0
"""A loader without a driver: real `Kernel` objects with the structs of the sources, whose launches are kept."""

from __future__ import annotations

import ctypes
import functools
import time
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from build_tools.entries import Entry, generate
from build_tools.variants import read_variants
from prime_kernels.loader.abi import MAP_ALIGN, MAP_BYTES, PkLaunch, PkTensorMap
from prime_kernels.loader.arch import Target
from prime_kernels.loader.args import RECORD
from prime_kernels.loader.launch import Kernel
from prime_kernels.loader.manifest import ArgField
from prime_kernels.loader.meta import LaunchMeta, Spec
from prime_kernels.moe import cuda_launch

VARIANTS = {variant.key: variant for variant in read_variants()}


def encode(record: int, out: int) -> int:
    """`pk_host_encode_tensor_map`: puts all of a record but the strides in elements and its place into 128 bytes."""
    assert out % MAP_ALIGN == 0
    data = ctypes.string_at(record, RECORD.size)
    found = data[: PkTensorMap.elem_strides.offset] + data[PkTensorMap.dtype.offset : PkTensorMap.args_offset.offset]
    ctypes.memmove(out, found.ljust(MAP_BYTES, b"+"), MAP_BYTES)
    return 0


def arguments(request: PkLaunch) -> bytes:
    """What `pk_host_launch` would hand to the driver: the struct with its tensor maps encoded."""
    storage = ctypes.create_string_buffer(request.args_bytes + MAP_ALIGN)
    skip = -ctypes.addressof(storage) % MAP_ALIGN
    ctypes.memmove(ctypes.addressof(storage) + skip, request.args, request.args_bytes)
    for index in range(request.num_maps):
        record = request.maps + index * RECORD.size
        offset = PkTensorMap.from_address(record).args_offset
        assert offset + MAP_BYTES <= request.args_bytes
        encode(record, ctypes.addressof(storage) + skip + offset)
    return storage.raw[skip : skip + request.args_bytes]


class Seen(NamedTuple):
    """One launch as the driver would get it: tensor maps stand in the arguments, whoever encoded them.

    Attributes:
        encoded: Tensor maps that the launch encoded itself.
    """

    name: str
    grid: int
    stream: int
    args: bytes
    encoded: int
    kernel: Kernel
    thread: int

    def values(self) -> dict[str, Any]:
        """Arguments by name, read back from the struct."""
        packer = self.kernel.packer
        return dict(zip(packer.names, packer._struct.unpack(self.args), strict=True))

    def map_addresses(self) -> dict[str, int]:
        """Address of every tensor map."""
        offsets = self.kernel.packer.map_offsets
        return {name: int.from_bytes(self.args[at : at + 8], "little") for name, at in offsets.items()}


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
            lib=SimpleNamespace(pk_host_launch=launch, pk_host_encode_tensor_map=encode),
            error_name=lambda status: "CUDA_ERROR_MADE_UP",
        )

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the loader of the cuda backend, on a machine that looks like one H200 with stream 7."""
        monkeypatch.setattr(cuda_launch, "load_kernel", self.load_kernel)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        cuda_launch.sm_count.cache_clear()

    def _launch(self, address: int) -> int:
        if self.pause:
            time.sleep(self.pause)
        request = PkLaunch.from_address(address)
        key = self._keys[request.kernel - 1]
        grid = tuple(request.grid)
        assert grid[1:] == (1, 1)
        name, kernel, count = VARIANTS[key].kernel, self._kernels[key], request.num_maps
        self.seen.append(Seen(name, grid[0], request.stream, arguments(request), count, kernel, get_ident()))
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
