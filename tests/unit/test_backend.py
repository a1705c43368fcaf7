# SPDX-License-Identifier: Apache-2.0
"""Building the package: wheels, editable installs and sdists, in a copy of the tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.wheels import copy_tree, fake_packs, run_backend


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "tree")


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_a_wheel_without_packs_carries_library_and_sources(tree: Path, tmp_path: Path) -> None:
    done = run_backend(tree, f"build_wheel({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    assert "kernels will be compiled at first use" in done.stderr
    wheel = only(tmp_path, "*.whl")
    assert "-py3-none-linux_" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"prime_kernels/_host/libprime_host.so", "prime_kernels/_src/ENTRIES.json"} <= names
    assert {"prime_kernels/py.typed", "prime_kernels/__init__.py"} <= names
    assert not [n for n in names if "_packs" in n or n.startswith(("tests", "build_tools", "kernels_src"))]
    assert not [n for n in names if "/host/" in n]


def test_a_wheel_takes_ready_packs(tree: Path, tmp_path: Path) -> None:
    packs = fake_packs(tmp_path / "packs")
    done = run_backend(tree, f"build_wheel({str(tmp_path)!r})", PRIME_KERNELS_PACKS=str(packs))
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(only(tmp_path, "*.whl")) as archive:
        manifest = json.loads(archive.read("prime_kernels/_packs/MANIFEST.json"))
        for row in manifest["packs"]:
            assert archive.read(f"prime_kernels/_packs/{row['path']}") == (packs / row["path"]).read_bytes()


def test_files_of_an_earlier_build_do_not_ship_again(tree: Path, tmp_path: Path) -> None:
    extra = tree / "prime_kernels" / "gone.py"
    extra.write_text("")
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_backend(tree, f"build_wheel({str(first)!r})").returncode == 0
    extra.unlink()
    assert run_backend(tree, f"build_wheel({str(second)!r})").returncode == 0
    assert "prime_kernels/gone.py" in zipfile.ZipFile(only(first, "*.whl")).namelist()
    assert "prime_kernels/gone.py" not in zipfile.ZipFile(only(second, "*.whl")).namelist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PRIME_KERNELS_REQUIRE": "1"}, "no MANIFEST.json in"),
        ({"PRIME_KERNELS_PACKS": "/nonexistent"}, "no MANIFEST.json in /nonexistent"),
        ({"PRIME_KERNELS_PACKS": "STALE"}, "was built from other sources than this tree"),
    ],
    ids=["required", "named but absent", "stale"],
)
def test_missing_or_stale_packs_stop_the_build(
    tree: Path, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    if settings.get("PRIME_KERNELS_PACKS") == "STALE":
        settings = {"PRIME_KERNELS_PACKS": str(fake_packs(tmp_path / "packs", stale=True))}
    done = run_backend(tree, f"build_wheel({str(tmp_path)!r})", **settings)
    assert done.returncode != 0
    assert message in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_an_editable_install_needs_no_c_compiler(tree: Path, tmp_path: Path) -> None:
    done = run_backend(tree, f"build_editable({str(tmp_path)!r})", PATH=str(tmp_path), CC="")
    assert done.returncode == 0, done.stderr
    assert "no host library: no C compiler found" in done.stderr
    assert only(tmp_path, "*.whl").name.startswith("prime_kernels-")
    assert (tree / "prime_kernels" / "_src" / "ENTRIES.json").exists()
    assert not (tree / "prime_kernels" / "_host").exists()


def test_a_wheel_does_need_one(tree: Path, tmp_path: Path) -> None:
    done = run_backend(tree, f"build_wheel({str(tmp_path)!r})", PATH=str(tmp_path), CC="")
    assert done.returncode != 0
    assert "no C compiler found" in done.stderr


def test_the_sdist_holds_sources_and_nothing_built(tree: Path, tmp_path: Path) -> None:
    assert run_backend(tree, f"build_wheel({str(tmp_path)!r})").returncode == 0
    done = run_backend(tree, f"build_sdist({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    with tarfile.open(only(tmp_path, "*.tar.gz")) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {"pyproject.toml", "build_tools/backend.py", "build_tools/variants.toml", "LICENSE", "NOTICE"} <= names
    assert {"kernels_src/host/prime_host.c", "kernels_src/common/launch_meta.cuh"} <= names
    assert not [n for n in names if n.startswith(("prime_kernels/_host", "prime_kernels/_src", "prime_kernels/_packs"))]
    assert not [n for n in names if n.endswith((".so", ".pyc", ".cubin", ".pkpack"))]


def test_make_wheel_leaves_one_inspected_manylinux_wheel(tree: Path, tmp_path: Path) -> None:
    packs, out = fake_packs(tmp_path / "packs"), tmp_path / "dist"
    env = {**os.environ, "PRIME_KERNELS_PACKS": str(packs), "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "build_tools.make_wheel", "--out", str(out)]
    wheels = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        wheels.append(only(out, "*.whl").read_bytes())
    assert "-py3-none-manylinux_2_28_" in only(out, "*.whl").name
    assert wheels[0] == wheels[1]
