# SPDX-License-Identifier: Apache-2.0
"""The structs and numbers of the host library's C ABI (kernels_src/host/prime_host.h), as ctypes types."""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import c_char, c_int32, c_uint8, c_uint32, c_uint64

HOST_ABI = 1
MAX_ARGS, MAX_MAPS = 16384, 64
MAP_BYTES, MAP_ALIGN = 128, 64

E_NO_DRIVER, E_NO_SYMBOL, E_BAD_ARGUMENT, E_NO_DLOPEN, E_BAD_IMAGE, E_BAD_SIZE = -1, -2, -3, -4, -5, -6
LAUNCH_COOPERATIVE, LAUNCH_PDL = 1, 2

# CUresult values that mean something to a caller here.
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 1, 2, 3, 100
INVALID_IMAGE, INVALID_CONTEXT, NO_BINARY, INVALID_PTX, UNSUPPORTED_PTX = 200, 201, 209, 218, 222
OUT_OF_RESOURCES, COOPERATIVE_TOO_LARGE, INVALID_CLUSTER_SIZE = 701, 720, 912

# CUfunction_attribute and CUdevice_attribute values.
FUNC_LOCAL_BYTES, FUNC_NUM_REGS, FUNC_MAX_DYNAMIC_SMEM, FUNC_NON_PORTABLE_CLUSTER = 3, 4, 8, 14
PORTABLE_CLUSTER = 8


class PkTensorMap(ctypes.Structure):
    """One CUtensorMap to encode."""

    _fields_ = (
        ("address", c_uint64),
        ("dims", c_uint64 * 5),
        ("strides", c_uint64 * 4),
        ("box", c_uint32 * 5),
        ("elem_strides", c_uint32 * 5),
        ("dtype", c_uint32),
        ("rank", c_uint32),
        ("swizzle", c_uint32),
        ("interleave", c_uint32),
        ("l2_promotion", c_uint32),
        ("oob_fill", c_uint32),
        ("args_offset", c_uint32),
        ("reserved", c_uint32),
    )


class PkLaunch(ctypes.Structure):
    """One kernel launch."""

    _fields_ = (
        ("kernel", c_uint64),
        ("stream", c_uint64),
        ("args", c_uint64),
        ("maps", c_uint64),
        ("args_bytes", c_uint32),
        ("num_maps", c_uint32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("smem_bytes", c_uint32),
        ("flags", c_uint32),
        ("failed_map", c_int32),
    )


class PkDevice(ctypes.Structure):
    """Facts of one device."""

    _fields_ = (
        ("total_bytes", c_uint64),
        ("uuid", c_uint8 * 16),
        ("name", c_char * 128),
        ("ordinal", c_int32),
        ("cc_major", c_int32),
        ("cc_minor", c_int32),
        ("sm_count", c_int32),
        ("smem_optin_bytes", c_int32),
        ("l2_bytes", c_int32),
        ("cluster_launch", c_int32),
        ("pci_domain", c_int32),
        ("pci_bus", c_int32),
        ("pci_device", c_int32),
    )


_WORDS: dict[object, str] = {c_char: "char", c_uint8: "u8", c_int32: "i32", c_uint32: "u32", c_uint64: "u64"}


def _canonical(struct: type[ctypes.Structure]) -> str:
    parts = []
    for name, kind, *_ in struct._fields_:
        element, length = getattr(kind, "_type_", None), getattr(kind, "_length_", None)
        word = _WORDS[kind] if length is None else f"{_WORDS[element]}[{length}]"
        parts.append(f"{name}:{word}@{getattr(struct, name).offset}")
    return f"{struct.__name__}{{{';'.join(parts)}}}{ctypes.sizeof(struct)}"


def text_hash(text: str) -> int:
    """The 64-bit number that identifies a canonical layout text on both sides of the border."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def layout() -> int:
    """Hash of the structs above; a host library of the same build returns it from `pk_host_layout`."""
    return text_hash("\n".join(_canonical(struct) for struct in (PkTensorMap, PkLaunch, PkDevice)))
