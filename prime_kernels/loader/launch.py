# SPDX-License-Identifier: Apache-2.0
"""The `Kernel` that a call goes through.

A launch fills two buffers and makes one C call. `prepared.py` has launches whose buffers are filled once.
"""

from __future__ import annotations

import ctypes
import threading

from prime_kernels.errors import BackendUnavailable, LaunchError
from prime_kernels.loader import abi, fork
from prime_kernels.loader.abi import PkLaunch
from prime_kernels.loader.args import RECORD, ArgsPacker
from prime_kernels.loader.args import tensor_map as tensor_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from prime_kernels.loader.hostlib import Host
    from prime_kernels.loader.meta import Spec

    Dims = int | tuple[int, ...]


class Buffers:
    """A request to launch one kernel, with the buffers that it points to."""

    def __init__(self, kernel: Kernel) -> None:
        spec, count = kernel.spec, len(kernel.packer.map_offsets)
        size = -(-spec.meta.args_bytes // 8) * 8  # whole words, for `Prepared`
        args = ctypes.create_string_buffer(size + abi.MAP_ALIGN)
        maps = ctypes.create_string_buffer(max(count, 1) * RECORD.size)
        skip = -ctypes.addressof(args) % abi.MAP_ALIGN
        # Views: assigning to a slice of a ctypes array takes 3 us, to one of a memoryview 0.1 us. They keep the arrays.
        self.args, self.maps = memoryview(args).cast("B")[skip : skip + size], memoryview(maps).cast("B")
        self.request = PkLaunch(
            kernel=kernel.handle,
            args=ctypes.addressof(args) + skip,
            maps=ctypes.addressof(maps),
            args_bytes=spec.meta.args_bytes,
            num_maps=count,
            block=(spec.meta.threads, 1, 1),
            cluster=(spec.meta.cluster, 1, 1),
            smem_bytes=spec.meta.smem_bytes,
        )
        self.grid = self.request.grid  # a view: making one costs more than writing through it
        self.address = ctypes.addressof(self.request)
        self._packer, self._key = kernel.packer, spec.key

    def pack(
        self, grid: Dims, args: Mapping[str, Any], maps: Mapping[str, tuple[bytes, int]] | None
    ) -> tuple[int, ...]:
        """Write arguments, tensor maps and the grid, which is returned in three dimensions."""
        self._packer.pack_into(self.args, args, self._key)
        if self._packer.map_names or maps:
            self._packer.pack_maps_into(self.maps, maps or {}, self._key)
        self.grid[:] = shape = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        return shape


class _ThreadBuffers(Buffers, threading.local):
    """One thread's request; threads never share one."""


class Kernel:
    """A loaded kernel on one device.

    Args:
        host: The driver binding that loaded it.
        spec: What it is.
        handle: The driver's handle.
        ordinal: Device it was prepared for.
        sm_count: SMs of that device, for messages.

    Attributes:
        spec: Key, target, launch shape, argument fields, registers, origin.
        packer: Names of arguments and tensor maps.
        entry: What makes a launch of a request at an address; returns a CUresult or a negative number of the ABI.
    """

    def __init__(self, host: Host, spec: Spec, handle: int, ordinal: int, sm_count: int) -> None:
        self.host, self.spec, self.handle, self.ordinal, self.sm_count = host, spec, handle, ordinal, sm_count
        self.packer = ArgsPacker(spec.args, spec.meta.args_bytes)
        self._buffers = _ThreadBuffers(self)
        self._resident: set[tuple[int, ...]] = set()
        self.entry = host.lib.pk_host_launch

    def __repr__(self) -> str:
        return f"Kernel({self.spec.key!r}, {self.spec.arch}, {self.spec.origin}, device={self.ordinal})"

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.spec.meta.threads

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory per CTA."""
        return self.spec.meta.smem_bytes

    @property
    def cluster(self) -> int:
        """CTAs per cluster."""
        return self.spec.meta.cluster

    def launch(
        self,
        *,
        grid: Dims,
        stream: int,
        args: Mapping[str, Any],
        maps: Mapping[str, tuple[bytes, int]] | None = None,
        pdl: bool = False,
        co_resident: bool = False,
    ) -> None:
        """Put the kernel on a stream of the calling thread's current context, which must be on this kernel's device.

        Args:
            grid: CTAs, one number or up to three.
            stream: CUstream as a number; 0 is the legacy stream.
            args: Value of every argument field but the tensor maps; pointers as numbers.
            maps: For every tensor map its `tensor_map(...)` and the device address, a multiple of 16.
            pdl: Let it start before its predecessor on the stream has ended; it must wait for it itself.
            co_resident: Its CTAs wait for each other: refuse a grid that this context cannot hold at once.

        Raises:
            LaunchError: Wrong arguments, or the driver refuses a tensor map or the launch (E43).
            BackendUnavailable: The grid does not fit (E40), or the process was forked (E60).
        """
        if fork.forked:
            fork.check()
        buffers = self._buffers
        request = buffers.request
        shape = buffers.pack(grid, args, maps)
        request.stream, request.flags = stream, abi.LAUNCH_PDL if pdl else 0
        if co_resident and shape not in self._resident:
            self._check_resident(request, shape)
        status = self.entry(buffers.address)
        if status == abi.INVALID_CONTEXT:
            status = self.enter_context(buffers.address)
        if status:
            raise self.failure(status, request)

    def _check_resident(self, request: PkLaunch, shape: tuple[int, ...]) -> None:
        clusters, per_cluster = self.host.max_active_clusters(request), self.spec.meta.cluster
        need = shape[0] * shape[1] * shape[2]
        if need > clusters * per_cluster:
            raise self._does_not_fit(need, clusters * per_cluster)
        self._resident.add(shape)

    def _does_not_fit(self, need: int, fits: int | None) -> BackendUnavailable:
        meta = self.spec.meta
        room = "this context does not hold them" if fits is None else f"this context fits {fits}"
        return BackendUnavailable(
            f"{self.spec.key} needs {need} CTAs in clusters of {meta.cluster} resident "
            f"({meta.threads} threads, {meta.smem_bytes} bytes of shared memory each); {room} "
            f"({self.sm_count} SMs on device {self.ordinal}).",
            code="E40",
            facts={"key": self.spec.key, "needed": need, "fits": fits, "sm_count": self.sm_count},
            remedy='Give the process the whole GPU (MIG, MPS or green-context limits?), or use backend="grouped".',
        )

    def enter_context(self, request: int) -> int:
        """Launch again, with the device's primary context current if the thread had none; returns the status.

        The CUDA runtime gives a thread its context at the thread's first runtime call that needs one. A thread that
        only launches through the driver may come before that: autograd's, when every allocation is served from a cache.
        """
        if self.host.current_device() >= 0:
            return abi.INVALID_CONTEXT
        self.host.use_device(self.ordinal)
        return int(self.entry(request))

    def failure(self, status: int, request: PkLaunch) -> LaunchError | BackendUnavailable:
        """The error for what `entry` returned about a request of this kernel."""
        if status in (abi.OUT_OF_RESOURCES, abi.COOPERATIVE_TOO_LARGE, abi.INVALID_CLUSTER_SIZE):
            shape = request.grid
            return self._does_not_fit(shape[0] * shape[1] * shape[2], None)
        name, failed = self.host.error_name(status), request.failed_map
        facts: dict[str, object] = {"key": self.spec.key, "cuda_result": status, "name": name}
        if failed >= 0:
            which = self.packer.map_names[failed]
            facts["tensor_map"] = which
            address = ctypes.c_uint64.from_address(request.maps + failed * RECORD.size).value
            return LaunchError(
                f"the driver refuses tensor map {which} of {self.spec.key}: {name} ({status}); address {address:#x}.",
                facts=facts,
                remedy="Check that the address is a multiple of 16 (32 for interleaved layouts) and on this device.",
            )
        return LaunchError(
            f"launching {self.spec.key} failed: {name} ({status}).",
            facts=facts,
            remedy="An earlier asynchronous error shows here too: run once with CUDA_LAUNCH_BLOCKING=1.",
        )
