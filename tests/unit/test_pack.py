# SPDX-License-Identifier: Apache-2.0
"""The pack format and the manifest."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from build_tools import pack
from tests.helpers.fake_cubin import fake_cubin

HEADER = {"set": "cu130", "arch": "sm_90a", "toolkit": "13.0.88", "min_driver": 13000}


def two() -> list[tuple[dict[str, Any], bytes]]:
    return [
        ({"key": "b|2", "symbol": "pk_b"}, fake_cubin("pk_b")),
        ({"key": "a|1", "symbol": "pk_a"}, fake_cubin("pk_a")),
    ]


def test_what_is_written_is_read_back_sorted_by_key() -> None:
    data = pack.write_pack(HEADER, two())
    header, cubins = pack.read_pack(data)
    assert {name: header[name] for name in HEADER} == HEADER
    assert [e["key"] for e in header["entries"]] == ["a|1", "b|2"]
    assert cubins == {"a|1": fake_cubin("pk_a"), "b|2": fake_cubin("pk_b")}
    for entry in header["entries"]:
        assert entry["cubin_sha256"] == hashlib.sha256(cubins[entry["key"]]).hexdigest()


def test_order_of_the_input_does_not_reach_the_bytes() -> None:
    assert pack.write_pack(HEADER, two()) == pack.write_pack(HEADER, two()[::-1])


def test_the_documented_format_is_enough_to_read_a_pack() -> None:
    data = pack.write_pack(HEADER, two())
    assert data[:8] == b"PKPACK1\n"
    (length,) = struct.unpack_from("<I", data, 8)
    header = json.loads(data[12 : 12 + length])
    first = header["entries"][0]
    start = 12 + length + first["off"]
    assert zlib.decompress(data[start : start + first["len"]]) == fake_cubin("pk_a")


def test_a_repeated_key_is_refused() -> None:
    with pytest.raises(pack.PackError, match="occurs twice"):
        pack.write_pack(HEADER, [two()[0], two()[0]])


@pytest.mark.parametrize("where", ["magic", "header", "frame", "end", "extra"])
def test_damage_anywhere_is_noticed(where: str) -> None:
    data = bytearray(pack.write_pack(HEADER, two()))
    if where == "magic":
        data[0] ^= 1
    elif where == "header":
        at = data.index(b"cubin_sha256") + 20
        data[at] = ord("0") if data[at] != ord("0") else ord("1")
    elif where == "frame":
        data[-40] ^= 1
    elif where == "end":
        data = data[:-1]
    else:
        data += b"x"
    with pytest.raises((pack.PackError, zlib.error)):
        pack.read_pack(bytes(data))


def test_the_manifest_lists_every_pack_with_its_digest(tmp_path: Path) -> None:
    for name in ("cu129", "cu130"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sm_90a.pkpack").write_bytes(pack.write_pack({**HEADER, "set": name}, two()))
    manifest = json.loads(pack.write_manifest(tmp_path).read_text())
    assert manifest["version"] == pack.package_version()
    assert manifest["keys"] == ["a|1", "b|2"]
    assert [row["path"] for row in manifest["packs"]] == ["cu129/sm_90a.pkpack", "cu130/sm_90a.pkpack"]
    for row in manifest["packs"]:
        data = (tmp_path / row["path"]).read_bytes()
        assert (row["sha256"], row["bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
        assert row["entries"] == 2


def test_a_pack_in_the_wrong_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cu129").mkdir()
    (tmp_path / "cu129" / "sm_90a.pkpack").write_bytes(pack.write_pack(HEADER, two()))
    with pytest.raises(pack.PackError, match="says it is cu130/sm_90a"):
        pack.write_manifest(tmp_path)


def test_the_loader_reads_the_same_format(tmp_path: Path) -> None:
    from prime_kernels.loader import packs as loader

    assert loader.MAGIC == pack.MAGIC
    assert loader.MANIFEST == pack.MANIFEST


def test_the_version_is_the_package_s() -> None:
    import prime_kernels

    assert pack.package_version() == prime_kernels.__version__
