# SPDX-License-Identifier: Apache-2.0
"""Slim wheels: the full wheel with one pack set and one target, under a local version such as 1.0.0+cu130.sm90a.

Usage: python -m build_tools.slim dist/FULL.whl --set cu130 --arch sm_90a --out dist/whl
       python -m build_tools.slim dist/FULL.whl --all --out dist/whl

Each wheel lands in a folder of its own, <out>/<set>/<arch>/, with an index page (PEP 503), because an installer that
sees two local versions side by side takes the alphabetically last one whatever the machine has.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import re
import sys
import zipfile
from pathlib import Path

from build_tools import pack
from build_tools.plan import slims

_STAMP = (1980, 1, 1, 0, 0, 0)


class SlimError(ValueError):
    """The full wheel does not hold what a slim one was asked of it."""


def _line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}"


def _manifest(data: bytes, pack_set: str, arch: str) -> bytes:
    manifest = json.loads(data)
    rows = [row for row in manifest["packs"] if (row["set"], row["arch"]) == (pack_set, arch)]
    if len(rows) != 1:
        raise SlimError(f"the wheel has {len(rows)} packs for {pack_set}/{arch}, need 1")
    manifest["packs"] = rows
    return (json.dumps(manifest, sort_keys=True, indent=1) + "\n").encode("ascii")


def _members(wheel: Path, pack_set: str, arch: str, version: str, local: str) -> dict[str, bytes]:
    """Members of the slim wheel by name, without RECORD."""
    out = {}
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            name, data = item.filename, archive.read(item)
            if item.is_dir() or name.endswith(".dist-info/RECORD"):
                continue
            if name.endswith(pack.SUFFIX) and not name.endswith(f"/{pack_set}/{arch}{pack.SUFFIX}"):
                continue
            if name.endswith(f"_packs/{pack.MANIFEST}"):
                data = _manifest(data, pack_set, arch)
                keys = {e["key"] for e in _header(archive, pack_set, arch)["entries"]}
                data = _with_keys(data, keys)
            if name.endswith(".dist-info/METADATA"):
                data = re.sub(rb"^Version: .*$", f"Version: {local}".encode(), data, count=1, flags=re.M)
            out[name.replace(f"-{version}.dist-info/", f"-{local}.dist-info/")] = data
    return out


def _header(archive: zipfile.ZipFile, pack_set: str, arch: str) -> dict[str, list[dict[str, str]]]:
    (name,) = (n for n in archive.namelist() if n.endswith(f"/{pack_set}/{arch}{pack.SUFFIX}"))
    header, _ = pack.read_pack(archive.read(name))
    return header


def _with_keys(manifest: bytes, keys: set[str]) -> bytes:
    table = json.loads(manifest)
    table["keys"] = sorted(keys)
    return (json.dumps(table, sort_keys=True, indent=1) + "\n").encode("ascii")


def slim(wheel: Path, pack_set: str, arch: str, out: Path) -> Path:
    """Writes the slim wheel and its index page; returns the wheel's path. Equal input gives equal bytes.

    Raises:
        SlimError: the full wheel lacks that pack, or is slim itself.
    """
    name, version, *tags = wheel.stem.split("-")
    if "+" in version:
        raise SlimError(f"{wheel.name} has a local version already")
    local = f"{version}+{pack_set}.{arch.replace('_', '')}"
    members = _members(wheel, pack_set, arch, version, local)
    record = f"{name}-{local}.dist-info/RECORD"
    lines = [_line(n, d) for n, d in members.items()]
    members[record] = "\n".join([*lines, f"{record},,\n"]).encode()
    folder = out / pack_set / arch / "prime-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'-'.join([name, local, *tags])}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for member, data in members.items():
            info = zipfile.ZipInfo(member, _STAMP)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, data)
    write_index(folder)
    return path


def write_index(folder: Path) -> Path:
    """A PEP 503 page over the wheels of one folder, each link with its digest."""
    links = []
    for path in sorted(folder.glob("*.whl")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        name = html.escape(path.name)
        links.append(f'<a href="{name.replace("+", "%2B")}#sha256={digest}">{name}</a><br>')
    page = folder / "index.html"
    page.write_text("\n".join(["<!DOCTYPE html>", "<title>prime-kernels</title>", *links, ""]), encoding="utf-8")
    return page


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
