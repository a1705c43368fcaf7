# SPDX-License-Identifier: Apache-2.0
"""Pre-warmed caches that are only read: baked into an image, owned by root, or shared by a cluster.

With PRIME_KERNELS_CACHE_DIGEST set, an entry counts only if the directory's MANIFEST.json has that digest and lists the
entry with its hash: then it does not matter who can write the directory. Without it, the directory must be safe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import lru_cache

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import entry, places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prime_kernels.loader.entry import CacheKey
    from prime_kernels.settings import Settings

LOG = logging.getLogger("prime_kernels.loader")
MANIFEST = "MANIFEST.json"


def manifest_bytes(hashes: dict[str, str]) -> bytes:
    """Canonical text of a cache manifest; its sha256 is what PRIME_KERNELS_CACHE_DIGEST names.

    Args:
        hashes: sha256 of every entry file, by path relative to the cache's root.
    """
    return json.dumps({"entries": hashes, "schema": 1}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def parse_manifest(data: bytes, digest: str | None) -> dict[str, str]:
    """Hashes by path of a cache manifest.

    Args:
        data: The file.
        digest: "sha256:..." that it must have; None accepts any.

    Raises:
        ArtifactError: Digest differs, or no manifest of this form (E10).
    """
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if digest is not None and found != digest:
        raise ArtifactError(
            f"digest of the cache manifest is {found}, need {digest}.",
            facts={"digest": found, "expected": digest},
            remedy="Export the cache again, or correct PRIME_KERNELS_CACHE_DIGEST.",
        )
    try:
        entries = json.loads(data)["entries"]
        good = all(isinstance(value, str) and entry.is_entry_path(path) for path, value in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ArtifactError(
            "the cache manifest is malformed.", facts={"digest": found}, remedy="Export the cache again."
        )
    return dict(entries)


@lru_cache(maxsize=16)
def _pinned(path: str, digest: str, uid: int) -> dict[str, str]:
    fd = places.open_dir_unchecked(path)
    try:
        return parse_manifest(places.read_file(fd, MANIFEST, uid, shared=False, any_owner=True), digest)
    finally:
        os.close(fd)


def _root(path: str, settings: Settings, uid: int) -> int:
    if settings.cache_digest:
        return places.open_dir_unchecked(path)
    place, fd = places.probe(
        "PRIME_KERNELS_CACHE_RO", path, uid, shared=settings.cache_shared, create=False, write=False
    )
    if fd is None:
        raise PermissionError(place.refused or "missing")
    return fd


def read(path: str, key: CacheKey, settings: Settings, uid: int) -> bytes | None:
    """Look for an entry in one read-only cache; nothing is locked, moved or written.

    Args:
        path: The cache's root.
        key: What is wanted.
        settings: Says whether a digest pins the content and whether group-writable directories are accepted.
        uid: User that must own it (root is accepted too) unless a digest pins it.

    Returns:
        The verified cubin; None if it is not there or anything is wrong, which is logged.
    """
    pinned = settings.cache_digest is not None
    try:
        expected = _pinned(path, settings.cache_digest, uid).get(key.path) if settings.cache_digest else None
        if pinned and expected is None:
            return None
        root = _root(path, settings, uid)
        try:
            if pinned:
                directory = places.open_dir_unchecked("/".join(key.directory), root)
            else:
                directory = places.open_below(root, key.directory, uid, shared=settings.cache_shared, create=False)
        finally:
            os.close(root)
        try:
            data = places.read_file(directory, key.file, uid, shared=settings.cache_shared, any_owner=pinned)
        finally:
            os.close(directory)
        if expected is not None and hashlib.sha256(data).hexdigest() != expected:
            raise ArtifactError(f"{key.path} differs from the manifest.", facts={"path": key.path})
        return entry.decode(data, key)
    except FileNotFoundError:
        return None
    except (OSError, ArtifactError) as err:
        LOG.warning("E20: read-only cache %s ignored for %s: %s", path, key.key, err)
        return None
