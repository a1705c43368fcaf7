# SPDX-License-Identifier: Apache-2.0
"""The kernel cache on disk: read with checks, build once per node, publish without ever failing the caller.

Safe by construction rather than by locking: an entry is written to a private file and linked into place, a builder
loads its own bytes, and a reader verifies the very bytes it returns. The lock only saves work.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import entry, locks, places
from prime_kernels.loader.entry import CacheKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from prime_kernels.loader.places import Place
    from prime_kernels.settings import Settings

LOG = logging.getLogger("prime_kernels.loader")
DEFAULT_CAP = 2 << 30
LOCK_TIMEOUT_S = 120.0
# Errors of link(2) that mean "this file system has no hard links", not "the entry is there" or "the disk is full".
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES}


@dataclass(frozen=True, slots=True)
class Hit:
    """A cubin and where it came from: "cache", "read-only cache" or "built", with the directory (empty if built)."""

    cubin: bytes
    origin: str
    where: str = ""


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    LOG.warning("%s", text)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@dataclass
class Store:
    """The cache of one process.

    Args:
        settings: Directories, sharing and digest.
        uid: Effective user.
        lock_timeout_s: Seconds to wait for another builder on this node before building too.
        cap_bytes: Soft size limit; the least recently used entries go first.

    Attributes:
        refused: Candidate directories that were not used, with reasons.
        place: The directory in use; None: memory only.
    """

    settings: Settings
    uid: int = field(default_factory=os.geteuid)
    lock_timeout_s: float = LOCK_TIMEOUT_S
    cap_bytes: int = DEFAULT_CAP
    refused: list[Place] = field(default_factory=list)
    place: Place | None = None
    _root: int | None = None
    _tried: int = 0  # 1: existing directories only, 2: with making one
    _write_off: bool = False
    _lock: Any = field(default_factory=threading.Lock)  # threads that load different kernels share a store

    def open(self, *, create: bool = False) -> int | None:
        """Choose a directory and open it.

        Args:
            create: Make it if it is missing; False changes nothing on disk.

        Returns:
            Its descriptor; None if every candidate was refused, or if it is missing and not made.
        """
        with self._lock:
            return self._choose(create)

    def _choose(self, create: bool) -> int | None:
        # A directory that was only missing may have been made by another process since; a refusal stands.
        if self._root is not None or (self.place is None and self._tried >= 1 + create):
            return self._root
        self._tried, self.refused, self.place = 1 + create, [], None
        for source, path in places.candidates(self.settings, self.uid):
            found, root = places.probe(source, path, self.uid, shared=self.settings.cache_shared, create=create)
            if found.refused is None:
                self.place, self._root = found, root
                break
            self.refused.append(found)
        # Only what the user asked for by name is worth a warning; a missing HOME is not.
        asked = [place for place in self.refused if place.source == "PRIME_KERNELS_CACHE_DIR"]
        for place in (asked or self.refused) if asked or self.place is None else ():
            instead = self.place.path if self.place else "memory only, nothing is kept for the next process"
            _warn_once(f"E20: cache {place.path} ({place.source}) refused: {place.refused}; using {instead}")
        return self._root

    def require(self) -> str:
        """Path of the cache directory.

        Raises:
            ArtifactError: Every candidate was refused (E20).
        """
        self.open()
        if self.place is None:
            reasons = "; ".join(f"{place.path} ({place.source}): {place.refused}" for place in self.refused)
            raise ArtifactError(
                f"there is no usable cache directory: {reasons}.",
                code="E20",
                facts={"refused": [(place.path, place.refused) for place in self.refused]},
                remedy="Set PRIME_KERNELS_CACHE_DIR to a directory that only you can write.",
            )
        return self.place.path

    def close(self) -> None:
        """Release the directory; the next use opens it again."""
        if self._root is not None:
            os.close(self._root)
        self._root, self._tried, self.place, self.refused = None, 0, None, []

    def read(self, key: CacheKey) -> Hit | None:
        """Look for an entry in the read-only caches, then in the cache. Anything wrong with it makes it a miss."""
        from prime_kernels.loader import readonly

        for path in self.settings.cache_ro:
            cubin = readonly.read(path, key, self.settings, self.uid)
            if cubin is not None:
                return Hit(cubin, "read-only cache", path)
        root = self.open()
        if root is None or self.place is None:
            return None
        cubin = self._read_own(root, key)
        return None if cubin is None else Hit(cubin, "cache", self.place.path)

    def _read_own(self, root: int, key: CacheKey) -> bytes | None:
        shared = self.settings.cache_shared
        try:
            directory = places.open_below(root, key.directory, self.uid, shared=shared, create=False)
        except FileNotFoundError:
            return None
        except OSError as err:
            LOG.warning("E20: cache directory of %s ignored: %s", key.path, err)
            return None
        try:
            data = places.read_file(directory, key.file, self.uid, shared=shared)
            return entry.decode(data, key)
        except FileNotFoundError:
            return None
        except (OSError, ArtifactError) as err:
            LOG.warning("E05: cache entry %s set aside as .bad: %s", key.path, err)
            with suppress(OSError):
                os.rename(key.file, key.file + ".bad", src_dir_fd=directory, dst_dir_fd=directory)
            return None
        finally:
            os.close(directory)

    def publish(self, key: CacheKey, cubin: bytes, tool: str) -> bool:
        """Keep a cubin for later processes. Never raises for a bad disk: one warning, then memory only.

        Returns:
            Whether an entry for `key` exists now.
        """
        root = self.open(create=True)
        if root is None or self._write_off:
            return False
        try:
            self._link(root, key, entry.encode(key, cubin, tool))
        except OSError as err:
            self._write_off = True
            where = self.place.path if self.place else "?"
            LOG.warning("E20: cannot write to cache %s: %s; this process keeps kernels in memory only", where, err)
            return False
        return True

    def _link(self, root: int, key: CacheKey, data: bytes) -> None:
        shared, mode = self.settings.cache_shared, 0o660 if self.settings.cache_shared else 0o600
        below = (key.directory, (entry.SCHEMA, key.build, "tmp"))
        final, temp = (places.open_below(root, names, self.uid, shared=shared, create=True) for names in below)
        name = f"{os.getpid()}-{os.urandom(8).hex()}"
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=temp)
            try:
                _write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.link(name, key.file, src_dir_fd=temp, dst_dir_fd=final, follow_symlinks=False)
            except FileExistsError:
                pass
            except OSError as err:
                if err.errno not in _NO_LINKS:
                    raise
                os.replace(name, key.file, src_dir_fd=temp, dst_dir_fd=final)
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=temp)
            os.close(temp)
            os.close(final)

    def keep_log(self, key: str, text: str) -> str | None:
        """Write a compiler log next to the entries, readable by the owner only; its path, or None without a cache."""
        root = self.open(create=True)
        if root is None or self.place is None:
            return None
        name = f"fail-{hashlib.sha256(key.encode()).hexdigest()[:12]}-{os.getpid()}.log"
        try:
            below, shared = (entry.SCHEMA, "logs"), self.settings.cache_shared
            logs = places.open_below(root, below, self.uid, shared=shared, create=True)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(name, flags, 0o600, dir_fd=logs)
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(text)
            finally:
                os.close(logs)
        except OSError as err:
            LOG.info("compiler log not kept: %s", err)
            return None
        return os.path.join(self.place.path, entry.SCHEMA, "logs", name)

    def builds(self, src_fp: str, hdr_fp: str) -> list[str]:
        """Build ids in any of the caches that hold what some NVRTC made of these sources; newest NVRTC first."""
        roots = list(self.settings.cache_ro)
        if self.open() is not None and self.place is not None:
            roots.append(self.place.path)
        found: set[str] = set()
        for root in roots:
            with suppress(OSError):
                found.update(os.listdir(os.path.join(root, entry.SCHEMA)))
        same = [name for name in found if name.startswith(f"{src_fp}-nvrtc") and name.endswith(f"-{hdr_fp}")]
        return sorted((name for name in same if entry.nvrtc_of(name)), key=entry.nvrtc_of, reverse=True)

    def get_or_build(self, key: CacheKey, build: Callable[[], bytes], tool: str) -> Hit:
        """Return the entry for `key`, or build it: one process of this node builds, the others wait for its entry.

        Args:
            key: What is wanted.
            build: Compiles and returns the cubin; what it raises goes to the caller.
            tool: What `build` uses, kept in the entry.

        Returns:
            The cubin. A builder gets its own bytes and never reads back what it published.
        """
        found = self.read(key)
        if found is not None:
            return found
        root = None if self.open(create=True) is None or self.place is None else self.place.path
        with locks.NodeLock(root, key, self.settings, self.uid) as lock:
            found = lock.wait(lambda: self.read(key), self.lock_timeout_s)
            if found is not None:
                return found
            cubin = build()
            if self.publish(key, cubin, tool):
                from prime_kernels.loader.archive import prune

                prune(self, self.cap_bytes)
            return Hit(cubin, "built")

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """(path relative to the root, stat) of every entry, in no order; nothing is verified."""
        from prime_kernels.loader.archive import walk

        root = self.open()
        if root is not None:
            for path, info, _ in walk(root):
                if entry.is_entry_path(path):
                    yield path, info
