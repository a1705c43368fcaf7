# SPDX-License-Identifier: Apache-2.0
"""Reads kernel packs: the files of compressed cubins that the wheel carries.

File: magic, u32 little-endian length of the header, canonical JSON header, one zlib frame per cubin. A cubin is handed
out only after its hash and its ELF header agree with the header; the bytes that were hashed are the bytes returned.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import elf, manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prime_kernels.loader.manifest import Entry, Manifest, PackHeader, PackRecord

MAGIC = b"PKPACK1\n"
FOLDER = Path(__file__).resolve().parent.parent / "_packs"
MANIFEST = "MANIFEST.json"
_MAX_HEADER = 16 << 20


def _damaged(path: Path, what: str, **facts: object) -> ArtifactError:
    import prime_kernels

    return ArtifactError(
        f"{path}: {what}.",
        facts={"file": str(path), **facts},
        remedy=f"Reinstall: pip install --force-reinstall --no-cache-dir prime-kernels=={prime_kernels.__version__}",
    )


@dataclass(frozen=True, slots=True)
class Pack:
    """An opened pack: its file and its parsed header. `start` is where the frames begin."""

    path: Path
    header: PackHeader
    start: int
    data: mmap.mmap

    @property
    def name(self) -> str:
        """How traces call it, e.g. "cu130/sm_90a"."""
        return f"{self.header.set}/{self.header.arch}"

    def cubin(self, entry: Entry) -> bytes:
        """The verified bytes of one entry.

        Raises:
            ArtifactError: The frame is damaged, its hash differs, or the cubin is not for its target (E10).
        """
        frame = self.data[self.start + entry.off : self.start + entry.off + entry.len]
        inflate = zlib.decompressobj()
        try:
            # One byte more than promised is enough to see that a frame holds more; it is never inflated in full.
            raw = inflate.decompress(frame, entry.raw_bytes + 1)
        except zlib.error as err:
            raise _damaged(self.path, f"frame of {entry.key} does not decompress ({err})", key=entry.key) from err
        digest = hashlib.sha256(raw).hexdigest()
        if len(raw) != entry.raw_bytes or not inflate.eof or digest != entry.cubin_sha256:
            what = f"sha256 of {entry.key} is {digest[:12]}, its header says {entry.cubin_sha256[:12]}"
            raise _damaged(self.path, what, key=entry.key, sha256=digest, expected=entry.cubin_sha256)
        sm = elf.ident(raw)[2]
        if sm != entry.arch.sm:
            raise _damaged(self.path, f"{entry.key} is for sm_{sm}, its header says {entry.arch}", key=entry.key)
        return raw


def open_pack(path: Path, record: PackRecord | None = None) -> Pack:
    """Map a pack and read its header.

    Args:
        path: The file.
        record: What MANIFEST.json says of it: set and target must agree. Hashes are checked entry by entry when these
            are read, and over the whole file by `check_digest`.

    Raises:
        ArtifactError: Missing, truncated, no pack, malformed, or not what the record says (E10).
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as err:
        raise _damaged(path, f"cannot be read ({err})") from err
    if len(data) < 12 or data[:8] != MAGIC:
        raise _damaged(path, "does not start as a kernel pack")
    (length,) = struct.unpack_from("<I", data, 8)
    start = 12 + length
    if length > _MAX_HEADER or start > len(data):
        raise _damaged(path, f"header of {length} bytes leaves the file of {len(data)}")
    header = manifest.parse_header(data[12:start], str(path))
    for entry in header.entries.values():
        if start + entry.off + entry.len > len(data):
            raise _damaged(path, f"frame of {entry.key} leaves the file: it is truncated", key=entry.key)
    if record is not None and (record.set, record.arch) != (header.set, header.arch):
        raise _damaged(path, f"holds {header.set}/{header.arch}, {MANIFEST} says {record.path}")
    return Pack(path, header, start, data)


def check_digest(path: Path, record: PackRecord) -> None:
    """Compare a whole pack with MANIFEST.json.

    Raises:
        ArtifactError: Its sha256 differs (E10).
    """
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as err:
        raise _damaged(path, f"cannot be read ({err})") from err
    if found != record.sha256:
        what = f"sha256 is {found[:12]}, {MANIFEST} says {record.sha256[:12]}"
        raise _damaged(path, what, sha256=found, expected=record.sha256)


def read_manifest(folder: Path = FOLDER) -> Manifest | None:
    """MANIFEST.json of the installed packs; None if this installation carries none (a source tree, an sdist).

    Raises:
        ArtifactError: It is malformed (E10).
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return manifest.parse_manifest(data, str(path))


def open_installed(folder: Path = FOLDER, *, archs: frozenset[str] | None = None) -> list[Pack]:
    """Open the installed packs, newest toolkit first.

    Args:
        folder: Where they are.
        archs: Only these targets; None opens all.

    Raises:
        ArtifactError: The manifest or a pack is damaged (E10).
    """
    found = read_manifest(folder)
    records = found.packs if found is not None else ()
    wanted = [record for record in records if archs is None or str(record.arch) in archs]
    packs = [open_pack(folder / record.path, record) for record in wanted]
    return sorted(packs, key=lambda pack: (-pack.header.min_driver, str(pack.header.arch)))
