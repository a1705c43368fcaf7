# SPDX-License-Identifier: Apache-2.0
"""Reads a wheel's members and writes them again, with a RECORD of their digests; equal members give equal bytes."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

_STAMP = (1980, 1, 1, 0, 0, 0)


def read(wheel: Path) -> dict[str, bytes]:
    """Members by name, without RECORD, in the order of the archive."""
    with zipfile.ZipFile(wheel) as archive:
        items = [i for i in archive.infolist() if not i.is_dir() and not i.filename.endswith(".dist-info/RECORD")]
        return {item.filename: archive.read(item) for item in items}


def _line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}"


def write(path: Path, members: dict[str, bytes]) -> Path:
    """Writes the wheel `path` of these members and a RECORD over them."""
    (metadata,) = (name for name in members if name.endswith(".dist-info/METADATA"))
    record = metadata.removesuffix("METADATA") + "RECORD"
    text = "\n".join([*(_line(n, d) for n, d in members.items()), f"{record},,\n"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for member, data in {**members, record: text.encode()}.items():
            info = zipfile.ZipInfo(member, _STAMP)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, data)
    return path
