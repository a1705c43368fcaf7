# SPDX-License-Identifier: Apache-2.0
"""Puts what ships beside the Python sources: _host (library), _src (sources for the JIT), _packs (cubins).

Usage: python -m build_tools.stage [--packs build/packs] [--into prime_kernels]

`_src/` holds the device sources that some variant includes, `entries/<key>.cu` for every variant, and ENTRIES.json:
{"schema", "options", "entries": {key: {"file", "kernel", "archs", "supported", "args", "args_bytes", "args_hash",
"src_fp", "facts"}}}. A JIT compiles `entries/<key>.cu` with `options` and `-I <_src>`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from build_tools import entries, host_shim, pack
from build_tools.variants import KERNELS, ROOT, read_variants

PACKAGE = ROOT / "prime_kernels"


def _write(path: Path, data: bytes) -> None:
    """Writes `data` unless the file holds it already, so that nothing looks newer than it is."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def source_files(root: Path = KERNELS) -> dict[str, bytes]:
    """Contents of `_src/` by relative path."""
    files: dict[str, bytes] = {}
    table = {}
    for variant in read_variants():
        entry = entries.generate(variant, root)
        name = f"entries/{variant.entry_name}"
        files[name] = entry.text.encode()
        files |= {source: (root / source).read_bytes() for source in entry.sources}
        table[variant.key] = {
            "file": name,
            "kernel": variant.kernel,
            "archs": list(variant.archs),
            "supported": list(variant.supported),
            "args": entry.fields,
            "args_bytes": entry.args.size,
            "args_hash": entry.args_hash,
            "src_fp": entry.fingerprint(root),
            "facts": variant.facts,
        }
    index = {"schema": 1, "options": list(entries.OPTIONS), "entries": table}
    files["ENTRIES.json"] = (json.dumps(index, indent=1, sort_keys=True) + "\n").encode()
    return files


def stage_sources(package: Path = PACKAGE) -> Path:
    """Writes `_src/` and removes what no longer belongs there."""
    folder, files = package / "_src", source_files()
    for name, data in files.items():
        _write(folder / name, data)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()
    return folder


def stage_packs(packs: Path, package: Path = PACKAGE) -> Path:
    """Copies packs and manifest to `_packs/`.

    Raises:
        pack.PackError: there is no manifest, or a pack is damaged, or its sources are not those of this tree.
    """
    if not (packs / pack.MANIFEST).is_file():
        raise pack.PackError(f"no {pack.MANIFEST} in {packs}; run python -m build_tools.build_cubins")
    manifest = json.loads((packs / pack.MANIFEST).read_text())
    current = {v.key: entries.generate(v).fingerprint() for v in read_variants()}
    folder = package / "_packs"
    shutil.rmtree(folder, ignore_errors=True)
    for row in manifest["packs"]:
        data = (packs / row["path"]).read_bytes()
        header, _ = pack.read_pack(data)
        stale = [e["key"] for e in header["entries"] if current.get(e["key"]) != e["src_fp"]]
        if stale:
            raise pack.PackError(f"{row['path']} was built from other sources than this tree: {', '.join(stale)}")
        _write(folder / row["path"], data)
    pack_text = json.dumps(manifest, sort_keys=True, indent=1) + "\n"
    _write(folder / pack.MANIFEST, pack_text.encode("ascii"))
    return folder


def main(argv: list[str] | None = None) -> int:
    """Command line entry; prints the folders written."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.stage", description=__doc__)
    parser.add_argument("--packs", type=Path, default=ROOT / "build" / "packs")
    parser.add_argument("--into", type=Path, default=PACKAGE)
    parser.add_argument("--no-packs", action="store_true", help="sources and host library only")
    args = parser.parse_args(argv)
    try:
        print(host_shim.build(args.into / "_host" / host_shim.IN_TREE.name))
        print(stage_sources(args.into))
        if not args.no_packs:
            print(stage_packs(args.packs, args.into))
    except (host_shim.ShimError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
