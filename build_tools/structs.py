# SPDX-License-Identifier: Apache-2.0
"""Reads the plain C structs that cross a language border and computes their layout.

One parser serves both borders: the host library's ABI (`kernels_src/host/prime_host.h`) and the kernels' argument
structs (`kernels_src/**/*_args.cuh`). It accepts a small grammar on purpose (fixed-width fields, pointers, arrays,
tensor maps, structs of the same file) and raises on anything else, so that a layout is never guessed. The compiler
checks every offset again in the generated entry files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# C spelling -> (canonical word, bytes). The alignment of each is its size, as on every ABI that CUDA supports.
SCALARS: dict[str, tuple[str, int]] = {
    "char": ("char", 1),
    "uint8_t": ("u8", 1),
    "int8_t": ("i8", 1),
    "uint16_t": ("u16", 2),
    "int16_t": ("i16", 2),
    "uint32_t": ("u32", 4),
    "int32_t": ("i32", 4),
    "uint64_t": ("u64", 8),
    "int64_t": ("i64", 8),
    "u8": ("u8", 1),
    "i8": ("i8", 1),
    "u16": ("u16", 2),
    "i16": ("i16", 2),
    "u32": ("u32", 4),
    "i32": ("i32", 4),
    "u64": ("u64", 8),
    "i64": ("i64", 8),
    "unsigned": ("u32", 4),
    "int": ("i32", 4),
    "float": ("f32", 4),
    "double": ("f64", 8),
}
TENSOR_MAP_WORD, TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN = "map", 128, 64
TENSOR_MAP_NAMES = frozenset({"CUtensorMap", "TensorMap"})
POINTER = ("ptr", 8)


class StructError(ValueError):
    """A struct uses something outside the grammar; the message names file, struct and line."""


@dataclass(frozen=True)
class Field:
    """One field. `word` is u8..u64, i8..i64, f32, f64, char, ptr, map; `count` is 1 for a scalar; `offset` in bytes."""

    name: str
    word: str
    count: int
    offset: int
    bytes: int  # of one element

    def canonical(self) -> str:
        """`name:word@offset` or `name:word[count]@offset`."""
        many = f"[{self.count}]" if self.count != 1 else ""
        return f"{self.name}:{self.word}{many}@{self.offset}"


@dataclass(frozen=True)
class Struct:
    """A struct with its flattened fields; nested structs contribute fields named `outer.inner`."""

    name: str
    fields: tuple[Field, ...]
    size: int
    align: int
    doc_order: int = field(default=0, compare=False)

    def canonical(self) -> str:
        """The one-line text whose hash identifies the layout."""
        return f"{self.name}{{{';'.join(f.canonical() for f in self.fields)}}}{self.size}"

    def layout_hash(self) -> int:
        """First eight bytes of the SHA-256 of `canonical()`, as a number."""
        return layout_hash([self])


def layout_hash(structs: Iterable[Struct]) -> int:
    """Hash of several structs: of their canonical lines joined by newlines."""
    text = "\n".join(s.canonical() for s in structs)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_CONST = re.compile(
    r"(?:inline\s+|static\s+)*constexpr\s+(?:\w+)\s+(k\w+)\s*(?:=\s*([^;{}]+)|\{([^;{}]+)\})\s*;|#define\s+(\w+)\s+(\d+)[uUlL]*\s*$",
    re.M,
)
_STRUCT = re.compile(r"\b(?:typedef\s+)?struct\s+(?:alignas\((\d+)\)\s+)?(\w+)\s*\{([^{}]*)\}\s*\w*\s*;", re.S)
_FIELD = re.compile(
    r"^(?:alignas\((?P<align>\d+)\)\s+)?(?P<type>(?:const\s+)?[\w:]+(?:\s+const)?)\s*(?P<ptr>\*(?:\s*(?:const|__restrict__|PK_RESTRICT))*\s*)?"
    r"(?P<name>\w+)\s*(?:\[(?P<count>\w+)\])?(?:\s*(?:=\s*[^,;]+|\{[^}]*\}))?$"
)


def _constants(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for match in _CONST.finditer(text):
        name = match.group(1) or match.group(4)
        value = (match.group(2) or match.group(3) or match.group(5)).strip().rstrip("uUlL")
        if value.isdigit():
            found[name] = int(value)
    return found


def _count(word: str | None, constants: Mapping[str, int], where: str) -> int:
    if word is None:
        return 1
    if word.rstrip("uUlL").isdigit():
        return int(word.rstrip("uUlL"))
    if word in constants:
        return constants[word]
    raise StructError(f"{where}: array length {word!r} is neither a number nor a constexpr of the same file")


def _element(match: re.Match[str], known: Mapping[str, Struct], where: str) -> tuple[str, int, int]:
    """(word, bytes, align) of one element; word is the struct's name for a nested struct."""
    kind = match["type"].replace("const", "").split("::")[-1].strip()
    if match["ptr"]:
        return (*POINTER, POINTER[1])
    if kind in SCALARS:
        word, size = SCALARS[kind]
        return word, size, size
    if kind in TENSOR_MAP_NAMES:
        return TENSOR_MAP_WORD, TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN
    if kind in known:
        return kind, known[kind].size, known[kind].align
    raise StructError(f"{where}: type {match['type']!r} is not one of the fixed-width types, pointers or tensor maps")


def _statements(body: str) -> list[str]:
    """Field declarations of a body, one name each (`u32 a, b;` becomes two)."""
    out = []
    for statement in (" ".join(s.split()) for s in body.split(";")):
        if not statement:
            continue
        first, *rest = statement.split(",")
        out.append(first.strip())
        base = re.match(r"^(?:alignas\(\d+\)\s+)?[\w:]+", first.strip())
        if rest and "*" in statement:
            raise StructError(f"declare one pointer per line: {statement!r}")
        out += [f"{base.group(0) if base else ''} {name.strip()}" for name in rest]
    return out


def _layout(name: str, body: str, minimum: int, known: Mapping[str, Struct], constants: Mapping[str, int]) -> Struct:
    fields: list[Field] = []
    offset, alignment = 0, minimum
    for statement in _statements(body):
        where = f"struct {name}, field {statement!r}"
        match = _FIELD.match(statement)
        if match is None:
            raise StructError(f"{where}: not understood; use `type name;`, `type* name;` or `type name[count];`")
        word, size, align = _element(match, known, where)
        count = _count(match["count"], constants, where)
        align = max(align, int(match["align"] or 1))
        offset = -(-offset // align) * align
        alignment = max(alignment, align)
        if word in known:
            for index in range(count):
                prefix = match["name"] if match["count"] is None else f"{match['name']}[{index}]"
                base = offset + index * size
                fields += [
                    Field(f"{prefix}.{f.name}", f.word, f.count, base + f.offset, f.bytes) for f in known[word].fields
                ]
        else:
            fields.append(Field(match["name"], word, count, offset, size))
        offset += size * count
    if not fields:
        raise StructError(f"struct {name} has no fields")
    return Struct(name, tuple(fields), -(-offset // alignment) * alignment, alignment, len(known))


def _structs(text: str) -> Iterable[re.Match[str]]:
    return _STRUCT.finditer(_COMMENT.sub("", text))


def _read(match: re.Match[str], known: Mapping[str, Struct], constants: Mapping[str, int]) -> Struct:
    align, name, body = match.groups()
    if "(" in re.sub(r"alignas\(\d+\)", "", body):
        raise StructError(f"struct {name} has a method or an initialiser call; argument structs are plain data")
    return _layout(name, body, int(align or 1), known, constants)


def parse(text: str) -> dict[str, Struct]:
    """All structs of `text` by name, in order of appearance.

    Raises:
        StructError: a struct holds something outside the grammar (a method, a base class, a bit field, a pointer list).
    """
    known: dict[str, Struct] = {}
    for match in _structs(text):
        known[match.group(2)] = _read(match, known, _constants(_COMMENT.sub("", text)))
    return known


def find(text: str, name: str) -> Struct | None:
    """The struct of that name, or None. Other structs may be outside the grammar as long as it does not use them.

    Raises:
        StructError: the struct, or one that it contains, is outside the grammar.
    """
    known: dict[str, Struct] = {}
    constants = _constants(_COMMENT.sub("", text))
    for match in _structs(text):
        if match.group(2) in TENSOR_MAP_NAMES:
            continue
        try:
            known[match.group(2)] = _read(match, known, constants)
        except StructError:
            if match.group(2) == name:
                raise
    return known.get(name)
