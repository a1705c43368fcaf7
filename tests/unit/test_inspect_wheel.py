# SPDX-License-Identifier: Apache-2.0
"""A sound wheel passes the inspection, and each kind of damage is named."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from build_tools import inspect_wheel, pack, slim
from tests.helpers.fake_cubin import fake_cubin
from tests.helpers.wheels import rewrite, sound_wheel
from tests.stub_cuda import build_stub

HOST = "prime_kernels/_host/libprime_host.so"
PACK = "prime_kernels/_packs/cu130/sm_90a.pkpack"
MANIFEST = "prime_kernels/_packs/MANIFEST.json"
Damage = Callable[[dict[str, bytes]], dict[str, bytes | None]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_wheel(tmp_path_factory.mktemp("wheel"))


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n) for n in archive.namelist()}


def test_a_sound_wheel_passes(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_wheel.inspect(sound) == []
    assert inspect_wheel.main([str(sound)]) == 0
    assert f"{sound.name}: {sound.stat().st_size} bytes of at most 30000000" in capsys.readouterr().out


def repacked(files: dict[str, bytes], change: Callable[[dict[str, object], bytes], bytes]) -> dict[str, bytes | None]:
    """The pack with each cubin passed through `change(entry, cubin)`, and a manifest that agrees with it."""
    header, cubins = pack.read_pack(files[PACK])
    drop = ("cubin_sha256", "raw_bytes", "off", "len")
    pairs = []
    for entry in header.pop("entries"):
        plain = {k: v for k, v in entry.items() if k not in drop}
        cubin = change(plain, cubins[entry["key"]])
        pairs.append((plain, cubin))
    data = pack.write_pack({k: v for k, v in header.items() if k != "schema"}, pairs)
    manifest = json.loads(files[MANIFEST])
    for row in manifest["packs"]:
        if row["path"] == "cu130/sm_90a.pkpack":
            row["sha256"] = hashlib.sha256(data).hexdigest()
    return {PACK: data, MANIFEST: json.dumps(manifest).encode()}


def other_sources(entry: dict[str, object], cubin: bytes) -> bytes:
    entry["src_fp"] = "1" * 64
    return cubin


def dist_info(files: dict[str, bytes], name: str) -> str:
    (found,) = (n for n in files if n.endswith(f".dist-info/{name}"))
    return found


def metadata(files: dict[str, bytes], old: bytes, new: bytes) -> dict[str, bytes | None]:
    name = dist_info(files, "METADATA")
    assert old in files[name]
    return {name: files[name].replace(old, new)}


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a flipped bit in a pack": (lambda f: {PACK: f[PACK][:-1] + bytes([f[PACK][-1] ^ 1])}, "sha256 differs"),
    "a pack that is not listed": (lambda f: {"prime_kernels/_packs/cu130/sm_80.pkpack": f[PACK]}, "the manifest lists"),
    "a missing pack": (lambda f: {PACK: None}, "cu130/sm_90a.pkpack is absent"),
    "no packs at all": (lambda f: {n: None for n in f if "/_packs/" in n}, "MANIFEST.json is absent"),
    "packs of other sources": (lambda f: repacked(f, other_sources), "not built from the sources in _src"),
    "a cubin for another target": (
        lambda f: repacked(f, lambda e, c: fake_cubin(str(e["symbol"]), sm=100)),
        "the cubin is for sm_100",
    ),
    "a cubin of another kernel": (lambda f: repacked(f, lambda e, c: fake_cubin("pk_other")), "holds ['pk_other']"),
    "a cubin of another assembler": (
        lambda f: repacked(f, lambda e, c: fake_cubin(str(e["symbol"]), toolkit="13.5.1")),
        "assembled by 13.5.1",
    ),
    "a build path in a cubin": (
        lambda f: repacked(f, lambda e, c: fake_cubin(str(e["symbol"]), code=b"\0/home/someone/kernel.cu\0")),
        "holds the path /home/someone/kernel.cu",
    ),
    "a process id in a cubin": (
        lambda f: repacked(f, lambda e, c: fake_cubin(str(e["symbol"]), code=b"_INTERNAL_1a2b3c4d_4_k_cu_0_77")),
        "symbol with a process id",
    ),
    "a host library that links libc": (
        lambda f: {HOST: build_stub().read_bytes()},
        "libprime_host.so needs (",
    ),
    "a second library": (lambda f: {"prime_kernels/_host/other.so": f[HOST]}, "ELF files are"),
    "a library of NVIDIA's": (lambda f: {"prime_kernels/libnvrtc.so.13": b"x"}, "libnvrtc.so.13 is NVIDIA's"),
    "a header of NVIDIA's": (
        lambda f: {"prime_kernels/_src/x.cuh": b"// Copyright (c) 2025, NVIDIA CORPORATION. All rights"},
        "x.cuh is NVIDIA's",
    ),
    "tests": (lambda f: {"tests/test_x.py": b""}, "tests/test_x.py does not belong"),
    "no JIT sources": (lambda f: {"prime_kernels/_src/ENTRIES.json": None}, "the JIT has no sources"),
    "no notice": (lambda f: {dist_info(f, "licenses/NOTICE"): None}, "NOTICE is absent"),
    "a pinned torch": (
        lambda f: metadata(f, b"Requires-Dist: torch>=2.9", b"Requires-Dist: torch==2.13.0"),
        "pins torch",
    ),
    "another licence": (
        lambda f: metadata(f, b"License-Expression: Apache-2.0", b"License-Expression: MIT"),
        "no License-Expression",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(sound: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    wheel = rewrite(sound, tmp_path / sound.name, damage(members(sound)))
    problems = inspect_wheel.inspect(wheel)
    assert any(message in p for p in problems), problems
    assert inspect_wheel.main([str(wheel)]) == 1


def test_a_member_that_differs_from_record_is_named(sound: Path, tmp_path: Path) -> None:
    wheel = rewrite(sound, tmp_path / sound.name, {"prime_kernels/py.typed": b"x"}, record=False)
    assert inspect_wheel.inspect(wheel) == ["prime_kernels/py.typed is not in RECORD with its digest"]


def test_a_plain_linux_tag_is_refused(sound: Path, tmp_path: Path) -> None:
    wheel = rewrite(sound, tmp_path / sound.name.replace("manylinux_2_28", "linux"), {})
    assert any("need py3-none-manylinux_2_28" in p for p in inspect_wheel.inspect(wheel))


def test_size_is_limited(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_wheel, "MAX_BYTES", 1000)
    assert inspect_wheel.inspect(sound) == [f"{sound.stat().st_size} bytes, at most 1000"]


def test_a_jit_only_wheel_passes_when_it_was_asked_for(sound: Path, tmp_path: Path) -> None:
    files = members(sound)
    wheel = rewrite(sound, tmp_path / sound.name, {n: None for n in files if "/_packs/" in n})
    assert inspect_wheel.inspect(wheel, jit_only=True) == []


def test_a_slim_wheel_holds_one_pack_under_a_local_version(sound: Path, tmp_path: Path) -> None:
    path = slim.slim(sound, "cu130", "sm_90a", tmp_path)
    assert path.parent == tmp_path / "cu130" / "sm_90a" / "prime-kernels"
    assert "+cu130.sm90a-py3-none-" in path.name
    files = members(path)
    assert [n for n in files if n.endswith(".pkpack")] == [PACK]
    assert [row["path"] for row in json.loads(files[MANIFEST])["packs"]] == ["cu130/sm_90a.pkpack"]
    version = pack.package_version()
    assert f"\nVersion: {version}+cu130.sm90a\n" in files[dist_info(files, "METADATA")].decode()
    assert all(f"-{version}+cu130.sm90a.dist-info/" in n for n in files if ".dist-info/" in n)
    assert inspect_wheel.inspect(path, complete=False) == []
    assert any("is absent" in p for p in inspect_wheel.inspect(path))


def test_a_slim_wheel_is_reproducible(sound: Path, tmp_path: Path) -> None:
    one, two = (slim.slim(sound, "cu129", "sm_90a", tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_slim_wheel_needs_its_pack_and_a_full_wheel(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(slim.SlimError, match="0 packs for cu130/sm_80a"):
        slim.slim(sound, "cu130", "sm_80a", tmp_path)
    with pytest.raises(slim.SlimError, match="local version already"):
        slim.slim(slim.slim(sound, "cu130", "sm_90a", tmp_path), "cu130", "sm_90a", tmp_path)
