# SPDX-License-Identifier: Apache-2.0
"""The few driver calls that the lab needs, by ctypes. torch owns context, memory and stream."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

BF16, FP32 = 9, 7  # CUtensorMapDataType
MAPS = {"a": 0, "b": 1, "z": 2, "o0": 3, "o1": 4}
ARGS_BYTES = 704
_MAP_BYTES = 128
_SWIZZLE_128, _L2_PROMOTION_256 = 3, 3
_MAX_DYNAMIC_SHARED, _CLUSTER_DIMENSION = 8, 4


class DriverError(RuntimeError):
    """A driver call failed."""


@dataclass(frozen=True)
class Box:
    """A tensor map: sizes and box innermost first, strides in bytes from the second dimension on."""

    pointer: int
    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(_Attribute)),
        ("num_attrs", ctypes.c_uint32),
    ]


class Args(ctypes.Structure):
    """struct Args of tile.cuh."""

    _fields_ = [
        ("maps", (ctypes.c_uint8 * _MAP_BYTES) * len(MAPS)),
        ("tiles", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("ds", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int32),
        ("stagger", ctypes.c_int32),
        ("num_n_tiles", ctypes.c_int32),
        ("copy_rounds", ctypes.c_int32),
        ("copy_src", ctypes.c_void_p),
        ("copy_dst", ctypes.c_void_p),
        ("reserved", ctypes.c_uint64),
    ]


class Module:
    """A loaded cubin. torch's context must be current."""

    def __init__(self, cubin: bytes) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._handle = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self._handle), cubin)

    def call(self, name: str, *args: object) -> None:
        """Call a driver function.

        Raises:
            DriverError: it did not return CUDA_SUCCESS.
        """
        code = getattr(self._cuda, name)(*args)
        if code:
            raise DriverError(f"{name} returned {code}")

    def function(self, name: str) -> ctypes.c_void_p:
        """A kernel."""
        handle = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(handle), self._handle, name.encode())
        return handle

    def words(self, name: str, count: int) -> tuple[int, ...]:
        """A global array of 32-bit words."""
        pointer, size, out = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_uint32 * count)()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(pointer), ctypes.byref(size), self._handle, name.encode())
        if size.value != ctypes.sizeof(out):
            raise DriverError(f"{name} has {size.value} bytes, need {ctypes.sizeof(out)}")
        self.call("cuMemcpyDtoH_v2", out, pointer, size)
        return tuple(out)

    def encode(self, args: Args, place: str, box: Box) -> None:
        """Fill one of the argument's tensor maps: swizzle of 128 bytes, zeros outside."""
        rank = len(box.sizes)
        # The driver wants 64-byte alignment, which ctypes does not give.
        room = (ctypes.c_uint8 * (_MAP_BYTES + 64))()
        start = -ctypes.addressof(room) % 64
        made = (ctypes.c_uint8 * _MAP_BYTES).from_buffer(room, start)
        u64, u32 = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        self.call(
            "cuTensorMapEncodeTiled", ctypes.byref(made), box.dtype, ctypes.c_uint32(rank),
            ctypes.c_void_p(box.pointer), u64(*box.sizes), u64(*box.strides), u32(*box.box), u32(*[1] * rank),
            0, _SWIZZLE_128, _L2_PROMOTION_256, 0,
        )  # fmt: skip
        ctypes.memmove(ctypes.byref(args.maps[MAPS[place]]), made, _MAP_BYTES)


class Kernel:
    """One of lab.cu's kernels, launched with a CTA per SM."""

    def __init__(self, module: Module, name: str, *, stream: int, sms: int) -> None:
        self.module, self._function = module, module.function(f"lab_{name}")
        threads, smem, self.tile_n, self.cluster = module.words(f"meta_{name}", 4)
        module.call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, ctypes.c_int(smem))
        self._attrs = (_Attribute * 1)()
        self._attrs[0].id = _CLUSTER_DIMENSION
        self._attrs[0].value[0:3] = (self.cluster, 1, 1)
        self.ctas = sms // self.cluster * self.cluster
        self._config = _Config((self.ctas, 1, 1), (threads, 1, 1), smem, stream, self._attrs, 1)
        clusters = ctypes.c_int()
        module.call("cuOccupancyMaxActiveClusters", ctypes.byref(clusters), self._function, ctypes.byref(self._config))
        self.max_clusters = clusters.value

    def launch(self, args: Args) -> None:
        """Queue one launch; the arguments may be changed afterwards."""
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self.module.call("cuLaunchKernelEx", ctypes.byref(self._config), self._function, params, None)
