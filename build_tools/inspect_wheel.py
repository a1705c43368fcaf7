# SPDX-License-Identifier: Apache-2.0
"""Says what is wrong with a wheel before anyone installs it.

Usage: python -m build_tools.inspect_wheel dist/*.whl [--jit-only]

Checked: tag and platlib; RECORD; size; the host library (machine, nothing NEEDED, no GLIBC version, exports); every
pack and cubin against its digests, its target and the JIT's sources; licences; that nothing of NVIDIA's, no build
machine's path and no file of tests or tools is inside. `--jit-only` accepts a wheel without packs.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from build_tools import elf_shared, pack
from build_tools.variants import archs_of, read_variants
from prime_kernels.errors import ArtifactError
from prime_kernels.loader import elf

MAX_BYTES = 30 * 1000 * 1000
PLATFORM = re.compile(r"manylinux_2_28_(x86_64|aarch64)")
HOST = "prime_kernels/_host/libprime_host.so"
PACKS = "prime_kernels/_packs"
UNDEFINED = {"dlopen", "dlsym", "dlerror"}
SETS = ("cu129", "cu130")

# The compiler's parts and headers, by name and by their notice. Our own NOTICE names the company without a copyright
# line.
_FOREIGN_NAME = re.compile(
    r"(^|/)(lib(nv|cu)[^/]*\.(so|a)|libdevice[^/]*|[^/]*\.bc|cuda_[^/]*\.h|cuda\.h|crt/[^/]*)", re.IGNORECASE
)
_FOREIGN_TEXT = re.compile(rb"copyright[^\n]{0,80}nvidia|nvidia corporation", re.IGNORECASE)
_PATHS = re.compile(rb"/(?:home|root|tmp|opt|work|usr|mnt|__w|github)/[\w./-]{3,}")
_STRAY = re.compile(r"(^|/)(__pycache__|tests|build_tools|kernels_src|benchmarks)(/|$)|\.(pyc|cubin|o|c)$")


def _tag(name: str, files: dict[str, bytes]) -> Iterator[str]:
    platform = name.removesuffix(".whl").split("-")[-1]
    if name.removesuffix(".whl").split("-")[-3:-1] != ["py3", "none"] or not PLATFORM.fullmatch(platform):
        yield f"the file is named {name}; need py3-none-manylinux_2_28_<machine>"
    wheel = next((files[f].decode() for f in files if f.endswith(".dist-info/WHEEL")), "")
    tags = re.findall(r"^Tag: (.*)$", wheel, re.M)
    if tags != [f"py3-none-{platform}"] or "Root-Is-Purelib: false" not in wheel:
        yield f"WHEEL says tags {tags}, need one equal to the file name, and Root-Is-Purelib: false"


def _record(files: dict[str, bytes]) -> Iterator[str]:
    text = next((files[f].decode() for f in files if f.endswith(".dist-info/RECORD")), "")
    listed = dict(line.rsplit(",", 2)[:2] for line in text.splitlines())
    for name, data in files.items():
        digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        if not name.endswith(".dist-info/RECORD") and listed.get(name) != digest:
            yield f"{name} is not in RECORD with its digest"
    yield from (f"RECORD lists {name}, which is absent" for name in listed if name not in files)


def _host(name: str, files: dict[str, bytes]) -> Iterator[str]:
    shared = [f for f in files if files[f][:4] == b"\x7fELF"]
    if shared != [HOST]:
        yield f"ELF files are {shared}; need exactly {HOST}"
        return
    library = elf_shared.read(files[HOST])
    if not name.endswith(f"_{library.machine}.whl"):
        yield f"{HOST} is for {library.machine}"
    if library.needed or library.search_paths or library.version_needs:
        yield f"{HOST} needs {library.needed}, searches {library.search_paths}, versions {library.version_needs}"
    if not all(s.startswith("pk_host_") for s in library.exported) or not set(library.undefined) <= UNDEFINED:
        yield f"{HOST} exports {library.exported} and takes {library.undefined}"


def _cubin(where: str, arch: str, entry: dict[str, Any], cubin: bytes) -> Iterator[str]:
    try:
        facts = elf.inspect(cubin)
    except ArtifactError as error:
        yield f"{where}: {error}"
        return
    if facts.sm != int(arch[3:-1]) or list(facts.kernels) != [entry["symbol"]]:
        yield f"{where}: the cubin is for sm_{facts.sm} and holds {list(facts.kernels)}"
    if facts.toolkit not in (None, entry["toolkit"]) or facts.abi_version != entry["elf_abi"]:
        yield f"{where}: assembled by {facts.toolkit}, ELF ABI {facts.abi_version}; the entry says otherwise"
    if b"_INTERNAL_" in cubin.replace(b"_INTERNAL_pk_", b""):
        yield f"{where}: holds a symbol with a process id; its bytes cannot be rebuilt"
    yield from (f"{where}: holds the path {m.decode()}" for m in set(_PATHS.findall(cubin)))
    if _FOREIGN_TEXT.search(cubin):
        yield f"{where}: holds a notice of NVIDIA's"


def _packs(files: dict[str, bytes], jit_only: bool) -> Iterator[str]:
    sources = json.loads(files.get("prime_kernels/_src/ENTRIES.json", b'{"entries": {}}'))["entries"]
    if not sources:
        yield "prime_kernels/_src/ENTRIES.json is absent or empty: the JIT has no sources"
    found = {f for f in files if f.endswith(pack.SUFFIX)}
    if f"{PACKS}/{pack.MANIFEST}" not in files:
        if found or not jit_only:
            yield f"{PACKS}/{pack.MANIFEST} is absent"
        return
    manifest = json.loads(files[f"{PACKS}/{pack.MANIFEST}"])
    rows = {f"{PACKS}/{row['path']}": row for row in manifest["packs"]}
    if rows.keys() != found:
        yield f"the manifest lists {sorted(rows)}, the wheel holds {sorted(found)}"
    for name in sorted(found & rows.keys()):
        if hashlib.sha256(files[name]).hexdigest() != rows[name]["sha256"]:
            yield f"{name}: sha256 differs from the manifest"
            continue
        header, cubins = pack.read_pack(files[name])
        for entry in header["entries"]:
            where = f"{name}: {entry['key']}"
            if sources.get(entry["key"], {}).get("src_fp") != entry["src_fp"]:
                yield f"{where}: was not built from the sources in _src"
            yield from _cubin(where, header["arch"], entry, cubins[entry["key"]])


def _complete(files: dict[str, bytes]) -> Iterator[str]:
    for arch in archs_of(read_variants()):
        for name in (f"{PACKS}/{pack_set}/{arch}{pack.SUFFIX}" for pack_set in SETS):
            if name not in files:
                yield f"{name} is absent"


def _contents(files: dict[str, bytes]) -> Iterator[str]:
    for name, data in files.items():
        if _FOREIGN_NAME.search(name) or _FOREIGN_TEXT.search(data):
            yield f"{name} is NVIDIA's, by its name or its notice"
        if _STRAY.search(name):
            yield f"{name} does not belong in a wheel"
    yield from (f"{HOST} holds the path {m.decode()}" for m in set(_PATHS.findall(files.get(HOST, b""))))
    for licence in ("LICENSE", "NOTICE"):
        if not any(f.endswith(f".dist-info/licenses/{licence}") for f in files):
            yield f"{licence} is absent"
    metadata = next((files[f].decode() for f in files if f.endswith(".dist-info/METADATA")), "")
    if "License-Expression: Apache-2.0" not in metadata:
        yield "METADATA has no License-Expression: Apache-2.0"
    if re.search(r"^Requires-Dist: (torch|packaging)\s*(\(|==|<|~=)", metadata, re.M):
        yield "METADATA pins torch or packaging"


def inspect(path: Path, *, jit_only: bool = False, complete: bool = True) -> list[str]:
    """Everything that is wrong with the wheel, as sentences; empty when it may be published.

    Args:
        path: The .whl file.
        jit_only: Accept a wheel without packs.
        complete: Want a pack for every set and target of variants.toml (a slim wheel has fewer).
    """
    with zipfile.ZipFile(path) as archive:
        files = {i.filename: archive.read(i) for i in archive.infolist() if not i.is_dir()}
    problems = [*_tag(path.name, files), *_record(files), *_host(path.name, files), *_contents(files)]
    problems += _packs(files, jit_only)
    if complete and not jit_only:
        problems += _complete(files)
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"{path.stat().st_size} bytes, at most {MAX_BYTES}")
    return problems


def largest(path: Path, count: int = 10) -> list[str]:
    """The largest members, compressed size first."""
    with zipfile.ZipFile(path) as archive:
        members = sorted(archive.infolist(), key=lambda i: (-i.compress_size, i.filename))[:count]
    return [f"{m.compress_size:>10}  {m.filename}" for m in members]


def main(argv: list[str] | None = None) -> int:
    """Command line entry; exit 1 when any wheel has a problem."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.inspect_wheel", description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--jit-only", action="store_true")
    parser.add_argument("--slim", action="store_true", help="a wheel with some of the packs")
    args = parser.parse_args(argv)
    failed = False
    for path in args.wheels:
        problems = inspect(path, jit_only=args.jit_only, complete=not args.slim)
        print(f"{path.name}: {path.stat().st_size} bytes of at most {MAX_BYTES}; largest members:")
        print("\n".join([*largest(path), *(f"PROBLEM {p}" for p in problems)]))
        failed |= bool(problems)
    print("inspection failed" if failed else "inspection passed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
