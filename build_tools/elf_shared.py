# SPDX-License-Identifier: Apache-2.0
"""The little that the wheel inspection asks of a shared library: machine, NEEDED, version needs, exported names."""

from __future__ import annotations

import struct
from dataclasses import dataclass

MACHINES = {62: "x86_64", 183: "aarch64"}
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED = 6, 11, 0x6FFFFFFE


@dataclass(frozen=True)
class SharedLibrary:
    """Facts of one file. `exported`: defined global symbols; `undefined`: names it takes from the process."""

    machine: str
    needed: tuple[str, ...]
    search_paths: tuple[str, ...]
    version_needs: bool
    exported: tuple[str, ...]
    undefined: tuple[str, ...]


def read(data: bytes) -> SharedLibrary:
    """Reads an ELF64 shared library.

    Raises:
        ValueError: the bytes are none.
    """
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("no ELF64 file")
    (machine,) = struct.unpack_from("<H", data, 18)
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * i) for i in range(count)]

    def text(section: int, offset: int) -> str:
        start = sections[section][4] + offset
        return data[start : data.index(b"\0", start)].decode()

    def body(kind: int, fmt: str) -> list[tuple[int, tuple[int, ...]]]:
        rows = []
        for s in (s for s in sections if s[1] == kind):
            step = struct.calcsize(fmt)
            rows += [(s[6], struct.unpack_from(fmt, data, s[4] + at)) for at in range(0, s[5], step)]
        return rows

    dynamic = [(row[0], text(link, row[1])) for link, row in body(_SHT_DYNAMIC, "<QQ") if row[0] in (1, 15, 29)]
    symbols = [(text(link, row[0]), row[3]) for link, row in body(_SHT_DYNSYM, "<IBBHQQ") if row[1] >> 4 in (1, 2)]
    return SharedLibrary(
        machine=MACHINES.get(machine, str(machine)),
        needed=tuple(name for tag, name in dynamic if tag == _DT_NEEDED),
        search_paths=tuple(name for tag, name in dynamic if tag in (_DT_RPATH, _DT_RUNPATH)),
        version_needs=any(s[1] == _SHT_VERNEED for s in sections),
        exported=tuple(sorted(name for name, section in symbols if section)),
        undefined=tuple(sorted(name for name, section in symbols if not section)),
    )
