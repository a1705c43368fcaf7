# SPDX-License-Identifier: Apache-2.0
"""Which directories may hold a cache, and what the read-only and exported forms of it accept."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import archive, entry, locks, places, readonly
from prime_kernels.loader.arch import parse
from prime_kernels.loader.entry import CacheKey
from prime_kernels.loader.store import Store
from prime_kernels.settings import Settings
from tests.helpers.fake_cubin import fake_cubin

BUILD = f"{'ab' * 8}-nvrtc13.0.88-{'cd' * 4}"
UID = os.geteuid()


def key(name: str = "fake|b16") -> CacheKey:
    return CacheKey(BUILD, parse("sm_90a"), name)


def store(folder: Path, **settings: Any) -> Store:
    config = {"cache_dir": str(folder / "cache"), "xdg_runtime_dir": str(folder), "tmp_dir": str(folder)}
    return Store(Settings(**{**config, **settings}))


def filled(folder: Path, *names: str) -> Store:
    made = store(folder)
    for name in names or ("fake|b16",):
        assert made.publish(key(name), fake_cubin(code=name.encode().ljust(64, b"\0")), "test")
    return made


def refusal(path: Path, **options: Any) -> str | None:
    place, fd = places.probe("test", str(path), UID, **options)
    if fd is not None:
        os.close(fd)
    assert (fd is None) == (place.refused is not None)
    return place.refused


def test_candidates_come_in_the_documented_order() -> None:
    settings = Settings(cache_dir="/a", xdg_cache_home="/x", home="/h", tmp_dir="/t")
    assert places.candidates(settings, 7) == [
        ("PRIME_KERNELS_CACHE_DIR", "/a"),
        ("XDG_CACHE_HOME", "/x/prime-kernels"),
        ("~/.cache", "/h/.cache/prime-kernels"),
        ("temporary directory", "/t/prime-kernels-7"),
    ]
    assert places.candidates(Settings(), 7) == [("temporary directory", "/tmp/prime-kernels-7")]


@pytest.mark.parametrize(
    ("mode", "word"), [(0o777, "writable by everybody"), (0o1777, "writable by everybody"), (0o770, "its group")]
)
def test_a_directory_that_others_can_write_is_refused_with_owner_and_mode(mode: int, word: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    reason = refusal(path)
    assert reason is not None
    assert word in reason
    assert f"owner uid {UID}, mode {mode:04o}" in reason


def test_an_old_directory_is_checked_after_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(0o755)
    assert refusal(path) is None


def test_a_group_directory_is_accepted_only_when_sharing_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(0o2770)
    assert "PRIME_KERNELS_CACHE_SHARED=1" in (refusal(path) or "")
    assert refusal(path, shared=True) is None
    path.chmod(0o777)
    assert "writable by everybody" in (refusal(path, shared=True) or "")


def test_a_shared_cache_is_made_for_the_group_and_never_for_everybody(tmp_path: Path) -> None:
    made = store(tmp_path, cache_shared=True)
    made.publish(key(), fake_cubin(), "test")
    found = tmp_path / "cache" / key().path
    assert made.read(key()) is not None
    assert found.stat().st_mode & 0o007 == 0
    assert found.parent.stat().st_mode & 0o7777 == 0o2770


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    # Root may give a file away; anybody else asks as if he were another user.
    uid = UID + 1 if UID else UID
    if UID == 0:
        os.chown(path, 12345, 12345)
    place, fd = places.probe("test", str(path), uid)
    assert fd is None
    assert "owned by another user" in (place.refused or "")


def test_a_directory_below_one_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "open"
    above.mkdir()
    above.chmod(0o777)
    assert "open is writable by everybody" in (refusal(above / "cache") or "")
    above.chmod(0o1777)
    assert refusal(above / "cache") is None


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    assert refusal(tmp_path / "cache") is not None


@pytest.mark.parametrize("path", ["file/cache", "file"])
def test_a_path_through_a_file_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / path) is not None


def test_a_system_directory_that_cannot_be_written_is_refused() -> None:
    assert refusal(Path("/proc/self/cache")) is not None
    assert refusal(Path("/proc/self/cache"), create=False) is not None


def test_asking_without_making_changes_nothing(tmp_path: Path) -> None:
    assert refusal_without_fd(tmp_path / "a" / "b" / "cache") is None
    assert list(tmp_path.iterdir()) == []


def refusal_without_fd(path: Path) -> str | None:
    place, fd = places.probe("test", str(path), UID, create=False)
    assert fd is None
    return place.refused


def test_the_next_candidate_is_used_and_the_refusal_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    made = store(tmp_path, home=str(tmp_path))
    made.publish(key(), fake_cubin(), "test")
    assert made.require() == str(tmp_path / ".cache" / "prime-kernels")
    assert [place.path for place in made.refused] == [str(tmp_path / "cache")]


def test_the_file_system_of_a_directory_is_named() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        assert places.filesystem_of(fd) == ("0x9fa0", False)
    finally:
        os.close(fd)
    assert places._NETWORK[0x6969] == "nfs"


def test_locks_live_in_a_directory_of_our_own_on_this_node(tmp_path: Path) -> None:
    fd = locks.lock_dir(Settings(xdg_runtime_dir=str(tmp_path)), UID)
    assert fd is not None
    os.close(fd)
    assert (tmp_path / f"prime-kernels-{UID}").stat().st_mode & 0o777 == 0o700


# --- read-only caches


def test_a_read_only_cache_is_asked_first_and_never_changed(tmp_path: Path) -> None:
    filled(tmp_path / "ro")
    root = tmp_path / "ro" / "cache"
    before = sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*"))
    hit = store(tmp_path, cache_ro=("/nonexistent", str(root))).read(key())
    assert hit is not None
    assert (hit.origin, hit.where) == ("read-only cache", str(root))
    (root / key().path).write_bytes(b"damaged")
    assert store(tmp_path, cache_ro=(str(root),)).read(key()) is None
    assert [p for p, _ in before] == sorted(root.rglob("*"))


def test_a_read_only_cache_that_everybody_can_write_needs_a_digest(tmp_path: Path) -> None:
    made = filled(tmp_path / "ro")
    count, digest = archive.export(made, str(tmp_path / "a.pkcache"))
    assert count == 1
    target = store(tmp_path / "image")
    assert archive.import_(target, str(tmp_path / "a.pkcache")) == 1
    root = tmp_path / "image" / "cache"
    for path in [root, *root.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    assert store(tmp_path, cache_ro=(str(root),)).read(key()) is None
    pinned = store(tmp_path, cache_ro=(str(root),), cache_digest=digest)
    assert pinned.read(key()) is not None
    assert store(tmp_path, cache_ro=(str(root),), cache_digest=f"sha256:{'0' * 64}").read(key()) is None
    # A sound entry that the manifest does not list, and a listed one that was swapped for another sound one.
    other = root / key("other").path
    other.write_bytes(entry.encode(key("other"), fake_cubin(), "t"))
    assert pinned.read(key("other")) is None
    data = (root / key().path).read_bytes()
    (root / key().path).write_bytes(data.replace(b'"test"', b'"tesT"'))
    assert pinned.read(key()) is None


# --- prune, export, import


def test_pruning_removes_the_least_recently_used_first(tmp_path: Path) -> None:
    made = filled(tmp_path, "a", "b", "c")
    root, now = tmp_path / "cache", time.time()
    for age, name in enumerate("bca"):
        os.utime(root / key(name).path, (now - 1000 * age, now - 1000 * age))
    size = (root / key("a").path).stat().st_size
    count, total = archive.prune(made, 2 * size)
    assert (count, total) == (1, size)
    assert not (root / key("a").path).exists()
    assert archive.prune(made, 2 * size) == (0, 0)


def test_pruning_sweeps_what_a_crash_left_and_spares_foreign_files(tmp_path: Path) -> None:
    made = filled(tmp_path)
    root = tmp_path / "cache"
    stale, fresh = root / "v1" / BUILD / "tmp" / "1-a", root / "v1" / BUILD / "tmp" / "1-b"
    bad, foreign = root / f"{key('x').path}.bad", root / "notes.txt"
    for path in (stale, fresh, bad, foreign):
        path.write_text("x")
    os.utime(stale, (1, 1))
    archive.prune(made, 1 << 30)
    assert (stale.exists(), bad.exists(), fresh.exists(), foreign.exists()) == (False, False, True, True)
    archive.prune(made, 0)
    assert [path.name for path in root.rglob("*") if path.is_file()] == ["notes.txt"]


def test_the_cap_is_kept_when_something_is_built(tmp_path: Path) -> None:
    made = filled(tmp_path, "a")
    made.cap_bytes = 1
    made.get_or_build(key("b"), fake_cubin, "test")
    assert len(list(made.entries())) == 0


def test_an_export_imports_into_an_equal_cache_and_is_reproducible(tmp_path: Path) -> None:
    made = filled(tmp_path / "one", "a", "b", "c")
    paths = [str(tmp_path / name) for name in ("1.pkcache", "2.pkcache")]
    results = [archive.export(made, path) for path in paths]
    assert results[0] == results[1]
    assert results[0][0] == 3
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
    other = store(tmp_path / "two", cache_digest=results[0][1])
    assert archive.import_(other, paths[0]) == 3
    assert archive.verify(other) == (3, [])
    mine, theirs = made.read(key("b")), other.read(key("b"))
    assert mine is not None
    assert theirs is not None
    assert mine.cubin == theirs.cubin
    manifest = (tmp_path / "two" / "cache" / readonly.MANIFEST).read_bytes()
    assert f"sha256:{hashlib.sha256(manifest).hexdigest()}" == results[0][1]


def test_an_export_never_overwrites_a_file(tmp_path: Path) -> None:
    made = filled(tmp_path)
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        archive.export(made, str(tmp_path / "a"))
    assert (tmp_path / "a").read_text() == "mine"


def rewrite(source: Path, target: Path, change: Any) -> Path:
    """Copy an archive member by member through `change(name, data) -> [(TarInfo, data)]`."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            reader = old.extractfile(member)
            for info, data in change(member.name, reader.read() if reader else b""):
                info.size = len(data) if info.isreg() else 0
                new.addfile(info, io.BytesIO(data))
    return target


def named(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


ENTRY = key().path
HOSTILE: dict[str, Any] = {
    "absolute path": lambda n, d: [(named("/" + n), d)],
    "parent folder": lambda n, d: [(named("../" + n), d)],
    "foreign name": lambda n, d: [(named("readme.txt"), d)],
    "symbolic link": lambda n, d: [(named(n, type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")],
    "hard link": lambda n, d: [(named(n, type=tarfile.LNKTYPE, linkname=ENTRY), b"")],
    "device": lambda n, d: [(named(n, type=tarfile.CHRTYPE), b"")],
    "folder": lambda n, d: [(named(n, type=tarfile.DIRTYPE), b"")],
    "twice": lambda n, d: [(named(n), d), (named(n), d)],
    "without manifest": lambda n, d: [(named(n), d)] if n == ENTRY else [],
    "without entry": lambda n, d: [] if n == ENTRY else [(named(n), d)],
    "flipped byte": lambda n, d: [(named(n), d[:-1] + bytes([d[-1] ^ 1]))] if n == ENTRY else [(named(n), d)],
    "too large": lambda n, d: [(named(n), d + bytes(5 << 20))],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    archive.export(filled(tmp_path / "one"), str(tmp_path / "good.pkcache"))
    bad = rewrite(tmp_path / "good.pkcache", tmp_path / "bad.pkcache", HOSTILE[name])
    target = store(tmp_path / "two")
    target.cap_bytes = 4 << 20
    with pytest.raises(ArtifactError) as caught:
        archive.import_(target, str(bad))
    assert caught.value.code == "E10"
    assert caught.value.remedy
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("data", [b"", b"not a tar", b"\0" * 10240, b"x" * 10240])
def test_a_file_that_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        archive.import_(store(tmp_path), str(tmp_path / "x"))
    assert caught.value.code == "E10"


def test_an_archive_with_another_digest_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    archive.export(filled(tmp_path / "one"), str(tmp_path / "a.pkcache"))
    with pytest.raises(ArtifactError, match="digest of the cache manifest is"):
        archive.import_(store(tmp_path / "two", cache_digest=f"sha256:{'1' * 64}"), str(tmp_path / "a.pkcache"))


def test_verifying_names_the_damaged_entries(tmp_path: Path) -> None:
    made = filled(tmp_path, "a", "b")
    path = tmp_path / "cache" / key("a").path
    path.write_bytes(path.read_bytes()[:-1])
    assert archive.verify(made) == (1, [key("a").path])
