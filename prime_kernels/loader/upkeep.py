# SPDX-License-Identifier: Apache-2.0
"""The console verbs that look after files: verify and cache."""

from __future__ import annotations

import json
import re
import sys

from prime_kernels.errors import ArtifactError, UnsupportedConfig
from prime_kernels.loader import archive, packs, resolve
from prime_kernels.loader.store import Store
from prime_kernels.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from pathlib import Path
    from typing import Any

    from prime_kernels.loader.resolve import Installation

OK, DEGRADED = 0, 1
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def emit(args: argparse.Namespace, data: dict[str, Any], lines: list[str]) -> None:
    """Print one JSON object or the lines, as `args.json` says."""
    sys.stdout.write((json.dumps(data, default=str) if args.json else "\n".join(lines)) + "\n")


def parse_size(text: str) -> int:
    """Bytes of "1048576", "512K", "100M" or "2G".

    Raises:
        UnsupportedConfig: Something else (E41).
    """
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.I)
    if match is None:
        raise UnsupportedConfig(
            f"size is {text!r}; need a number, optionally followed by K, M or G.",
            facts={"size": text},
            remedy="Write for example 1G.",
        )
    return int(match[1]) * _SIZES[match[2].upper()]


def _verify_packs(folder: Path, problems: list[str]) -> tuple[list[int], list[int]]:
    """([sound, all] packs, [sound, all] cubins); what is wrong goes to `problems`."""
    found = packs.read_manifest(folder)
    records = found.packs if found else ()
    sound, cubins = [0, len(records)], [0, 0]
    for record in records:
        try:
            packs.check_digest(folder / record.path, record)
            pack = packs.open_pack(folder / record.path, record)
        except ArtifactError as error:
            problems.append(str(error))
            continue
        sound[0] += 1
        for row in pack.header.entries.values():
            cubins[1] += 1
            try:
                resolve.read_entry(pack, row)
            except ArtifactError as error:
                problems.append(str(error))
            else:
                cubins[0] += 1
    return sound, cubins


def verify(args: argparse.Namespace, at: Installation | None = None) -> int:
    """Check every shipped and cached kernel against its digest.

    Args:
        args: `json`.
        at: Installation to check; None takes this process's.

    Returns:
        0 all sound, 1 something differs.
    """
    problems: list[str] = []
    # A damaged pack must not keep the others from being looked at, so nothing is opened through `installation()`.
    folder, store = (packs.FOLDER, Store(settings())) if at is None else (at.packs_folder, at.store)
    sound, cubins = _verify_packs(folder, problems)
    good, broken = archive.verify(store)
    cached = [good, good + len(broken)]
    problems += [f"cache entry {path} is damaged. [E05]" for path in broken]
    codes = sorted(set(re.findall(r"\[(E\d\d)\]", "\n".join(problems))))
    data = {"result": "degraded" if problems else "ok", "codes": codes, "problems": problems}
    text = f"packs {sound[0]}/{sound[1]}, cubins {cubins[0]}/{cubins[1]}, cache {cached[0]}/{cached[1]}"
    text += ": " + ("digest, target and argument layout OK" if not problems else f"{len(problems)} problems")
    emit(args, data | {"packs": sound, "cubins": cubins, "cache": cached}, [text, *problems])
    return DEGRADED if problems else OK


def _content(store: Store, action: str) -> tuple[dict[str, Any], list[str]]:
    """What `cache info` and `cache list` print."""
    found = sorted((path, info.st_size) for path, info in store.entries())
    total = sum(size for _, size in found)
    if action == "list":
        return {"entries": [{"path": path, "bytes": size} for path, size in found]}, [
            f"{size:>9}  {path}" for path, size in found
        ]
    place = store.place
    data = {
        "path": place.path if place else None,
        "source": place.source if place else None,
        "filesystem": place.filesystem if place else None,
        "network": place.network if place else None,
        "entries": len(found),
        "bytes": total,
        "cap_bytes": store.cap_bytes,
        "refused": [{"path": p.path, "source": p.source, "reason": p.refused} for p in store.refused],
    }
    lines = [f"{name:<11} {value}" for name, value in data.items() if name != "refused"]
    return data, lines + [f"refused     {p.path} ({p.source}): {p.refused}" for p in store.refused]


def cache(args: argparse.Namespace, at: Installation | None = None) -> int:
    """Show and manage the cache of compiled kernels.

    Args:
        args: `action` with its own options, `json`.
        at: Installation whose cache it is; None takes this process's.

    Returns:
        0.

    Raises:
        ArtifactError: There is no usable cache directory (E20), or an archive is refused (E10).
    """
    store = at.store if at is not None else Store(settings())
    store.require()
    action = args.action
    data: dict[str, Any]
    if action == "path":
        path = store.place.path if store.place else ""
        data, lines = {"path": path}, [path]
    elif action in ("info", "list"):
        data, lines = _content(store, action)
    elif action in ("prune", "clear"):
        count, total = archive.prune(store, parse_size(args.max_size) if action == "prune" else 0)
        data, lines = {"removed": count, "bytes": total}, [f"removed {count} files, {total} bytes"]
    elif action == "export":
        count, digest = archive.export(store, args.file)
        data, lines = {"entries": count, "digest": digest}, [f"{count} entries", f"PRIME_KERNELS_CACHE_DIGEST={digest}"]
    else:
        count = archive.import_(store, args.file)
        data, lines = {"entries": count}, [f"{count} entries imported"]
    emit(args, data, lines)
    return OK
