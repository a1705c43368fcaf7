# SPDX-License-Identifier: Apache-2.0
"""A copy of the source tree to build in, ready packs of hand-made cubins, and wheels with a member changed."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from build_tools import entries, pack
from build_tools.tomlfile import read_toml
from build_tools.toolchain import DECLARATION
from build_tools.variants import archs_of, read_variants
from tests.helpers.fake_cubin import fake_cubin, launch_meta

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("prime_kernels", "build_tools", "kernels_src")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")


def copy_tree(to: Path) -> Path:
    """What a build needs of this tree, without anything built."""
    ignore = shutil.ignore_patterns("_host", "_src", "_packs", "__pycache__", "*.so")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, to / name)
    return to


def fake_packs(folder: Path, *, stale: bool = False) -> Path:
    """Packs for every set, target and variant of this tree, of cubins that nothing compiled."""
    sets = read_toml(DECLARATION)["sets"]
    variants = read_variants()
    for set_name, row in sets.items():
        for arch in archs_of(variants):
            made = []
            for variant in (v for v in variants if arch in v.archs):
                entry = entries.generate(variant)
                meta = launch_meta(args_bytes=entry.args.size, args_hash=entry.args.layout_hash())
                cubin = fake_cubin(variant.kernel, sm=int(arch[3:-1]), toolkit=row["version"], meta=meta)
                facts = {"key": variant.key, "kernel": variant.kernel, "symbol": variant.kernel, "arch": arch}
                facts |= {"toolkit": row["version"], "elf_abi": cubin[8], "min_driver": row["min_driver"]}
                facts |= {"regs": 40, "smem_static": 0, "smem_bytes": 0, "threads": 256, "cluster": 1, "protocol": 0}
                facts |= {"args_bytes": entry.args.size, "args_hash": entry.args_hash, "args": entry.fields}
                facts |= {"src_fp": "0" * 64 if stale else entry.fingerprint(), "status": "compiled", "min_ctas": 1}
                made.append(({**facts, "frontend": "none", "facts": variant.facts}, cubin))
            header = {"set": set_name, "arch": arch, "toolkit": row["version"], "min_driver": row["min_driver"]}
            path = folder / set_name / f"{arch}{pack.SUFFIX}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack.write_pack(header, made))
    pack.write_manifest(folder)
    return folder


def run_backend(tree: Path, call: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs `backend.<call>` of a copied tree in a process of its own, with these environment variables."""
    drop = ("PRIME_KERNELS_PACKS", "PRIME_KERNELS_REQUIRE", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in drop} | {"SOURCE_DATE_EPOCH": "1700000000"} | settings
    command = [sys.executable, "-W", "ignore", "-c", f"from build_tools import backend; backend.{call}"]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=120, check=False)


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}"


def rewrite(wheel: Path, out: Path, changes: dict[str, bytes | None], *, record: bool = True) -> Path:
    """A copy of a wheel with members replaced, added, or removed (None). `record=False` leaves RECORD as it was."""
    with zipfile.ZipFile(wheel) as archive:
        files = {i.filename: archive.read(i) for i in archive.infolist()}
    for name, data in changes.items():
        if data is None:
            del files[name]
        else:
            files[name] = data
    (record_name,) = (n for n in files if n.endswith(".dist-info/RECORD"))
    if record:
        lines = [_record_line(n, d) for n, d in files.items() if n != record_name]
        files[record_name] = "\n".join([*lines, f"{record_name},,\n"]).encode()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out


def as_manylinux(wheel: Path, folder: Path) -> Path:
    """The wheel with the tag that auditwheel gives it; stands in for auditwheel where that is not installed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
        text = archive.read(name).replace(b"-linux_", b"-manylinux_2_28_")
    return rewrite(wheel, folder / wheel.name.replace("-linux_", "-manylinux_2_28_"), {name: text})


def sound_wheel(folder: Path) -> Path:
    """The wheel that the build backend makes of a copy of this tree with made-up packs, as auditwheel names it."""
    packs = fake_packs(folder / "packs")
    done = run_backend(copy_tree(folder / "tree"), f"build_wheel({str(folder)!r})", PRIME_KERNELS_PACKS=str(packs))
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return as_manylinux(built, folder)
