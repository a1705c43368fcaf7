# SPDX-License-Identifier: Apache-2.0
"""What a cubin says about itself, read without any CUDA tool: target, toolkit, kernels, registers, spills, data.

A cubin is an ELF64 file of machine 190. The bytes may come from a damaged file, so every offset is checked and every
failure is an ArtifactError.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from prime_kernels.errors import ArtifactError

EM_CUDA = 190
OSABI_V7 = 51  # toolkits before 13.0 for sm_90: ABI version 7
OSABI_V8 = 65  # sm_100 and above, and everything since toolkit 13.0: ABI version 8; needs a driver that knows it

# Attribute numbers of .nv.info records; each record is {format u8, attribute u8, value u16 | size u16 + bytes}.
_EIATTR_MAX_THREADS, _EIATTR_FRAME_SIZE, _EIATTR_PARAM, _EIATTR_REGCOUNT = 0x05, 0x11, 0x17, 0x2F
_FORMAT_SIZED = 4
_MAX_SECTIONS = 65536


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Resources of one kernel: registers and stack bytes per thread, bytes of arguments, launch bound (0 if none)."""

    name: str
    regs: int
    stack_bytes: int
    param_bytes: int
    max_threads: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A parsed cubin.

    Attributes:
        osabi: ELF OS/ABI byte, `OSABI_V7` or `OSABI_V8`.
        abi_version: ELF ABI version.
        sm: Compute capability times ten, e.g. 90.
        toolkit: Version of the assembler, e.g. "13.0.88"; None where the file does not say (OS/ABI 51).
        kernels: Resources by kernel name.
        symbols: Initial bytes of every data object, by name.
    """

    osabi: int
    abi_version: int
    sm: int
    toolkit: str | None
    kernels: dict[str, KernelFacts]
    symbols: dict[str, bytes]


def _bad(what: str) -> ArtifactError:
    return ArtifactError(
        f"not a usable cubin: {what}.", code="E05", facts={"problem": what}, remedy="Run `prime-kernels verify`."
    )


def ident(data: bytes | memoryview) -> tuple[int, int, int]:
    """OS/ABI, ABI version and compute capability x 10 of a cubin, from the first 64 bytes.

    Raises:
        ArtifactError: The bytes are no cubin (E05).
    """
    if len(data) < 64 or bytes(data[:5]) != b"\x7fELF\x02":
        raise _bad("no ELF64 header")
    (machine,) = struct.unpack_from("<H", data, 18)
    (flags,) = struct.unpack_from("<I", data, 48)
    if machine != EM_CUDA:
        raise _bad(f"ELF machine is {machine}, need {EM_CUDA}")
    osabi, abi_version = data[7], data[8]
    if osabi == OSABI_V8:
        return osabi, abi_version, (flags >> 8) & 0xFF
    if osabi == OSABI_V7:
        return osabi, abi_version, flags & 0xFF
    raise _bad(f"ELF OS/ABI is {osabi}, need {OSABI_V7} or {OSABI_V8}")


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    body: memoryview
    index: int


def _text(table: memoryview, offset: int) -> str:
    tail = bytes(table[offset : offset + 4096])
    return tail.split(b"\0", 1)[0].decode("utf-8", "replace")


def _sections(data: memoryview) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    if size != 64 or not 0 < count < _MAX_SECTIONS or names_index >= count or start + 64 * count > len(data):
        raise _bad("section table out of bounds")
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * i) for i in range(count)]
    bodies = []
    for row in rows:
        empty = row[1] == 8  # NOBITS: memory without bytes in the file
        if not empty and row[4] + row[5] > len(data):
            raise _bad("section out of bounds")
        bodies.append(data[0:0] if empty else data[row[4] : row[4] + row[5]])
    return [_Section(_text(bodies[names_index], row[0]), bodies[i], i) for i, row in enumerate(rows)]


def _info_records(body: memoryview) -> list[tuple[int, bytes]]:
    records, at = [], 0
    while at + 4 <= len(body):
        kind, attribute, value = struct.unpack_from("<BBH", body, at)
        at += 4
        if kind == _FORMAT_SIZED:
            records.append((attribute, bytes(body[at : at + value])))
            at += value
        else:
            records.append((attribute, struct.pack("<H", value)))
    return records


def _symbols(sections: dict[str, _Section]) -> list[tuple[str, int, int, int, int]]:
    """(name, type, section index, offset in the section, size) of every symbol."""
    table, names = sections.get(".symtab"), sections.get(".strtab")
    if table is None or names is None:
        raise _bad("no symbol table")
    rows = (struct.unpack_from("<IBBHQQ", table.body, at) for at in range(0, len(table.body) - 23, 24))
    return [(_text(names.body, row[0]), row[1] & 0xF, row[3], row[4], row[5]) for row in rows]


def _per_symbol(records: list[tuple[int, bytes]], attribute: int) -> dict[int, int]:
    pairs = [struct.unpack("<II", value) for number, value in records if number == attribute and len(value) == 8]
    return dict(pairs)


def _param_bytes(records: list[tuple[int, bytes]]) -> int:
    """Bytes from the first parameter to the end of the last; not what lies before the first for its alignment."""
    rows = [struct.unpack("<IHHI", value) for number, value in records if number == _EIATTR_PARAM and len(value) == 12]
    first = min((offset for _, _, offset, _ in rows), default=0)
    return max((offset + (size >> 18) for _, _, offset, size in rows), default=first) - first


def _kernel_facts(name: str, index: int, common: list[tuple[int, bytes]], body: memoryview) -> KernelFacts:
    own = _info_records(body)
    threads = dict(own).get(_EIATTR_MAX_THREADS, bytes(12))
    return KernelFacts(
        name=name,
        regs=_per_symbol(common, _EIATTR_REGCOUNT).get(index, 0),
        stack_bytes=_per_symbol(common, _EIATTR_FRAME_SIZE).get(index, 0),
        param_bytes=_param_bytes(own),
        max_threads=struct.unpack_from("<I", threads.ljust(4, b"\0"))[0],
    )


def inspect(data: bytes) -> Cubin:
    """Read a cubin's self-description.

    Args:
        data: The whole file.

    Returns:
        What it holds; kernels are the functions with a `.nv.info.<name>` section of their own and code.

    Raises:
        ArtifactError: The bytes are no cubin, or offsets in it leave the file (E05).
    """
    osabi, abi_version, sm = ident(data)
    try:
        sections = _sections(memoryview(data))
        by_name = {section.name: section for section in sections}
        rows = _symbols(by_name)
        common = _info_records(by_name[".nv.info"].body) if ".nv.info" in by_name else []
        kernels, symbols = {}, {}
        for index, (name, kind, section, offset, size) in enumerate(rows):
            info = by_name.get(f".nv.info.{name}")
            if kind == 2 and info is not None and f".text.{name}" in by_name:
                kernels[name] = _kernel_facts(name, index, common, info.body)
            elif kind == 1 and 0 < section < len(sections) and offset + size <= len(sections[section].body):
                symbols[name] = bytes(sections[section].body[offset : offset + size])
    except (struct.error, IndexError, ValueError) as err:
        raise _bad(str(err)) from err
    note = by_name.get(".note.nv.tkinfo")
    found = re.search(rb"V(\d+\.\d+\.\d+)", bytes(note.body)) if note else None
    return Cubin(osabi, abi_version, sm, found[1].decode() if found else None, kernels, symbols)
