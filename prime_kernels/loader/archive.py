# SPDX-License-Identifier: Apache-2.0
"""Whole-cache operations: walk, prune, clear, export to one file, import from it.

An archive is an uncompressed tar of MANIFEST.json and entry files. Members are read, checked and published one by one;
nothing is ever extracted by name.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
import time
from contextlib import suppress

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import entry, places, readonly
from prime_kernels.loader.readonly import MANIFEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from prime_kernels.loader.store import Store

_STALE_TEMP_S = 3600.0
_OWN_FILE = re.compile(r"v[0-9]+/(?:logs/[^/]+|[^/]+/tmp/[^/]+|[^/]+/[^/]+/[0-9a-f]{64}\.pkc(?:\.bad)?)")


def walk(root: int) -> Iterator[tuple[str, os.stat_result, int]]:
    """(path below the root, stat, open directory it is in) of every regular file; links are not followed."""
    for where, _, files, directory in os.fwalk(".", dir_fd=root, follow_symlinks=False):
        for name in files:
            with suppress(FileNotFoundError):
                info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    yield os.path.normpath(os.path.join(where, name)), info, directory


def prune(store: Store, max_bytes: int) -> tuple[int, int]:
    """Remove the least recently used entries until `max_bytes` are left, and what crashed processes left behind.

    Args:
        store: The cache.
        max_bytes: Bytes of entries to keep; 0 removes all.

    Returns:
        Files and bytes removed. Only files that the cache itself names are ever removed.
    """
    root = store.open()
    if root is None:
        return 0, 0
    keep, remove, now = [], [], time.time()
    for path, info, _ in walk(root):
        if _OWN_FILE.fullmatch(path) is None:
            continue
        if entry.is_entry_path(path):
            keep.append((max(info.st_atime, info.st_mtime), info.st_size, path))
        elif path.endswith(".bad") or max_bytes == 0 or now - info.st_mtime > _STALE_TEMP_S:
            remove.append((path, info.st_size))
    excess = sum(size for _, size, _ in keep) - max_bytes
    for _, size, path in sorted(keep):
        if excess <= 0:
            break
        remove.append((path, size))
        excess -= size
    return _remove(root, remove)


def _remove(root: int, files: list[tuple[str, int]]) -> tuple[int, int]:
    count = total = 0
    for path, size in files:
        with suppress(OSError):
            os.unlink(path, dir_fd=root)
            count, total = count + 1, total + size
        for parent in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
            with suppress(OSError):  # not empty, as a rule
                os.rmdir(parent, dir_fd=root)
    return count, total


def _read_all(store: Store) -> dict[str, bytes]:
    """Every sound entry by path; unsound ones are left out."""
    root, found, shared = store.open(), {}, store.settings.cache_shared
    if root is None:
        return {}
    for path in sorted(path for path, _ in store.entries()):
        directory, name = path.rsplit("/", 1)
        with suppress(OSError, ArtifactError):
            fd = places.open_below(root, directory.split("/"), store.uid, shared=shared, create=False)
            try:
                data = places.read_file(fd, name, store.uid, shared=shared)
            finally:
                os.close(fd)
            if entry.split(data)[0].path == path:
                found[path] = data
    return found


def verify(store: Store) -> tuple[int, list[str]]:
    """Number of sound entries, and the paths of unsound ones."""
    sound = _read_all(store)
    return len(sound), sorted(path for path, _ in store.entries() if path not in sound)


def export(store: Store, path: str) -> tuple[int, str]:
    """Write every sound entry and a manifest to one archive; the same cache gives the same bytes.

    Args:
        store: The cache.
        path: File to write; it must not exist.

    Returns:
        Number of entries, and the manifest's digest "sha256:..." for PRIME_KERNELS_CACHE_DIGEST.

    Raises:
        OSError: The file exists or cannot be written.
    """
    files = _read_all(store)
    manifest = readonly.manifest_bytes({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    with open(path, "xb") as out, tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in {MANIFEST: manifest, **files}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    return len(files), f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def _refuse(path: str, why: str) -> ArtifactError:
    return ArtifactError(
        f"cache archive {path} refused: {why}.",
        facts={"archive": path, "problem": why},
        remedy="Make a new one with `prime-kernels cache export`.",
    )


def _members(path: str, cap_bytes: int) -> dict[str, bytes]:
    """All files of an archive that follows the rules."""
    found: dict[str, bytes] = {}
    total = 0
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                name = member.name
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise _refuse(path, f"member {name[:100]!r} is no plain file")
                if name != MANIFEST and not entry.is_entry_path(name):
                    raise _refuse(path, f"member name {name[:100]!r} is not one of a cache")
                if name in found:
                    raise _refuse(path, f"member {name[:100]!r} occurs twice")
                total += member.size
                if total > cap_bytes:
                    raise _refuse(path, f"it holds more than {cap_bytes} bytes")
                reader = tar.extractfile(member)
                found[name] = reader.read() if reader else b""
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as err:
        raise _refuse(path, f"not a readable tar file ({err})") from err
    return found


def import_(store: Store, path: str) -> int:
    """Check an archive completely, then publish its entries and its manifest.

    Args:
        store: Cache to fill. Its `cap_bytes` bounds the archive, its settings' digest must match if one is set.
        path: File written by `export`.

    Returns:
        Number of entries.

    Raises:
        ArtifactError: Anything in it breaks a rule, or the cache cannot be written (E10, E20); nothing is kept then.
        OSError: The file cannot be read.
    """
    files = _members(path, store.cap_bytes)
    if MANIFEST not in files:
        raise _refuse(path, "it has no MANIFEST.json")
    manifest = files.pop(MANIFEST)
    hashes = readonly.parse_manifest(manifest, store.settings.cache_digest)
    if {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} != hashes:
        raise _refuse(path, "its files differ from its manifest")
    checked = []
    for name, data in files.items():
        key, tool, cubin = entry.split(data)
        if key.path != name:
            raise _refuse(path, f"member {name} holds another key")
        checked.append((key, cubin, tool))
    where = store.require()
    for key, cubin, tool in checked:
        if not store.publish(key, cubin, tool):
            raise ArtifactError(
                f"cannot write to the cache {where}.",
                code="E20",
                facts={"cache": where},
                remedy="Free some space, or set PRIME_KERNELS_CACHE_DIR to another directory.",
            )
    _publish_manifest(store, manifest)
    return len(checked)


def _publish_manifest(store: Store, manifest: bytes) -> None:
    root = store.open()
    if root is None:
        return
    name = f".{MANIFEST}-{os.getpid()}-{os.urandom(4).hex()}"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=root)
    with os.fdopen(fd, "wb") as file:
        file.write(manifest)
    os.replace(name, MANIFEST, src_dir_fd=root, dst_dir_fd=root)
