# SPDX-License-Identifier: Apache-2.0
"""The host library's functions in pure ctypes: for systems where the shared object cannot load (musl, odd loaders).

Same names, same arguments, same return codes as kernels_src/host/prime_host.h, so that callers do not know which they
have. Pointers are passed as plain addresses. A launch costs several times what the C library needs.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof, byref, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

from prime_kernels.loader import abi
from prime_kernels.loader.abi import PkDevice, PkLaunch, PkTensorMap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ATTR_COOPERATIVE, _ATTR_CLUSTER, _ATTR_PDL = 2, 4, 6
_DEVICE_ATTRIBUTES = {
    "cc_major": 75,
    "cc_minor": 76,
    "sm_count": 16,
    "smem_optin_bytes": 97,
    "l2_bytes": 38,
    "cluster_launch": 120,
    "pci_domain": 50,
    "pci_bus": 33,
    "pci_device": 34,
}
# Exported names; where the header of the driver renames a call to a later version, the versioned one.
_NEEDED_TEXT = """
    cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDeviceTotalMem_v2
    cuDeviceGetUuid_v2 cuDevicePrimaryCtxRetain cuCtxSetCurrent cuCtxGetCurrent cuCtxGetDevice cuLibraryLoadData
    cuLibraryUnload cuLibraryGetKernel cuLibraryGetGlobal cuKernelGetAttribute cuKernelSetAttribute cuMemcpyDtoH_v2
    cuOccupancyMaxActiveClusters cuOccupancyMaxActiveBlocksPerMultiprocessor cuTensorMapEncodeTiled cuLaunchKernelEx
    cuGetErrorName cuGetErrorString
"""
_OWN_NAMES = {
    0: "CUDA_SUCCESS",
    abi.E_NO_DRIVER: "PK_E_NO_DRIVER",
    abi.E_NO_SYMBOL: "PK_E_NO_SYMBOL",
    abi.E_BAD_ARGUMENT: "PK_E_BAD_ARGUMENT",
    abi.E_NO_DLOPEN: "PK_E_NO_DLOPEN",
    abi.E_BAD_IMAGE: "PK_E_BAD_IMAGE",
    abi.E_BAD_SIZE: "PK_E_BAD_SIZE",
}


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("smem_bytes", c_uint32),
        ("stream", c_void_p),
        ("attrs", c_void_p),
        ("num_attrs", c_uint32),
    )


def _config(request: PkLaunch) -> tuple[_LaunchConfig, ctypes.Array[_LaunchAttribute]]:
    attrs, count = (_LaunchAttribute * 3)(), 0
    x, y, z = request.cluster
    if x * y * z > 1:
        attrs[0].id, attrs[0].value[0:3], count = _ATTR_CLUSTER, [x, y, z], 1
    for flag, number in ((abi.LAUNCH_COOPERATIVE, _ATTR_COOPERATIVE), (abi.LAUNCH_PDL, _ATTR_PDL)):
        if request.flags & flag:
            attrs[count].id, attrs[count].value[0], count = number, 1, count + 1
    config = _LaunchConfig(smem_bytes=request.smem_bytes, stream=request.stream, num_attrs=count)
    config.grid[:], config.block[:], config.attrs = request.grid[:], request.block[:], addressof(attrs)
    return config, attrs


class TwinLibrary:
    """Stands in for the loaded host library."""

    def __init__(self) -> None:
        self._cu: Any = None

    def pk_host_abi(self) -> int:
        return abi.HOST_ABI

    def pk_host_layout(self) -> int:
        return abi.layout()

    def pk_host_open(self, message: int, capacity: int) -> int:
        if self._cu is not None:
            return 0
        text, status = "", 0
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as err:
            text, status = str(err), abi.E_NO_DRIVER
        else:
            missing = next((name for name in _NEEDED_TEXT.split() if not hasattr(library, name)), None)
            if missing is None:
                self._cu = library
            else:
                text, status = missing, abi.E_NO_SYMBOL
        if message and capacity:
            data = text.encode()[: capacity - 1] + b"\0"
            ctypes.memmove(message, data, len(data))
        return status

    def _ready(self, *, init: bool = True) -> int:
        status = self.pk_host_open(0, 0)
        return status if status or not init else int(self._cu.cuInit(0))

    def _error(self, code: int, call: str, otherwise: bytes) -> bytes:
        if code in _OWN_NAMES:
            return _OWN_NAMES[code].encode()
        found = c_char_p()
        if code > 0 and self._ready(init=False) == 0 and getattr(self._cu, call)(code, byref(found)) == 0:
            return found.value or otherwise
        return otherwise

    def pk_host_error_name(self, code: int) -> bytes:
        return self._error(code, "cuGetErrorName", b"CUDA_ERROR_UNRECOGNIZED")

    def pk_host_error_text(self, code: int) -> bytes:
        return self._error(code, "cuGetErrorString", b"unrecognized error code")

    def pk_host_driver_version(self, version: int) -> int:
        return self._ready(init=False) or int(self._cu.cuDriverGetVersion(c_void_p(version)))

    def pk_host_device_count(self, count: int) -> int:
        return self._ready() or int(self._cu.cuDeviceGetCount(c_void_p(count)))

    def pk_host_device_attribute(self, ordinal: int, attribute: int, value: int) -> int:
        device = c_int()
        status = self._ready() or self._cu.cuDeviceGet(byref(device), ordinal)
        return int(status or self._cu.cuDeviceGetAttribute(c_void_p(value), attribute, device))

    def pk_host_device(self, ordinal: int, out: int) -> int:
        device, total, facts = c_int(), c_size_t(), PkDevice(ordinal=ordinal)
        status = self._ready() or self._cu.cuDeviceGet(byref(device), ordinal)
        name = (c_char * 128)()
        status = status or self._cu.cuDeviceGetName(name, 127, device)
        status = status or self._cu.cuDeviceGetUuid_v2(byref(facts, PkDevice.uuid.offset), device)
        status = status or self._cu.cuDeviceTotalMem_v2(byref(total), device)
        for field, attribute in _DEVICE_ATTRIBUTES.items():
            where = byref(facts, getattr(PkDevice, field).offset)
            status = status or self._cu.cuDeviceGetAttribute(where, attribute, device)
        facts.name, facts.total_bytes = name.value, total.value
        if status == 0:
            ctypes.memmove(out, byref(facts), ctypes.sizeof(facts))
        return int(status)

    def pk_host_current(self, context: int, ordinal: int) -> int:
        found, device = c_void_p(), c_int(-1)
        status = self._ready() or self._cu.cuCtxGetCurrent(byref(found))
        if status == 0 and found.value:
            status = self._cu.cuCtxGetDevice(byref(device))
        if status == 0:
            c_uint64.from_address(context).value = found.value or 0
            c_int32.from_address(ordinal).value = device.value
        return int(status)

    def pk_host_use_device(self, ordinal: int) -> int:
        device, context = c_int(), c_void_p()
        status = self._ready() or self._cu.cuDeviceGet(byref(device), ordinal)
        status = status or self._cu.cuDevicePrimaryCtxRetain(byref(context), device)
        return int(status or self._cu.cuCtxSetCurrent(context))

    def pk_host_load(self, image: int, size: int, library: int) -> int:
        if size < 64 or ctypes.string_at(image, 4) != b"\x7fELF":
            return abi.E_BAD_IMAGE
        table = c_uint64.from_address(image + 40).value
        rows = int.from_bytes(ctypes.string_at(image + 58, 2), "little")
        rows *= int.from_bytes(ctypes.string_at(image + 60, 2), "little")
        if table + rows > size:
            return abi.E_BAD_IMAGE
        none, zero = c_void_p(), c_uint(0)
        status = self._ready()
        return status or int(
            self._cu.cuLibraryLoadData(c_void_p(library), c_void_p(image), none, none, zero, none, none, zero)
        )

    def pk_host_unload(self, library: int) -> int:
        return self._ready() or int(self._cu.cuLibraryUnload(c_void_p(library)))

    def pk_host_kernel(self, library: int, name: bytes, kernel: int) -> int:
        return self._ready() or int(self._cu.cuLibraryGetKernel(c_void_p(kernel), c_void_p(library), c_char_p(name)))

    def pk_host_kernel_attribute(self, kernel: int, attribute: int, ordinal: int, value: int) -> int:
        status = self._ready()
        return status or int(self._cu.cuKernelGetAttribute(c_void_p(value), attribute, c_void_p(kernel), ordinal))

    def pk_host_set_kernel_attribute(self, kernel: int, attribute: int, ordinal: int, value: int) -> int:
        return self._ready() or int(self._cu.cuKernelSetAttribute(attribute, value, c_void_p(kernel), ordinal))

    def pk_host_read_global(self, library: int, name: bytes, out: int, size: int, actual: int) -> int:
        address, found = c_uint64(), c_size_t()
        status = self._ready()
        status = status or self._cu.cuLibraryGetGlobal(byref(address), byref(found), c_void_p(library), c_char_p(name))
        if status == 0 and actual:
            c_uint64.from_address(actual).value = found.value
        if status == 0 and found.value != size:
            return abi.E_BAD_SIZE
        return int(status or self._cu.cuMemcpyDtoH_v2(c_void_p(out), address, c_size_t(size)))

    def pk_host_max_active_clusters(self, request: int, clusters: int) -> int:
        launch = PkLaunch.from_address(request)
        config, attrs = _config(launch)
        status = self._ready() or self._cu.cuOccupancyMaxActiveClusters(
            c_void_p(clusters), c_void_p(launch.kernel), byref(config)
        )
        del attrs  # kept alive until here: the configuration holds its address
        return int(status)

    def pk_host_max_active_blocks(self, kernel: int, threads: int, smem_bytes: int, blocks: int) -> int:
        status = self._ready()
        return status or int(
            self._cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                c_void_p(blocks), c_void_p(kernel), threads, c_size_t(smem_bytes)
            )
        )

    def pk_host_encode_tensor_map(self, tensor_map: int, out: int) -> int:
        m = PkTensorMap.from_address(tensor_map)
        names = ("dims", "strides", "box", "elem_strides")
        where = [c_void_p(tensor_map + getattr(PkTensorMap, name).offset) for name in names]
        enums = (m.interleave, m.swizzle, m.l2_promotion, m.oob_fill)
        status = self._ready(init=False)
        return status or int(
            self._cu.cuTensorMapEncodeTiled(c_void_p(out), m.dtype, m.rank, c_void_p(m.address), *where, *enums)
        )

    def pk_host_launch(self, request: int) -> int:
        launch = PkLaunch.from_address(request)
        launch.failed_map = -1
        storage = ctypes.create_string_buffer(launch.args_bytes + abi.MAP_ALIGN)
        args = addressof(storage) + -addressof(storage) % abi.MAP_ALIGN
        ctypes.memmove(args, launch.args, launch.args_bytes)
        for index in range(launch.num_maps):
            where = launch.maps + index * ctypes.sizeof(PkTensorMap)
            offset = PkTensorMap.from_address(where).args_offset
            if offset % abi.MAP_ALIGN or offset + abi.MAP_BYTES > launch.args_bytes:
                return abi.E_BAD_ARGUMENT
            status = self.pk_host_encode_tensor_map(where, args + offset)
            if status:
                launch.failed_map = index
                return status
        config, attrs = _config(launch)
        params = (c_void_p * 1)(args)
        status = self._ready(init=False) or self._cu.cuLaunchKernelEx(
            byref(config), c_void_p(launch.kernel), params, c_void_p()
        )
        del attrs, storage  # the driver has copied both by now
        return int(status)
