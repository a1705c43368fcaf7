# SPDX-License-Identifier: Apache-2.0
"""Layouts read from C++ argument structs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_tools import structs

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "kernels_src" / "host" / "prime_host.h").read_text()


def layout(text: str, name: str = "Args") -> list[tuple[str, str, int, int]]:
    found = structs.find(text, name)
    assert found is not None
    return [(f.name, f.word, f.count, f.offset) for f in found.fields]


def test_offsets_follow_alignment() -> None:
    text = "struct Args { u8 a; u64 b; u16 c; const float* d; u8 e[3]; i32 f; };"
    assert layout(text) == [
        ("a", "u8", 1, 0),
        ("b", "u64", 1, 8),
        ("c", "u16", 1, 16),
        ("d", "ptr", 1, 24),
        ("e", "u8", 3, 32),
        ("f", "i32", 1, 36),
    ]
    found = structs.find(text, "Args")
    assert found is not None
    assert (found.size, found.align) == (40, 8)


def test_a_tensor_map_takes_128_bytes_on_a_multiple_of_64() -> None:
    text = "struct Args { u32 n; TensorMap a, b; void* p; };"
    assert layout(text) == [("n", "u32", 1, 0), ("a", "map", 1, 64), ("b", "map", 1, 192), ("p", "ptr", 1, 320)]
    found = structs.find(text, "Args")
    assert found is not None
    assert (found.size, found.align) == (384, 64)


def test_nested_structs_are_flattened_with_their_padding() -> None:
    text = """
    constexpr u32 kPeers = 2;
    struct Peer { u64* base; u32 rank; };
    struct Args { u32 n; Peer peers[kPeers]; Peer own; };
    """
    assert layout(text) == [
        ("n", "u32", 1, 0),
        ("peers[0].base", "ptr", 1, 8),
        ("peers[0].rank", "u32", 1, 16),
        ("peers[1].base", "ptr", 1, 24),
        ("peers[1].rank", "u32", 1, 32),
        ("own.base", "ptr", 1, 40),
        ("own.rank", "u32", 1, 48),
    ]


def test_comments_and_initialisers_do_not_count() -> None:
    text = "struct Args { /* u8 gone; */ i32 a = 3; // u8 gone\n i32 b; };"
    assert layout(text) == [("a", "i32", 1, 0), ("b", "i32", 1, 4)]


@pytest.mark.parametrize(
    "body",
    ["size_t n;", "long n;", "bool flag;", "u32 bits : 3;", "void run();", "u32 a[kUnknown];", "float *a, *b;", ""],
    ids=["size_t", "long", "bool", "bit field", "method", "unknown length", "two pointers", "no fields"],
)
def test_anything_outside_the_grammar_raises(body: str) -> None:
    with pytest.raises(structs.StructError, match=r"struct|pointer"):
        structs.find(f"struct Args {{ {body} }};", "Args")


def test_a_struct_outside_the_grammar_only_matters_where_it_is_used() -> None:
    text = "struct Odd { bool b; }; struct Args { u32 n; };"
    assert layout(text) == [("n", "u32", 1, 0)]
    with pytest.raises(structs.StructError, match="Odd"):
        structs.find("struct Odd { bool b; }; struct Args { Odd o; };", "Args")


def test_a_missing_struct_is_none() -> None:
    assert structs.find("struct Other { u32 n; };", "Args") is None


def test_the_hash_changes_with_name_type_and_order() -> None:
    texts = ["u32 a; u32 b;", "u32 b; u32 a;", "i32 a; u32 b;", "u32 a; u32 c;", "u32 a[2];"]
    hashes = set()
    for text in texts:
        found = structs.find(f"struct Args {{ {text} }};", "Args")
        assert found is not None
        hashes.add(found.layout_hash())
    assert len(hashes) == len(texts)


_CTYPES = {"u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
_CTYPES |= {"i32": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double}
_FIELDS = st.lists(st.tuples(st.sampled_from(sorted(_CTYPES)), st.integers(1, 4)), min_size=1, max_size=12)


@given(_FIELDS)
def test_offsets_equal_those_of_the_c_compiler(fields: list[tuple[str, int]]) -> None:
    members = [
        (f"f{i}", _CTYPES[kind] * count if count > 1 else _CTYPES[kind]) for i, (kind, count) in enumerate(fields)
    ]
    native = type("Native", (ctypes.Structure,), {"_fields_": members})
    body = " ".join(f"{kind} f{i}{f'[{count}]' if count > 1 else ''};" for i, (kind, count) in enumerate(fields))
    found = structs.find(f"struct Args {{ {body} }};", "Args")
    assert found is not None
    assert [f.offset for f in found.fields] == [getattr(native, name).offset for name, _ in members]
    assert found.size == ctypes.sizeof(native)


def test_the_host_header_declares_the_hash_of_its_own_structs() -> None:
    parsed = structs.parse(HEADER)
    assert list(parsed) == ["PkTensorMap", "PkLaunch", "PkDevice"]
    assert f"#define PK_HOST_LAYOUT 0x{structs.layout_hash(parsed.values()):016x}ull" in HEADER


def test_the_launch_meta_that_python_reads_is_the_one_that_kernels_export() -> None:
    text = (ROOT / "kernels_src" / "common" / "launch_meta.cuh").read_text()
    found = structs.find(text, "LaunchMeta")
    assert found is not None
    assert found.size == 72
    assert [(f.name, f.word, f.count) for f in found.fields] == [
        *[(name, "u32", 1) for name in ("schema", "threads", "smem_bytes", "cluster", "min_ctas", "protocol")],
        ("args_bytes", "u32", 1),
        ("reserved", "u32", 1),
        ("args_hash", "u64", 1),
        ("role_threads", "u32", 4),
        ("role_registers", "u32", 4),
    ]
