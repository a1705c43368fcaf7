# SPDX-License-Identifier: Apache-2.0
"""Packs, manifests and cubins: read as written, and every kind of damage refused before anything is loaded."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import elf, manifest, meta, packs, resolve
from prime_kernels.loader.arch import parse
from tests.helpers import installation as made
from tests.helpers.fake_cubin import fake_cubin, launch_meta


def refused(error: ArtifactError, code: str = "E10") -> bool:
    return error.code == code and bool(error.facts) and bool(error.remedy)


def one_pack(tmp_path: Path, data: bytes) -> packs.Pack:
    path = tmp_path / "sm_90a.pkpack"
    path.write_bytes(data)
    return packs.open_pack(path)


def test_a_pack_gives_back_the_very_bytes_and_facts_that_went_in(tmp_path: Path) -> None:
    pack = one_pack(tmp_path, made.pack_bytes("cu130", "sm_90a"))
    entry = pack.header.entries[made.KEY]
    assert pack.cubin(entry) == made.cubin_for("cu130", "sm_90a")
    assert (pack.name, entry.symbol, entry.threads, entry.min_driver) == ("cu130/sm_90a", "pk_fake", 256, 13000)
    assert [(f.name, f.word, f.count, f.offset) for f in entry.args] == [tuple(row) for row in made.ARGS]


def test_installed_packs_are_opened_newest_toolkit_first_and_by_target(tmp_path: Path) -> None:
    folder = made.usual_packs(tmp_path)
    assert [pack.name for pack in packs.open_installed(folder, archs=frozenset({"sm_90a"}))] == [
        "cu130/sm_90a",
        "cu129/sm_90a",
    ]
    assert len(packs.open_installed(folder)) == 6


def test_an_installation_without_packs_has_none(tmp_path: Path) -> None:
    assert packs.read_manifest(tmp_path) is None
    assert packs.open_installed(tmp_path) == []


def test_every_flipped_byte_of_a_pack_is_noticed(tmp_path: Path) -> None:
    good = made.pack_bytes("cu130", "sm_90a")
    folder = made.write_packs(tmp_path, {"cu130/sm_90a": good})
    path, draw, spared = folder / "cu130" / "sm_90a.pkpack", random.Random(0), 0
    record = packs.read_manifest(folder).packs[0]  # type: ignore[union-attr]
    for at in draw.sample(range(len(good)), 200):
        data = bytearray(good)
        data[at] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(ArtifactError) as caught:
            packs.check_digest(path, record)
        assert refused(caught.value)
        assert caught.value.facts["expected"] == record.sha256
        try:
            pack = packs.open_pack(path, record)
            cubin = pack.cubin(pack.header.entries[made.KEY])
        except (ArtifactError, KeyError):
            continue
        # A flip that this level lets pass touched a fact, never the code.
        spared += 1
        assert cubin == made.cubin_for("cu130", "sm_90a")
    assert spared < 100


@pytest.mark.parametrize("keep", [0, 5, 11, 40, 600, -1], ids=lambda keep: f"{keep} bytes")
def test_a_truncated_pack_is_refused_when_it_is_opened(keep: int, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        one_pack(tmp_path, made.pack_bytes("cu130", "sm_90a")[:keep])
    assert refused(caught.value)
    assert caught.value.code == "E10"
    assert "sm_90a.pkpack" in str(caught.value.facts)
    assert "pip install --force-reinstall" in (caught.value.remedy or "")


def test_a_missing_pack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        packs.open_pack(tmp_path / "none.pkpack")
    assert refused(caught.value)


def test_swapped_packs_are_refused(tmp_path: Path) -> None:
    folder = made.usual_packs(tmp_path)
    one, two = folder / "cu130" / "sm_90a.pkpack", folder / "cu130" / "sm_100a.pkpack"
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    with pytest.raises(ArtifactError, match="holds cu130/sm_"):
        packs.open_installed(folder)


def test_a_cubin_of_another_gpu_inside_a_pack_is_refused(tmp_path: Path) -> None:
    pair = (made.pack_entry("cu130", "sm_90a"), made.cubin_for("cu130", "sm_100a"))
    pack = one_pack(tmp_path, made.pack_bytes("cu130", "sm_90a", [pair]))
    with pytest.raises(ArtifactError, match="is for sm_100, its header says sm_90a") as caught:
        pack.cubin(pack.header.entries[made.KEY])
    assert refused(caught.value)


def test_a_frame_that_inflates_to_more_than_promised_is_not_inflated(tmp_path: Path) -> None:
    data = made.pack_bytes("cu130", "sm_90a", [(made.pack_entry("cu130", "sm_90a"), bytes(50 << 20))])
    size = struct.unpack_from("<I", data, 8)[0]
    header = json.loads(data[12 : 12 + size])
    header["entries"][0]["raw_bytes"] = 64
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    pack = one_pack(tmp_path, data[:8] + struct.pack("<I", len(text)) + text + data[12 + size :])
    with pytest.raises(ArtifactError, match="sha256 of"):
        pack.cubin(pack.header.entries[made.KEY])


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../../etc"},
        {"key": ""},
        {"key": 3},
        {"arch": "sm_9"},
        {"arch": "sm_100a"},
        {"cubin_sha256": "zz"},
        {"raw_bytes": -1},
        {"raw_bytes": True},
        {"raw_bytes": 1 << 40},
        {"off": -8},
        {"len": 0},
        {"threads": 4096},
        {"cluster": 99},
        {"args_hash": "12"},
        {"args": [["x", "void", 1, 0]]},
        {"args": [["x", "ptr", 1, 188]]},
        {"args": [["x", "u8", 0, 0]]},
        {"symbol": "a;b"},
        {"min_driver": 5},
        {"facts": []},
    ],
    ids=str,
)
def test_a_header_field_out_of_its_domain_is_refused(change: dict[str, Any]) -> None:
    row = made.pack_entry("cu130", "sm_90a") | {"cubin_sha256": "0" * 64, "raw_bytes": 999, "off": 0, "len": 9}
    header = {"schema": 1, "set": "cu130", "arch": "sm_90a", "toolkit": "13.0.88", "min_driver": 13000}
    assert manifest.parse_header(json.dumps(header | {"entries": [row]}).encode(), "x").entries
    with pytest.raises(ArtifactError) as caught:
        manifest.parse_header(json.dumps(header | {"entries": [row | change]}).encode(), "x.pkpack")
    assert refused(caught.value)
    assert caught.value.facts["file"] == "x.pkpack"


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"schema": 2}', b"\xff", b"[" * 100000])
def test_text_that_is_no_manifest_is_refused(data: bytes) -> None:
    for parse_any in (manifest.parse_header, manifest.parse_manifest, manifest.parse_sources):
        with pytest.raises(ArtifactError) as caught:
            parse_any(data, "file")
        assert refused(caught.value)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.pkpack", "cu130/../../sm_90a.pkpack", "cu130/sm_90a.pkpack/x"])
def test_a_manifest_cannot_name_a_file_outside_the_packs(path: str) -> None:
    row = {"path": path, "sha256": "0" * 64, "bytes": 9, "min_driver": 13000}
    data = json.dumps({"schema": 1, "version": "1", "commit": "c", "packs": [row]}).encode()
    with pytest.raises(ArtifactError):
        manifest.parse_manifest(data, "MANIFEST.json")


def test_a_cubin_tells_target_toolkit_registers_stack_and_constants() -> None:
    cubin = elf.inspect(fake_cubin("pk_x", sm=103, regs=77, stack=8, meta=launch_meta(args_bytes=48)))
    facts = cubin.kernels["pk_x"]
    assert (cubin.osabi, cubin.abi_version, cubin.sm, cubin.toolkit) == (elf.OSABI_V8, 8, 103, "13.0.88")
    assert (facts.regs, facts.stack_bytes, facts.param_bytes, facts.max_threads) == (77, 8, 48, 256)
    assert cubin.symbols["pk_launch_meta"] == launch_meta(args_bytes=48)


def test_the_older_elf_format_is_read_as_well() -> None:
    cubin = elf.inspect(fake_cubin(sm=90, toolkit="12.9.86"))
    assert (cubin.osabi, cubin.abi_version, cubin.sm, cubin.toolkit) == (elf.OSABI_V7, 7, 90, None)


def test_no_damage_of_a_cubin_raises_anything_but_an_artifact_error() -> None:
    good, draw, noticed = fake_cubin(), random.Random(1), []
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            elf.inspect(bytes(data[: draw.choice([len(data), draw.randrange(len(data))])]))
        except ArtifactError as error:
            noticed.append(error)
    assert len(noticed) > 1000
    assert all(refused(error, "E05") for error in noticed)


@pytest.mark.parametrize(
    ("cubin", "code"),
    [
        (fake_cubin("pk_other", meta=launch_meta(args_bytes=192)), "E10"),
        (fake_cubin(meta=launch_meta(args_bytes=192, args_hash=0x9999)), "E11"),
        (fake_cubin(meta=launch_meta(args_bytes=192, schema=2)), "E11"),
        (fake_cubin(meta=launch_meta(args_bytes=192, threads=5000)), "E11"),
        (fake_cubin(meta=launch_meta(args_bytes=128)), "E11"),
        (fake_cubin(meta=b"short"), "E11"),
        (fake_cubin(sm=100, meta=launch_meta(args_bytes=192)), "E10"),
    ],
    ids=["symbol", "layout hash", "meta schema", "threads", "smaller struct", "no meta", "target"],
)
def test_a_cubin_that_is_not_what_its_manifest_promised_is_refused(cubin: bytes, code: str) -> None:
    fields = tuple(manifest.ArgField(*row) for row in made.ARGS)
    with pytest.raises(ArtifactError) as caught:
        meta.make_spec(
            cubin,
            key=made.KEY,
            symbol="pk_fake",
            arch=parse("sm_90a"),
            args=fields,
            args_hash=f"{made.ARGS_HASH:016x}",
            origin="here",
        )
    assert refused(caught.value, code)
    assert caught.value.facts["key"] == made.KEY


def test_an_entry_of_a_sound_pack_becomes_a_spec(tmp_path: Path) -> None:
    pack = one_pack(tmp_path, made.pack_bytes("cu129", "sm_90a"))
    data, spec = resolve.read_entry(pack, pack.header.entries[made.KEY])
    assert data == made.cubin_for("cu129", "sm_90a")
    assert (spec.origin, spec.meta.args_bytes, spec.regs) == ("cu129/sm_90a", made.ARGS_BYTES, 40)
