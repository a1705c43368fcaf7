# SPDX-License-Identifier: Apache-2.0
"""Slim wheels: the full wheel with one pack set and one target, under a local version such as 1.0.0+cu130.sm90a.

Usage: python -m build_tools.slim dist/FULL.whl --set cu130 --arch sm_90a --out dist/whl
       python -m build_tools.slim dist/FULL.whl --all --out dist/whl

Each wheel lands in <out>/<set>/<arch>/prime-kernels/, so that every combination is an index of its own;
build_tools/index.py writes the pages.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from build_tools import pack, wheel_zip
from build_tools.index import PROJECT
from build_tools.plan import slims


class SlimError(ValueError):
    """The full wheel does not hold what a slim one was asked of it."""


def _manifest(data: bytes, pack_set: str, arch: str) -> bytes:
    manifest = json.loads(data)
    rows = [row for row in manifest["packs"] if (row["set"], row["arch"]) == (pack_set, arch)]
    if len(rows) != 1:
        raise SlimError(f"the wheel has {len(rows)} packs for {pack_set}/{arch}, need 1")
    manifest["packs"] = rows
    return (json.dumps(manifest, sort_keys=True, indent=1) + "\n").encode("ascii")


def _members(wheel: Path, pack_set: str, arch: str, version: str, local: str) -> dict[str, bytes]:
    """Members of the slim wheel by name, without RECORD."""
    out, full = {}, wheel_zip.read(wheel)
    for name, data in full.items():
        if name.endswith(pack.SUFFIX) and not name.endswith(f"/{pack_set}/{arch}{pack.SUFFIX}"):
            continue
        if name.endswith(f"_packs/{pack.MANIFEST}"):
            data = _with_keys(_manifest(data, pack_set, arch), _keys(full, pack_set, arch))
        if name.endswith(".dist-info/METADATA"):
            data = re.sub(rb"^Version: .*$", f"Version: {local}".encode(), data, count=1, flags=re.M)
        out[name.replace(f"-{version}.dist-info/", f"-{local}.dist-info/")] = data
    return out


def _keys(members: dict[str, bytes], pack_set: str, arch: str) -> set[str]:
    (name,) = (n for n in members if n.endswith(f"/{pack_set}/{arch}{pack.SUFFIX}"))
    header, _ = pack.read_pack(members[name])
    return {entry["key"] for entry in header["entries"]}


def _with_keys(manifest: bytes, keys: set[str]) -> bytes:
    table = json.loads(manifest)
    table["keys"] = sorted(keys)
    return (json.dumps(table, sort_keys=True, indent=1) + "\n").encode("ascii")


def slim(wheel: Path, pack_set: str, arch: str, out: Path) -> Path:
    """Writes the slim wheel into its folder; returns its path. Equal input gives equal bytes.

    Raises:
        SlimError: the full wheel lacks that pack, or is slim itself.
    """
    name, version, *tags = wheel.stem.split("-")
    if "+" in version:
        raise SlimError(f"{wheel.name} has a local version already")
    local = f"{version}+{pack_set}.{arch.replace('_', '')}"
    members = _members(wheel, pack_set, arch, version, local)
    return wheel_zip.write(out / pack_set / arch / PROJECT / f"{'-'.join([name, local, *tags])}.whl", members)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; prints the wheels written."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.slim", description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--set", dest="pack_set", choices=["cu129", "cu130"])
    parser.add_argument("--arch")
    parser.add_argument("--all", action="store_true", help="every combination in variants.toml")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.all == bool(args.pack_set and args.arch):
        parser.error("give --set and --arch, or --all")
    wanted = [(s["set"], s["arch"]) for s in slims()] if args.all else [(args.pack_set, args.arch)]
    try:
        for wheel in args.wheels:
            print("\n".join(str(slim(wheel, pack_set, arch, args.out)) for pack_set, arch in wanted))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
