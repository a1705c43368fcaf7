# SPDX-License-Identifier: Apache-2.0
"""Packs and sources of made-up kernels in a folder, for tests of the loader: no CUDA compiler, no shipped kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from build_tools import pack
from prime_kernels.loader.resolve import Installation
from prime_kernels.settings import Settings
from tests.helpers.fake_cubin import fake_cubin, launch_meta

SETS = {"cu129": ("12.9.86", 12090), "cu130": ("13.0.88", 13000)}
KEY = "fake|b16|t256"
ARGS_HASH = 0x1234
# 192 bytes: two pointers, a scalar, three values in an array, and one tensor map at 64.
ARGS: list[list[Any]] = [["x", "ptr", 1, 0], ["rows", "u32", 1, 8], ["scales", "f32", 3, 12], ["map_x", "map", 1, 64]]
ARGS_BYTES = 192

SOURCE = """// SPDX-License-Identifier: Apache-2.0
#include "moe/body.cuh"
struct Meta { unsigned w[8]; unsigned long long hash; unsigned roles[8]; };
struct Args { float* x; unsigned n; };
extern "C" {
extern __device__ const Meta pk_launch_meta;
__device__ const Meta pk_launch_meta = {{1, 128, 0, 1, 1, 0, sizeof(Args), 0}, 0x77, {}};
__global__ void __launch_bounds__(128) pk_made(const __grid_constant__ Args args) { body(args.x, args.n); }
}
"""
BODY = """#pragma once
#include "../common/scale.cuh"
__device__ void body(float* x, unsigned n) { if (threadIdx.x < n) x[threadIdx.x] *= kScale; }
"""
SCALE = "#pragma once\nconstexpr float kScale = 3.0f;\n"


def cubin_for(set_name: str, arch: str, **facts: Any) -> bytes:
    """A cubin that a pack of this set and target may hold."""
    meta = launch_meta(args_bytes=ARGS_BYTES, args_hash=ARGS_HASH, **facts)
    return fake_cubin(sm=int(arch[3:].rstrip("af")), toolkit=SETS[set_name][0], meta=meta)


def pack_entry(set_name: str, arch: str, key: str = KEY, **changes: Any) -> dict[str, Any]:
    """The entry that belongs to `cubin_for`."""
    toolkit, min_driver = SETS[set_name]
    entry: dict[str, Any] = {
        "key": key,
        "kernel": "pk_fake",
        "symbol": "pk_fake",
        "arch": arch,
        "toolkit": toolkit,
        "min_driver": min_driver,
        "regs": 40,
        "smem_bytes": 0,
        "threads": 256,
        "cluster": 1,
        "protocol": 0,
        "args_bytes": ARGS_BYTES,
        "args_hash": f"{ARGS_HASH:016x}",
        "args": ARGS,
        "src_fp": "0" * 64,
        "status": "compiled",
        "facts": {},
    }
    return entry | changes


def pack_bytes(set_name: str, arch: str, pairs: list[tuple[dict[str, Any], bytes]] | None = None) -> bytes:
    """A pack file; by default with the one kernel `KEY`."""
    toolkit, min_driver = SETS[set_name]
    header = {"set": set_name, "arch": arch, "toolkit": toolkit, "min_driver": min_driver}
    return pack.write_pack(header, pairs or [(pack_entry(set_name, arch), cubin_for(set_name, arch))])


def write_packs(folder: Path, files: dict[str, bytes]) -> Path:
    """Write pack files ("cu130/sm_90a" -> bytes) and the manifest over them."""
    for name, data in files.items():
        path = folder / f"{name}.pkpack"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    pack.write_manifest(folder)
    return folder


def usual_packs(folder: Path) -> Path:
    """Packs of both sets for every target, with the one kernel `KEY`."""
    names = [(set_name, arch) for set_name in SETS for arch in ("sm_90a", "sm_100a", "sm_103a")]
    return write_packs(folder, {f"{s}/{a}": pack_bytes(s, a) for s, a in names})


def write_sources(folder: Path, *, key: str = "made|t128", source: str = SOURCE, **changes: Any) -> Path:
    """Sources of one kernel that NVRTC can compile, with ENTRIES.json."""
    entry = {
        "file": "entries/made--t128.cu",
        "kernel": "pk_made",
        "archs": ["sm_90a", "sm_100a", "sm_103a"],
        "supported": [],
        "args": [["x", "ptr", 1, 0], ["n", "u32", 1, 8]],
        "args_bytes": 16,
        "args_hash": f"{0x77:016x}",
        "src_fp": "0" * 64,
        "facts": {},
    }
    index = {"schema": 1, "options": ["-std=c++20"], "entries": {key: entry | changes}}
    files = {"entries/made--t128.cu": source, "moe/body.cuh": BODY, "common/scale.cuh": SCALE}
    for name, text in {**files, "ENTRIES.json": json.dumps(index)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def installation(folder: Path, *, sources: bool = True, packs: bool = True, **settings: Any) -> Installation:
    """An installation below `folder` with its cache in `folder/cache`."""
    config = Settings(**{"cache_dir": str(folder / "cache"), "tmp_dir": str(folder), **settings})
    if packs:
        usual_packs(folder / "packs")
    if sources:
        write_sources(folder / "src")
    return Installation.open(config, packs_folder=folder / "packs", sources_folder=folder / "src")
