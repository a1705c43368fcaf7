# SPDX-License-Identifier: Apache-2.0
"""Where the kernel cache and its locks may live, and which directories are refused and why.

A cubin is code with the rights of the process, so a directory that somebody else can write is no place for one. Checks
are made on opened descriptors, never on a path that is opened afterwards.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from prime_kernels.settings import Settings

MAX_FILE_BYTES = 64 << 20
_TOUCH_AFTER_S = 86400.0
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# f_type of statfs(2). On these, flock may be emulated, slow or local to a node, so no lock is ever taken there.
_NETWORK = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFE534D42: "smb2",
    0xFF534D42: "cifs",
    0x0BD00BD0: "lustre",
    0x19830326: "beegfs",
    0x47504653: "gpfs",
    0x00C36400: "ceph",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x5346414F: "afs",
}
_LOCAL = {0xEF53: "ext", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x01021994: "tmpfs", 0x794C7630: "overlay"}
_LOCAL |= {0x2FC12FC1: "zfs", 0x858458F6: "ramfs"}


@dataclass(frozen=True, slots=True)
class Place:
    """One candidate directory for the cache.

    Attributes:
        path: Absolute path.
        source: What proposed it: a variable's name, "~/.cache" or "temporary directory".
        refused: Why it is not used; None if it is usable.
        filesystem: Short name of its file system; "" if unknown.
        network: Whether the file system is shared between hosts.
    """

    path: str
    source: str
    refused: str | None = None
    filesystem: str = ""
    network: bool = False


def candidates(settings: Settings, uid: int) -> list[tuple[str, str]]:
    """(source, path) of every place to try, in order."""
    found = []
    if settings.cache_dir:
        found.append(("PRIME_KERNELS_CACHE_DIR", os.path.abspath(settings.cache_dir)))
    if settings.xdg_cache_home:
        found.append(("XDG_CACHE_HOME", os.path.join(settings.xdg_cache_home, "prime-kernels")))
    if settings.home:
        found.append(("~/.cache", os.path.join(settings.home, ".cache", "prime-kernels")))
    found.append(("temporary directory", os.path.join(settings.tmp_dir, f"prime-kernels-{uid}")))
    return found


def _rights_problem(info: os.stat_result, uid: int, *, shared: bool, final: bool) -> str | None:
    """Why a directory with this stat is refused: as an ancestor of the cache, or (`final`) as part of it."""
    mode = stat.S_IMODE(info.st_mode)
    what = f"owner uid {info.st_uid}, mode {mode:04o}"
    group_shared = shared and mode & stat.S_IWGRP
    if info.st_uid not in (uid, 0) and not (final and group_shared):
        return f"owned by another user ({what})"
    if mode & stat.S_IWOTH and (final or not mode & stat.S_ISVTX):
        return f"writable by everybody ({what})"
    if final and mode & stat.S_IWGRP and not shared:
        return f"writable by its group ({what}); chmod 700 it, or set PRIME_KERNELS_CACHE_SHARED=1 if that is meant"
    return None


def ancestors_problem(path: str, uid: int) -> str | None:
    """Why a directory above `path` makes it unsafe, or None. Components that do not exist yet are not looked at."""
    parent = os.path.realpath(os.path.dirname(path))
    while True:
        try:
            problem = _rights_problem(os.stat(parent), uid, shared=False, final=False)
        except FileNotFoundError:
            problem = None
        except OSError as err:
            return f"{parent}: {err.strerror}"
        if problem:
            return f"{parent} is {problem}"
        if parent == os.path.dirname(parent):
            return None
        parent = os.path.dirname(parent)


def check_fd(fd: int, path: str, uid: int, *, shared: bool) -> None:
    """Refuse an opened directory of the cache that others could write.

    Raises:
        PermissionError: It is foreign or writable by others; the text names owner and mode.
    """
    problem = _rights_problem(os.fstat(fd), uid, shared=shared, final=True)
    if problem:
        raise PermissionError(f"{path} is {problem}")


def open_dir(parent: int | None, name: str, uid: int, *, shared: bool, create: bool) -> int:
    """Open (and if asked make) one directory of the cache without following a link.

    Args:
        parent: Descriptor that `name` is relative to; None if `name` is a path of its own.
        name: Directory name or path.
        uid: User that must own it (root is accepted too).
        shared: Whether group-writable directories are accepted and made.
        create: Make it with mode 0700 (2770 if shared) when it is missing.

    Returns:
        A descriptor for the caller to close.

    Raises:
        OSError: It is missing, a link, no directory, foreign, or writable by others.
    """
    if create:
        try:
            os.mkdir(name, 0o2770 if shared else 0o700, dir_fd=parent)
        except FileExistsError:
            pass
        else:
            # mkdir applies the umask, which may also have taken bits that sharing needs.
            if shared:
                os.chmod(name, 0o2770, dir_fd=parent)
    fd = os.open(name, _DIR_FLAGS, dir_fd=parent)
    try:
        check_fd(fd, name, uid, shared=shared)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_below(root: int, names: Iterable[str], uid: int, *, shared: bool, create: bool) -> int:
    """Open a chain of directories below an open one, each checked as `open_dir` does."""
    fd = os.dup(root)
    for name in names:
        try:
            below = open_dir(fd, name, uid, shared=shared, create=create)
        finally:
            os.close(fd)
        fd = below
    return fd


def filesystem_of(fd: int) -> tuple[str, bool]:
    """Name of the file system under an open descriptor and whether hosts share it; ("", False) if that is unknown."""
    import ctypes

    buffer = ctypes.create_string_buffer(256)
    try:
        fstatfs = ctypes.CDLL(None).fstatfs
    except (OSError, AttributeError):
        return "", False
    if fstatfs(ctypes.c_int(fd), buffer) != 0:
        return "", False
    kind = struct.unpack_from("@l", buffer)[0] & 0xFFFFFFFF
    return _NETWORK.get(kind) or _LOCAL.get(kind, f"0x{kind:x}"), kind in _NETWORK


def _missing(source: str, path: str) -> Place:
    """What `probe` would say about a path that does not exist, without making it."""
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK):
        return Place(path, source, None, "not made yet")
    return Place(path, source, f"cannot be made: {above} is not a writable directory")


def probe(
    source: str, path: str, uid: int, *, shared: bool = False, create: bool = True, write: bool = True
) -> tuple[Place, int | None]:
    """Try one candidate: check it and everything above it, and whether files can be made in it.

    Args:
        source: Goes into the result.
        path: Absolute path of the directory.
        uid: User that must own it (root is accepted too).
        shared: Accept a directory that its group can write.
        create: Make it if it is missing; False changes nothing on disk.
        write: Refuse it if files cannot be made in it.

    Returns:
        The place (with the reason if refused) and an open descriptor (None if refused, or if missing and not made).
    """
    problem = ancestors_problem(path, uid)
    if problem:
        return Place(path, source, problem), None
    if not create and not os.path.lexists(path):
        return _missing(source, path), None
    try:
        if create:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = open_dir(None, path, uid, shared=shared, create=create)
    except OSError as err:
        return Place(path, source, str(err)), None
    # access(2) knows modes and read-only mounts; what it cannot know (quota, full disk) shows when an entry is written.
    if write and not os.access(path, os.W_OK | os.X_OK):
        os.close(fd)
        return Place(path, source, "not writable"), None
    name, network = filesystem_of(fd)
    return Place(path, source, None, name, network), fd


def open_dir_unchecked(path: str, parent: int | None = None) -> int:
    """Open a directory whose content is pinned by a digest, so that owner and mode do not matter."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)


def read_file(directory: int, name: str, uid: int, *, shared: bool, any_owner: bool = False) -> bytes:
    """Read one cache file without following a link.

    Args:
        directory: Open directory.
        name: File name in it.
        uid: User that must own it (root is accepted too).
        shared: Accept other owners and group-writable files.
        any_owner: Accept every owner and mode; only for content whose digest is known from elsewhere.

    Returns:
        All bytes.

    Raises:
        OSError: Missing, a link, no regular file, foreign, writable by others, empty or larger than `MAX_FILE_BYTES`.
    """
    fd = os.open(name, _READ_FLAGS, dir_fd=directory)
    try:
        info = os.fstat(fd)
        foreign = info.st_uid not in (uid, 0) and not shared
        writable = info.st_mode & (stat.S_IWOTH if shared else stat.S_IWOTH | stat.S_IWGRP)
        if not stat.S_ISREG(info.st_mode):
            raise PermissionError(f"{name} is no regular file")
        if (foreign or writable) and not any_owner:
            raise PermissionError(f"{name} is owned by uid {info.st_uid} with mode {stat.S_IMODE(info.st_mode):04o}")
        if not 0 < info.st_size <= MAX_FILE_BYTES:
            raise PermissionError(f"{name} has {info.st_size} bytes")
        parts, left = [], info.st_size + 1
        while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        # Last use is what pruning goes by; mounts often do not keep access times.
        if time.time() - info.st_mtime > _TOUCH_AFTER_S:
            with suppress(OSError):
                os.utime(fd)
        return b"".join(parts)
    finally:
        os.close(fd)
