# SPDX-License-Identifier: Apache-2.0
"""variants.toml, the entries generated from it, and what is staged for the JIT."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from build_tools import entries, stage
from build_tools.tomlfile import read_toml
from build_tools.toolchain import DECLARATION
from build_tools.variants import KERNELS, Variant, VariantError, archs_of, parse_variants, read_variants

ROW: dict[str, Any] = {
    "key": "a|b",
    "kernel": "pk_a",
    "header": "moe/gather_rows.cuh",
    "type": "A",
    "args": "Args",
    "archs": ["sm_90a"],
    "supported": [],
    "measured": "1 us",
}


def small_tree(root: Path, kernel: str, **siblings: str) -> Variant:
    """A kernel tree of the header a/kernel.cuh and siblings of it (name without .cuh)."""
    texts = {"common/launch_meta.cuh": "#pragma once\n", "a/kernel.cuh": kernel}
    for name, text in (texts | {f"a/{n}.cuh": t for n, t in siblings.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    row = {**ROW, "header": "a/kernel.cuh", "archs": ("sm_90a",), "supported": ()}
    return Variant(**row)


def test_every_shipped_variant_generates_an_entry_with_its_layout() -> None:
    variants = read_variants()
    assert variants
    for variant in variants:
        entry = entries.generate(variant)
        assert f"{variant.kernel}(const __grid_constant__ prime::Args args)" in entry.text
        assert f"0x{entry.args_hash}ull" in entry.text
        assert f"sizeof(Args) == {entry.args.size} " in entry.text
        for name, _, _, offset in entry.fields:
            assert f"__builtin_offsetof(Args, {name}) == {offset}," in entry.text
        assert variant.header in entry.sources
        assert "common/launch_meta.cuh" in entry.sources


def test_no_two_variants_share_a_file_name() -> None:
    names = [v.entry_name for v in read_variants()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w.-]+\.cu", n) for n in names)


def test_targets_are_listed_by_number() -> None:
    made = [dataclasses.replace(read_variants()[0], archs=a) for a in (("sm_103a", "sm_90a"), ("sm_100f", "sm_100a"))]
    assert archs_of(tuple(made)) == ("sm_90a", "sm_100a", "sm_100f", "sm_103a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": "a b"}, "key 'a b' needs letters"),
        ({"key": "a--b"}, "no double hyphen"),
        ({"kernel": "gather"}, "the form pk_name"),
        ({"header": "moe/absent.cuh"}, "does not exist"),
        ({"archs": []}, "needs targets"),
        ({"archs": ["sm_90"]}, "needs targets"),
        ({"supported": ["sm_100a"]}, "not in archs"),
        ({"measured": " "}, "measured is empty"),
        ({"tile": 1}, "unknown ['tile']"),
    ],
)
def test_a_malformed_row_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError, match=re.escape(message)):
        parse_variants({"variant": [{**ROW, **change}]})


def test_a_missing_field_and_a_repeated_key_are_refused() -> None:
    with pytest.raises(VariantError, match=r"missing \['type'\]"):
        parse_variants({"variant": [{k: v for k, v in ROW.items() if k != "type"}]})
    with pytest.raises(VariantError, match="occurs twice"):
        parse_variants({"variant": [ROW, ROW]})


def test_the_fingerprint_follows_every_included_source_and_nothing_else(tmp_path: Path) -> None:
    kernel = '#include "../a/used.cuh"\nstruct Args { u32 n; };\n'
    variant = small_tree(tmp_path, kernel, used="// one\n", unused="")
    used, unused = tmp_path / "a" / "used.cuh", tmp_path / "a" / "unused.cuh"

    def now() -> str:
        return entries.generate(variant, tmp_path).fingerprint(tmp_path)

    first = now()
    unused.write_text("// new\n")
    assert now() == first
    used.write_text("// two\n")
    second = now()
    assert second != first
    variant = dataclasses.replace(variant, type="A<2>")
    assert now() not in (first, second)


def test_the_fingerprint_does_not_depend_on_where_the_tree_lies(tmp_path: Path) -> None:
    text = "struct Args { u32 n; };"
    prints = set()
    for name in ("one", "two"):
        variant = small_tree(tmp_path / name, text)
        prints.add(entries.generate(variant, tmp_path / name).fingerprint(tmp_path / name))
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("#include <cstdint>\nstruct Args { u32 n; };", "include no external header"),
        ('#include "absent.cuh"\nstruct Args { u32 n; };', "a/absent.cuh, which does not exist"),
        ('#include "../../outside.cuh"\nstruct Args { u32 n; };', "outside kernels_src"),
        ("struct Other { u32 n; };", "no plain struct Args"),
    ],
    ids=["external", "absent", "outside", "no struct"],
)
def test_an_entry_that_cannot_be_is_refused(tmp_path: Path, kernel: str, message: str) -> None:
    root = tmp_path / "kernels"
    variant = small_tree(root, kernel)
    (tmp_path / "outside.cuh").write_text("")
    with pytest.raises(entries.EntryError, match=re.escape(message)):
        entries.generate(variant, root)


def test_headers_may_include_each_other(tmp_path: Path) -> None:
    variant = small_tree(tmp_path, '#include "loop.cuh"\nstruct Args { u32 n; };', loop='#include "kernel.cuh"\n')
    assert entries.closure("a/kernel.cuh", tmp_path) == ("a/loop.cuh", "a/kernel.cuh")
    assert entries.generate(variant, tmp_path).sources == ("a/kernel.cuh", "a/loop.cuh", "common/launch_meta.cuh")


def test_the_argument_struct_may_use_constants_and_structs_of_its_includes(tmp_path: Path) -> None:
    peer = "constexpr u32 kMax = 3;\nstruct Peer { u64* at[kMax]; };"
    variant = small_tree(tmp_path, '#include "peer.cuh"\nstruct Args { Peer peer; u32 n; };', peer=peer)
    assert entries.generate(variant, tmp_path).fields == [["peer.at", "ptr", 3, 0], ["n", "u32", 1, 24]]


def test_staged_sources_are_those_of_the_entries_and_stale_files_go(tmp_path: Path) -> None:
    folder = tmp_path / "_src"
    (folder / "gone").mkdir(parents=True)
    (folder / "gone" / "stale.cuh").write_text("x")
    assert stage.stage_sources(tmp_path) == folder
    index = json.loads((folder / "ENTRIES.json").read_text())
    assert index["schema"] == 1
    assert index["options"] == list(entries.OPTIONS)
    assert sorted(index["entries"]) == sorted(v.key for v in read_variants())
    wanted = {"ENTRIES.json"}
    for variant in read_variants():
        entry, row = entries.generate(variant), index["entries"][variant.key]
        wanted |= {row["file"], *entry.sources}
        assert (folder / row["file"]).read_text() == entry.text
        assert (row["args"], row["src_fp"], row["args_hash"]) == (entry.fields, entry.fingerprint(), entry.args_hash)
        assert all((folder / s).read_bytes() == (KERNELS / s).read_bytes() for s in entry.sources)
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == wanted
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    stage.stage_sources(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before


def test_device_sources_on_a_shipped_path_include_no_external_header() -> None:
    for variant in read_variants():
        for name in entries.closure(variant.header):
            assert "#include <" not in (KERNELS / name).read_text(), name


def test_the_toolchain_is_pinned_by_version_and_digest() -> None:
    table = read_toml(DECLARATION)
    packages = table["package"]
    assert {p["name"] for p in packages} >= {
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-crt",
        "nvidia-cuda-nvcc-cu12",
    }
    assert all(re.fullmatch(r"\d+(\.\d+)+", p["version"]) for p in packages)
    assert all(re.fullmatch(r"[0-9a-f]{64}", p["sha256"]) for p in packages)
    assert {name: row["min_driver"] for name, row in table["sets"].items()} == {"cu129": 12090, "cu130": 13000}
