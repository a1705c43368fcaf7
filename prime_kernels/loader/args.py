# SPDX-License-Identifier: Apache-2.0
"""Packs what a kernel takes: its argument struct and its tensor maps. No driver call."""

from __future__ import annotations

import struct
from functools import lru_cache

from prime_kernels.errors import LaunchError, UnsupportedConfig
from prime_kernels.loader import abi
from prime_kernels.loader.abi import PkTensorMap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from prime_kernels.loader.manifest import ArgField

# CUtensorMapDataType: number and bytes of an element.
DTYPES = {"u8": (0, 1), "u16": (1, 2), "u32": (2, 4), "i32": (3, 4), "u64": (4, 8), "i64": (5, 8), "f16": (6, 2)}
DTYPES |= {"f32": (7, 4), "f64": (8, 8), "bf16": (9, 2)}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_LETTERS = {"char": "s", "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "u64": "Q", "i64": "q"}
_LETTERS |= {"f32": "f", "f64": "d", "ptr": "Q"}
RECORD = struct.Struct("<Q5Q4Q5I5I8I")  # PkTensorMap
_ADDRESS = struct.Struct("<Q")
_OFFSET = struct.Struct("<I")
_OFFSET_AT = PkTensorMap.args_offset.offset


def _refuse_map(what: str, **facts: object) -> UnsupportedConfig:
    return UnsupportedConfig(f"tensor map: {what}.", facts=facts, remedy="See the limits of cuTensorMapEncodeTiled.")


def _check_map(dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], size: int, swizzle: int) -> None:
    if not 1 <= len(dims) <= 5 or len(strides) != len(dims) - 1 or len(box) != len(dims):
        raise _refuse_map(
            f"{len(dims)} dims, {len(strides)} strides, {len(box)} box sizes; need n, n-1 and n, n in 1..5"
        )
    if any(not 1 <= extent <= 1 << 32 for extent in dims):
        raise _refuse_map(f"dims are {dims}; need 1 to 2**32 elements each", dims=dims)
    if any(stride % 16 or not 0 < stride < 1 << 40 for stride in strides):
        raise _refuse_map(f"strides are {strides} bytes; need multiples of 16 below 2**40", strides=strides)
    if any(not 1 <= extent <= 256 for extent in box):
        raise _refuse_map(f"box is {box}; need 1 to 256 elements each", box=box)
    if box[0] * size % 16 or (swizzle and box[0] * size > swizzle):
        limit = f" and at most the swizzle of {swizzle}" if swizzle else ""
        raise _refuse_map(f"the inner box is {box[0] * size} bytes; need a multiple of 16{limit}", box=box)


@lru_cache(maxsize=4096)
def tensor_map(
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str = "bf16",
    swizzle: int = 128,
    l2_promotion: int = 256,
    fill_nan: bool = False,
) -> bytes:
    """Describe a tiled tensor map, all but its address, so that the same description serves buffers that move.

    Args:
        dims: Elements per dimension, innermost first; 1 to 5 of them.
        strides: Bytes between neighbours in every dimension but the innermost; multiples of 16.
        box: Elements per dimension that one copy moves, at most 256 each.
        dtype: A key of `DTYPES`.
        swizzle: 0, 32, 64 or 128 bytes.
        l2_promotion: 0, 64, 128 or 256 bytes.
        fill_nan: Fill what lies outside with NaN instead of zeros.

    Returns:
        The packed record, to be passed to `Kernel.launch` with an address. Cached by value.

    Raises:
        UnsupportedConfig: A value that the driver would refuse (E41).
    """
    if dtype not in DTYPES or swizzle not in _SWIZZLES or l2_promotion not in _PROMOTIONS:
        raise _refuse_map(f"dtype={dtype!r}, swizzle={swizzle}, l2_promotion={l2_promotion}", dtype=dtype)
    number, size = DTYPES[dtype]
    _check_map(dims, strides, box, size, swizzle)
    rank = len(dims)
    values = [0, *dims, *[1] * (5 - rank), *strides, *[0] * (5 - rank), *box, *[1] * (5 - rank), *[1] * 5]
    modes = (number, rank, _SWIZZLES[swizzle], 0, _PROMOTIONS[l2_promotion], int(fill_nan), 0, 0)
    return RECORD.pack(*values, *modes)


class ArgsPacker:
    """Packs the argument struct of one kernel from its field list.

    Args:
        fields: As the manifest lists them.
        size: Bytes of the struct.

    Attributes:
        names: Fields that `launch` takes values for, in order; a field of several elements takes a sequence.
        pointers: Offset of every single pointer by name; a multiple of 8.
        map_offsets: Offset of every tensor map by name.
        map_names: Their names, in the order of the records.
    """

    def __init__(self, fields: Sequence[ArgField], size: int) -> None:
        plain = sorted((field for field in fields if field.word != "map"), key=lambda field: field.offset)
        self.names = tuple(field.name for field in plain)
        single = [field for field in plain if field.word == "ptr" and field.count == 1 and field.offset % 8 == 0]
        self.pointers = {field.name: field.offset for field in single}
        self.map_offsets: dict[str, int] = {}
        for field in (field for field in fields if field.word == "map"):
            for index in range(field.count):
                name = field.name if field.count == 1 else f"{field.name}[{index}]"
                self.map_offsets[name] = field.offset + index * abi.MAP_BYTES
        self.map_names = tuple(self.map_offsets)
        self._arrays = frozenset(field.name for field in plain if field.count > 1 and field.word != "char")
        text, at = "<", 0
        for field in plain:
            letter = _LETTERS[field.word]
            text += f"{field.offset - at}x{field.count}{letter}" if field.offset > at else f"{field.count}{letter}"
            at = field.offset + field.bytes
        self._struct = struct.Struct(text + f"{size - at}x" if size > at else text)

    def pack_into(self, buffer: Any, args: Mapping[str, Any], key: str) -> None:
        """Write the values of `args` to `buffer`.

        Raises:
            LaunchError: A field is missing or unknown, or a value does not fit it (E43).
        """
        try:
            values = [args[name] for name in self.names]
            if self._arrays:
                flat: list[Any] = []
                for name, value in zip(self.names, values, strict=True):
                    if name in self._arrays:
                        flat.extend(value)
                    else:
                        flat.append(value)
                values = flat
            self._struct.pack_into(buffer, 0, *values)
        except (KeyError, TypeError, struct.error) as err:
            raise self._refuse(args, key, err) from err
        if len(args) != len(self.names):
            raise self._refuse(args, key, None)

    def _refuse(self, args: Mapping[str, Any], key: str, err: Exception | None) -> LaunchError:
        missing = [name for name in self.names if name not in args]
        unknown = [name for name in args if name not in self.names]
        what = f"missing {missing}, unknown {unknown}" if missing or unknown else f"{err}; got {dict(args)}"
        return LaunchError(
            f"arguments of {key}: {what}.",
            facts={"key": key, "missing": missing, "unknown": unknown},
            remedy=f"Pass exactly {', '.join(self.names)}.",
        )

    def pack_maps_into(self, records: Any, maps: Mapping[str, tuple[bytes, int]], key: str) -> None:
        """Write one record per tensor map, with its address and its place in the struct, to `records`.

        Raises:
            LaunchError: A map is missing or unknown, or is no (record, address) (E43).
        """
        at, step, offsets = 0, RECORD.size, self.map_offsets
        try:
            for name in self.map_names:
                record, address = maps[name]
                records[at : at + step] = record
                _ADDRESS.pack_into(records, at, address)
                _OFFSET.pack_into(records, at + _OFFSET_AT, offsets[name])
                at += step
        except (KeyError, TypeError, ValueError, struct.error) as err:
            raise self._refuse_maps(maps, key, repr(err)) from err
        if len(maps) != len(offsets):
            raise self._refuse_maps(maps, key, "one is unknown")

    def _refuse_maps(self, maps: Mapping[str, Any], key: str, what: str) -> LaunchError:
        return LaunchError(
            f"tensor maps of {key}: {what}; got {sorted(maps)}.",
            facts={"key": key, "got": sorted(maps), "need": self.map_names},
            remedy=f"Pass (tensor_map(...), address) for each of {', '.join(self.map_names) or 'none'}.",
        )
