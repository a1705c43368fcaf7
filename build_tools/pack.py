# SPDX-License-Identifier: Apache-2.0
"""The pack format and the manifest over packs.

A pack is `MAGIC | header length, u32 little endian | canonical JSON header | zlib frames`, one frame a cubin; `off`
of an entry counts from the first byte after the header. Canonical JSON: ASCII, sorted keys, no spaces. Equal inputs
give equal bytes: entries are sorted by key, and nothing in a pack depends on time, path, user or commit.

Usage: python -m build_tools.pack manifest build/packs    (re)writes MANIFEST.json over the packs found there
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAGIC = b"PKPACK1\n"
SCHEMA = 1
SUFFIX = ".pkpack"
MANIFEST = "MANIFEST.json"
_LEVEL = (
    9  # zlib's output for one level is the same in every zlib 1.x; inspect_wheel compares the inflated bytes anyway
)


class PackError(ValueError):
    """The bytes are no pack, or its header and its frames disagree."""


def canonical(value: object) -> bytes:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def write_pack(header: dict[str, Any], cubins: Sequence[tuple[dict[str, Any], bytes]]) -> bytes:
    """The bytes of a pack.

    Args:
        header: Fields of the whole pack: set, arch, toolkit, min_driver.
        cubins: (entry, cubin) pairs; key order does not matter. The digest, sizes and offsets are added here.
    """
    frames, entries, offset = [], [], 0
    for entry, cubin in sorted(cubins, key=lambda pair: str(pair[0]["key"])):
        frame = zlib.compress(cubin, _LEVEL)
        digest = hashlib.sha256(cubin).hexdigest()
        entries.append({**entry, "cubin_sha256": digest, "raw_bytes": len(cubin), "off": offset, "len": len(frame)})
        frames.append(frame)
        offset += len(frame)
    if len({entry["key"] for entry in entries}) != len(entries):
        raise PackError("a key occurs twice")
    text = canonical({**header, "schema": SCHEMA, "entries": entries})
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *frames])


def read_pack(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(header, cubins by key), every digest checked.

    Raises:
        PackError: anything does not fit.
    """
    if data[: len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + 4:
        raise PackError("no pack: wrong magic")
    (length,) = struct.unpack_from("<I", data, len(MAGIC))
    start = len(MAGIC) + 4 + length
    header = json.loads(data[len(MAGIC) + 4 : start])
    if canonical(header) != data[len(MAGIC) + 4 : start] or header.get("schema") != SCHEMA:
        raise PackError("header is not canonical, or of another schema")
    cubins, end = {}, 0
    for entry in header["entries"]:
        if entry["off"] != end:
            raise PackError(f"{entry['key']}: frame at {entry['off']}, expected {end}")
        end += entry["len"]
        cubin = zlib.decompress(data[start + entry["off"] : start + end])
        if hashlib.sha256(cubin).hexdigest() != entry["cubin_sha256"] or len(cubin) != entry["raw_bytes"]:
            raise PackError(f"{entry['key']}: digest or size differs from the header")
        cubins[entry["key"]] = cubin
    if start + end != len(data):
        raise PackError(f"{len(data) - start - end} bytes after the last frame")
    return header, cubins


def package_version() -> str:
    """`__version__` of the package, read without importing it."""
    text = (ROOT / "prime_kernels" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__\s*(?::\s*\w+\s*)?=\s*"([^"]+)"', text, re.M)
    if found is None:
        raise PackError("prime_kernels/__init__.py has no __version__ line")
    return found[1]


def commit() -> str:
    """Commit of the tree, with -dirty if tracked files differ from it; "unknown" outside git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and (ROOT / ".git").exists() else "unknown"


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest over `<folder>/<set>/<arch>.pkpack`."""
    packs, keys = [], set()
    for path in sorted(folder.glob(f"*/*{SUFFIX}")):
        data = path.read_bytes()
        header, _ = read_pack(data)
        if (header["set"], header["arch"]) != (path.parent.name, path.stem):
            raise PackError(f"{path} says it is {header['set']}/{header['arch']}")
        keys |= {entry["key"] for entry in header["entries"]}
        facts = {name: header[name] for name in ("set", "arch", "toolkit", "min_driver")}
        digest = hashlib.sha256(data).hexdigest()
        name = path.relative_to(folder).as_posix()
        packs.append({**facts, "path": name, "sha256": digest, "bytes": len(data), "entries": len(header["entries"])})
    return {
        "schema": SCHEMA,
        "version": package_version(),
        "commit": commit(),
        "packs": packs,
        "keys": sorted(keys),
    }


def write_manifest(folder: Path) -> Path:
    """Writes MANIFEST.json into `folder` (indented: people read it)."""
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest_of(folder), sort_keys=True, indent=1) + "\n", encoding="ascii")
    return path


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.pack", description=__doc__)
    parser.add_argument("what", choices=["manifest"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    print(write_manifest(args.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
