# SPDX-License-Identifier: Apache-2.0
"""What a release holds besides the wheel of this machine: the other CPU's wheel, slim wheels and their index."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import cross_wheel, elf_shared, host_shim, index, inspect_wheel, slim, wheel_zip
from build_tools.plan import slims
from tests.helpers.wheels import rewrite, sound_wheel

ROOT = Path(__file__).resolve().parents[2]
CROSS = shutil.which("aarch64-linux-gnu-gcc")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="releases are made on x86_64")
needs_cross = pytest.mark.skipif(CROSS is None, reason="no aarch64-linux-gnu-gcc")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def whl(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("index")
    for row in slims():
        slim.slim(sound, row["set"], row["arch"], top)
    assert index.main([str(top)]) == 0
    return top


@needs_cross
def test_the_wheel_of_the_other_cpu_differs_in_library_tag_and_record_only(sound: Path, tmp_path: Path) -> None:
    one, two = (cross_wheel.cross(sound, "aarch64", tmp_path / name) for name in ("one", "two"))
    assert one.name == sound.name.replace("x86_64", "aarch64")
    assert one.read_bytes() == two.read_bytes()
    assert inspect_wheel.inspect(one) == []
    ours, theirs = wheel_zip.read(sound), wheel_zip.read(one)
    assert ours.keys() == theirs.keys()
    differ = sorted(name.rsplit("/", 1)[1] for name in ours if ours[name] != theirs[name])
    assert differ == ["WHEEL", "libprime_host.so"]
    assert len([name for name in ours if name.endswith(".pkpack")]) == len(slims())
    library = elf_shared.read(theirs[inspect_wheel.HOST])
    assert (library.machine, library.needed, library.version_needs) == ("aarch64", (), False)
    assert library.exported == elf_shared.read(ours[inspect_wheel.HOST]).exported


@needs_cross
def test_a_damaged_wheel_stays_damaged_for_the_other_cpu(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = rewrite(sound, tmp_path / sound.name, {"prime_kernels/_packs/cu130/sm_90a.pkpack": None})
    assert cross_wheel.main([str(broken), "--out", str(tmp_path)]) == 1
    assert "PROBLEM prime_kernels/_packs/cu130/sm_90a.pkpack is absent" in capsys.readouterr().out


def test_only_a_finished_wheel_of_another_cpu_is_taken(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(cross_wheel.CrossError, match="other than x86_64"):
        cross_wheel.cross(sound, "x86_64", tmp_path)
    with pytest.raises(cross_wheel.CrossError, match="other than aarch64"):
        cross_wheel.cross(Path(sound.name.replace("manylinux_2_28", "linux")), "aarch64", tmp_path)
    bare = rewrite(sound, tmp_path / sound.name, {inspect_wheel.HOST: None})
    with pytest.raises(cross_wheel.CrossError, match="has no"):
        cross_wheel.cross(bare, "aarch64", tmp_path)


def test_a_compiler_for_the_wrong_cpu_is_noticed(sound: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "cc"
    skip = '[ "$a" = -mno-outline-atomics ]'
    wrong.write_text(f'#!/bin/sh\nfor a; do {skip} || set -- "$@" "$a"; shift; done\nexec cc "$@"\n')
    wrong.chmod(0o755)
    with pytest.raises(cross_wheel.CrossError, match="made a library for x86_64; need aarch64"):
        cross_wheel.cross(sound, "aarch64", tmp_path, compiler=str(wrong))


def test_a_missing_cross_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(host_shim.ShimError, match="apt install gcc-aarch64-linux-gnu"):
        host_shim.build(tmp_path / "x.so", machine="aarch64")


def test_every_combination_is_an_index_of_its_own_in_both_formats(whl: Path) -> None:
    names = [f"{row['set']}/{row['arch']}" for row in slims()]
    assert [path.relative_to(whl).as_posix() for path in sorted(whl.glob("*/*"))] == sorted(names)
    assert re.findall(r'href="([^"]+)/"', (whl / "index.html").read_text()) == sorted(names)
    for name in names:
        assert json.loads((whl / name / "index.json").read_text())["projects"] == [{"name": "prime-kernels"}]
        folder = whl / name / "prime-kernels"
        data = json.loads((folder / "index.json").read_text())
        (wheel,) = folder.glob("*.whl")
        (row,) = data["files"]
        assert (row["filename"], row["size"]) == (wheel.name, wheel.stat().st_size)
        assert row["hashes"] == {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
        assert row["requires-python"] == ">=3.10"
        assert data["versions"] == [wheel.name.split("-")[1]]
        link = f'<a href="{row["url"]}#sha256={row["hashes"]["sha256"]}" data-requires-python="&gt;=3.10">{wheel.name}<'
        assert link in (folder / "index.html").read_text()
        assert "%2B" in row["url"]


def test_an_installer_finds_the_wheel_of_the_combination_it_was_pointed_to(whl: Path, tmp_path: Path) -> None:
    for pack_set in ("cu129", "cu130"):
        url = (whl / pack_set / "sm_90a").as_uri()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--index-url", url]
        env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(
            [*command, "--pre", "--no-cache-dir", "-d", str(tmp_path), "prime-kernels"],
            env={k: v for k, v in env.items() if k not in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len(list(tmp_path.glob(f"*+{pack_set}.sm90a-*.whl"))) == 1


def test_combinations_never_share_a_folder(whl: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "cu130" / "sm_90a" / "prime-kernels"
    mixed.mkdir(parents=True)
    for name in ("cu129", "cu130"):
        shutil.copy(next((whl / name / "sm_90a" / "prime-kernels").glob("*.whl")), mixed)
    with pytest.raises(index.PageError, match="need wheels of one local version"):
        index.write(tmp_path)
    with pytest.raises(index.PageError, match="no <set>/<arch>/prime-kernels/ below"):
        index.write(tmp_path / "cu130")


def test_make_wheels_makes_all_of_a_release() -> None:
    done = subprocess.run(
        ["make", "-n", "-o", "packs", "wheels"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = ["make_wheel --out dist", "slim dist/*.whl --all", "index dist/whl", "build_sdist"]
    steps.append("inspect_wheel dist/*.whl")
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
    assert ("cross_wheel" in done.stdout) == (CROSS is not None)
