# SPDX-License-Identifier: Apache-2.0
"""What the build wrote down (pack headers, MANIFEST.json, ENTRIES.json) as frozen values. Pure, and strict."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from prime_kernels.errors import ArtifactError, PrimeKernelsError
from prime_kernels.loader import abi
from prime_kernels.loader.arch import Target, parse
from prime_kernels.loader.entry import check_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeVar

    T = TypeVar("T")

SCHEMA = 1
_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX16 = re.compile(r"[0-9a-f]{16}")
_PACK_PATH = re.compile(r"(cu[0-9]{3})/(sm_[0-9]{2,3}[af]?)\.pkpack")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_FILE = re.compile(r"(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-][A-Za-z0-9_.-]*\.(?:cu|cuh|h)")
_MAX_RAW = 64 << 20
WORD_BYTES = {
    "char": 1,
    "u8": 1,
    "i8": 1,
    "u16": 2,
    "i16": 2,
    "u32": 4,
    "i32": 4,
    "u64": 8,
    "i64": 8,
    "f32": 4,
    "f64": 8,
}
WORD_BYTES |= {"ptr": 8, "map": abi.MAP_BYTES}


def bad(where: str, what: str) -> ArtifactError:
    """The error for a manifest that is not what the build writes (E10)."""
    return ArtifactError(
        f"{where} is malformed: {what}.",
        facts={"file": where, "problem": what},
        remedy="Reinstall: pip install --force-reinstall --no-cache-dir prime-kernels",
    )


def _take(row: Mapping[str, Any], name: str, kind: type[T], where: str, default: T | None = None) -> T:
    value = row.get(name, default)
    # bool is an int in Python; a flag where a number belongs is a damaged file.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise bad(where, f"field {name!r} is {value!r:.60}, need {kind.__name__}")
    return value


def _number(row: Mapping[str, Any], name: str, low: int, high: int, where: str, default: int | None = None) -> int:
    value = _take(row, name, int, where, default)
    if not low <= value <= high:
        raise bad(where, f"field {name!r} is {value}, need {low} to {high}")
    return value


def _text(row: Mapping[str, Any], name: str, pattern: re.Pattern[str], where: str) -> str:
    value = _take(row, name, str, where)
    if pattern.fullmatch(value) is None:
        raise bad(where, f"field {name!r} is {value[:60]!r}")
    return value


def load_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object of the current schema.

    Raises:
        ArtifactError: No JSON object, or another schema (E10).
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise bad(where, f"not JSON ({err.__class__.__name__})") from err
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise bad(where, f"schema is {found.get('schema') if isinstance(found, dict) else None}, need {SCHEMA}")
    return found


@dataclass(frozen=True, slots=True)
class ArgField:
    """One field of a kernel's argument struct: canonical word, element count (1: scalar), offset in bytes."""

    name: str
    word: str
    count: int
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return WORD_BYTES[self.word] * self.count


def _args(row: Mapping[str, Any], size: int, where: str) -> tuple[ArgField, ...]:
    fields = []
    for item in _take(row, "args", list, where, []):
        if not (isinstance(item, list) and len(item) == 4 and isinstance(item[0], str) and item[1] in WORD_BYTES):
            raise bad(where, f"argument field {item!r:.60}")
        named = dict(zip(("name", "word", "count", "offset"), item, strict=True))
        count, offset = (_number(named, name, 0, abi.MAX_ARGS, where) for name in ("count", "offset"))
        fields.append(ArgField(item[0], item[1], count, offset))
        if not count or (size and offset + fields[-1].bytes > size):
            raise bad(where, f"argument field {item[0]!r} leaves the struct of {size} bytes")
    return tuple(fields)


def _target(text: object, where: str) -> Target:
    try:
        return parse(str(text))
    except PrimeKernelsError as err:
        raise bad(where, err.message) from err


def _key(text: str, where: str) -> str:
    try:
        return check_key(text)
    except PrimeKernelsError as err:
        raise bad(where, err.message) from err


def _cluster(row: Mapping[str, Any], where: str) -> int:
    value = row.get("cluster", 1)
    if isinstance(value, list) and len(value) == 3 and all(isinstance(part, int) for part in value):
        value = value[0] * value[1] * value[2]
    return _number({"cluster": value}, "cluster", 1, 16, where)


@dataclass(frozen=True, slots=True)
class Entry:
    """One cubin of a pack.

    Attributes:
        key: Identifies kernel and variant.
        kernel: Family, e.g. "mega_moe.fwd".
        symbol: Name of the kernel in the cubin.
        arch: Target.
        cubin_sha256: Of the uncompressed bytes.
        raw_bytes: Their number.
        off: Start of the compressed frame, from the end of the pack's header.
        len: Compressed size.
        toolkit: Version of the assembler.
        min_driver: Oldest driver, as cuDriverGetVersion reports it.
        regs: Registers per thread.
        threads: Per CTA.
        smem_bytes: Dynamic shared memory per CTA.
        cluster: CTAs per cluster.
        args_bytes: Size of the argument struct; 0 if not known.
        args_hash: Hash of the argument struct's layout.
        args: Its fields.
        protocol: Version of the peer buffers and flags.
        src_fp: Hash of the sources.
        facts: What a caller's choice of a variant looks at.
        status: "supported" (measured on this target) or "compiled" (built, never run).
    """

    key: str
    kernel: str
    symbol: str
    arch: Target
    cubin_sha256: str
    raw_bytes: int
    off: int
    len: int
    toolkit: str
    min_driver: int
    regs: int
    threads: int
    smem_bytes: int
    cluster: int
    args_bytes: int
    args_hash: str
    args: tuple[ArgField, ...]
    protocol: int
    src_fp: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    status: str = "compiled"


def _facts(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    return dict(_take(row, "facts", dict, where, {}))


def _entry(row: object, header: Mapping[str, Any], where: str) -> Entry:
    if not isinstance(row, dict):
        raise bad(where, "an entry is no object")
    merged = {name: header.get(name) for name in ("arch", "toolkit", "min_driver")} | row
    args_bytes = _number(row, "args_bytes", 0, abi.MAX_ARGS, where, 0)
    return Entry(
        key=_key(_take(row, "key", str, where), where),
        kernel=_take(row, "kernel", str, where),
        symbol=_text({"symbol": row.get("symbol", row.get("kernel"))}, "symbol", _SYMBOL, where),
        arch=_target(merged["arch"], where),
        cubin_sha256=_text(row, "cubin_sha256", _HEX64, where),
        raw_bytes=_number(row, "raw_bytes", 64, _MAX_RAW, where),
        off=_number(row, "off", 0, 1 << 40, where),
        len=_number(row, "len", 1, _MAX_RAW, where),
        toolkit=_take(merged, "toolkit", str, where),
        min_driver=_number(merged, "min_driver", 12000, 99999, where),
        regs=_number(row, "regs", 0, 255, where, 0),
        threads=_number(row, "threads", 1, 1024, where),
        smem_bytes=_number(row, "smem_bytes", 0, 1 << 20, where),
        cluster=_cluster(row, where),
        args_bytes=args_bytes,
        args_hash=_text(row, "args_hash", _HEX16, where),
        args=_args(row, args_bytes, where),
        protocol=_number(row, "protocol", 0, 1 << 30, where, 0),
        src_fp=_text(row, "src_fp", _HEX64, where),
        facts=_facts(row, where),
        status=_take(row, "status", str, where, "compiled"),
    )


@dataclass(frozen=True, slots=True)
class PackHeader:
    """Header of one pack file: set name, target, and its entries by key."""

    set: str
    arch: Target
    toolkit: str
    min_driver: int
    entries: dict[str, Entry]


def parse_header(data: bytes, where: str) -> PackHeader:
    """Read a pack's JSON header.

    Raises:
        ArtifactError: A field is missing, has the wrong type or a value out of range, or a key occurs twice (E10).
    """
    found = load_json(data, where)
    rows = [_entry(row, found, where) for row in _take(found, "entries", list, where)]
    entries = {row.key: row for row in rows}
    if len(entries) != len(rows):
        raise bad(where, "a key occurs twice")
    header = PackHeader(
        set=_take(found, "set", str, where),
        arch=_target(found.get("arch"), where),
        toolkit=_take(found, "toolkit", str, where),
        min_driver=_number(found, "min_driver", 12000, 99999, where),
        entries=entries,
    )
    if any(row.arch != header.arch for row in rows):
        raise bad(where, f"an entry is not for {header.arch}")
    return header


@dataclass(frozen=True, slots=True)
class PackRecord:
    """One line of MANIFEST.json: a pack's place, digest, size and needs."""

    path: str
    sha256: str
    bytes: int
    set: str
    arch: Target
    min_driver: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """MANIFEST.json of the installed packs."""

    version: str
    commit: str
    packs: tuple[PackRecord, ...]


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read MANIFEST.json.

    Raises:
        ArtifactError: It is malformed, or names a file outside the packs folder (E10).
    """
    found = load_json(data, where)
    packs = []
    for row in _take(found, "packs", list, where):
        if not isinstance(row, dict):
            raise bad(where, "a pack is no object")
        path = _text(row, "path", _PACK_PATH, where)
        set_name, arch = path.removesuffix(".pkpack").split("/")
        packs.append(
            PackRecord(
                path=path,
                sha256=_text(row, "sha256", _HEX64, where),
                bytes=_number(row, "bytes", 1, 1 << 40, where),
                set=set_name,
                arch=_target(arch, where),
                min_driver=_number(row, "min_driver", 12000, 99999, where),
            )
        )
    return Manifest(_take(found, "version", str, where), _take(found, "commit", str, where), tuple(packs))


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """What the compiler needs for one key: file, symbol, targets, and the layout that must come out."""

    key: str
    file: str
    kernel: str
    archs: tuple[Target, ...]
    supported: tuple[Target, ...]
    args_hash: str
    args: tuple[ArgField, ...]
    src_fp: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sources:
    """ENTRIES.json: compiler options, and entries by key."""

    options: tuple[str, ...]
    entries: dict[str, SourceEntry]


def parse_sources(data: bytes, where: str) -> Sources:
    """Read ENTRIES.json.

    Raises:
        ArtifactError: It is malformed (E10).
    """
    found = load_json(data, where)
    entries = {}
    for key, row in _take(found, "entries", dict, where).items():
        if not isinstance(row, dict):
            raise bad(where, "an entry is no object")
        entries[key] = SourceEntry(
            key=_key(key, where),
            file=_text(row, "file", _FILE, where),
            kernel=_take(row, "kernel", str, where),
            archs=tuple(_target(arch, where) for arch in _take(row, "archs", list, where)),
            supported=tuple(_target(arch, where) for arch in _take(row, "supported", list, where, [])),
            args_hash=_text(row, "args_hash", _HEX16, where),
            args=_args(row, 0, where),
            src_fp=_text(row, "src_fp", _HEX64, where),
            facts=_facts(row, where),
        )
    options = tuple(str(option) for option in _take(found, "options", list, where))
    return Sources(options, entries)
