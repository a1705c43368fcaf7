# SPDX-License-Identifier: Apache-2.0
"""One lock per cache entry and node, so that the ranks of a job compile a missing kernel once.

The lock file lives on a file system of this node, never on the cache's own, which may be a network mount. The lock is
one of the OS: when its holder is killed the next process goes on at once. The file is never unlinked, because a waiter
could then hold a lock on a file that nobody else sees.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from typing import TypeVar

from prime_kernels.loader import places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from prime_kernels.loader.entry import CacheKey
    from prime_kernels.settings import Settings

LOG = logging.getLogger("prime_kernels.loader")
_POLL_S = 0.02
T = TypeVar("T")


def lock_dir(settings: Settings, uid: int) -> int | None:
    """Descriptor of a node-local directory of our own for lock files; None if there is none (then nobody locks)."""
    bases = [settings.xdg_runtime_dir] if settings.xdg_runtime_dir else []
    for base in [*bases, "/dev/shm", settings.tmp_dir]:
        place, fd = places.probe("locks", os.path.join(base, f"prime-kernels-{uid}"), uid)
        if fd is not None and not place.network:
            return fd
        if fd is not None:
            os.close(fd)
    return None


class NodeLock:
    """The lock of one entry, as a context manager. Without a root or a place for it, `wait` says "build" at once."""

    def __init__(self, root: str | None, key: CacheKey, settings: Settings, uid: int) -> None:
        self._key = key
        self._fd = None if root is None else self._open(root, settings, uid)

    def _open(self, root: str, settings: Settings, uid: int) -> int | None:
        directory = lock_dir(settings, uid)
        if directory is None:
            LOG.info("no node-local directory for locks: every process compiles for itself")
            return None
        name = hashlib.sha256(f"{os.path.realpath(root)}\0{self._key.path}".encode()).hexdigest() + ".lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=directory)
        except OSError as err:
            LOG.info("no lock for %s: %s", self._key.path, err)
            return None
        finally:
            os.close(directory)
        if os.fstat(fd).st_uid == uid:
            return fd
        os.close(fd)
        return None

    def __enter__(self) -> NodeLock:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._fd is not None:
            # Closing alone would leave the lock with a child that was forked meanwhile.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def wait(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """Wait for the lock or for `ready` to return something, whichever is first.

        Args:
            ready: Looks for the entry; asked at every poll, and once more under the lock.
            timeout_s: After so many seconds the caller builds without the lock.

        Returns:
            What `ready` found; None: build now.
        """
        end = time.monotonic() + timeout_s
        while self._fd is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            except OSError as err:
                LOG.info("no lock for %s: %s", self._key.path, err)
                return None
            else:
                return ready()
            found = ready()
            if found is not None:
                return found
            if time.monotonic() > end:
                LOG.warning("waited %.0f s for another process to build %s; building it too", timeout_s, self._key.key)
                return None
            time.sleep(_POLL_S)
        return None
