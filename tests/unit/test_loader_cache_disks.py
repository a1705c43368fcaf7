# SPDX-License-Identifier: Apache-2.0
"""The kernel cache under a whole node's ranks, on a disk that is really full, and on a mount that behaves like NFS."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_kernels.loader import archive, entry, locks, places
from prime_kernels.loader.arch import parse
from prime_kernels.loader.entry import CacheKey
from prime_kernels.loader.store import Store
from prime_kernels.settings import Settings
from tests.helpers.fake_cubin import fake_cubin

ROOT = Path(__file__).resolve().parents[2]
BUILD = f"{'ab' * 8}-nvrtc13.0.88-{'cd' * 4}"

COMMON = """
import hashlib, json, os, sys, time
from prime_kernels.loader.arch import parse
from prime_kernels.loader.entry import CacheKey
from prime_kernels.loader.store import Store
from prime_kernels.settings import Settings
from tests.helpers.fake_cubin import fake_cubin

folder, build_id = sys.argv[1], sys.argv[2]

def key(name):
    return CacheKey(build_id, parse("sm_90a"), name)

def cubin(name, size=64):
    return fake_cubin(code=name.encode().ljust(size, b"\\0"))

def store():
    return Store(Settings(cache_dir=folder + "/cache", xdg_runtime_dir=folder, tmp_dir=folder))
"""

# Processes are forked from one that has imported the loader, so that a hundred of them start within a blink.
STAMPEDE = (
    COMMON
    + """
COUNT, KEYS, BUILD_S = 100, ("a", "b", "c"), 0.4

def rank(number, gate, out):
    os.read(gate, 1)
    begin, rows = time.monotonic(), []
    for name in KEYS[number % 3:] + KEYS[:number % 3]:
        def build():
            time.sleep(BUILD_S)
            return cubin(name)
        hit = store().get_or_build(key(name), build, "test")
        rows.append([name, hit.origin, hit.cubin == cubin(name)])
    os.write(out, (json.dumps([time.monotonic() - begin, rows]) + "\\n").encode())

gate, go = os.pipe()
results, out = os.pipe()
children = []
for number in range(COUNT):
    pid = os.fork()
    if not pid:
        try:
            rank(number, gate, out)
        finally:
            os._exit(0)
    children.append(pid)
os.close(out)
os.write(go, b"x" * COUNT)
with os.fdopen(results) as file:
    sys.stdout.writelines(file)
for pid in children:
    os.waitpid(pid, 0)
"""
)

FULL_DISK = (
    COMMON
    + """
made = store()
kept = []
for number in range(40):
    name = f"k{number}"
    hit = made.get_or_build(key(name), lambda: cubin(name, 4000), "test")
    assert hit.cubin == cubin(name, 4000)
    again = store().read(key(name))
    kept.append(again is not None)
    assert again is None or again.cubin == hit.cubin
files = [os.path.join(at, name) for at, _, names in os.walk(folder + "/cache") for name in names]
print(json.dumps({"kept": kept, "files": len(files), "left": os.statvfs(folder + "/cache").f_bavail}))
"""
)


def key(name: str = "fake|b16") -> CacheKey:
    return CacheKey(BUILD, parse("sm_90a"), name)


def store(folder: Path) -> Store:
    return Store(Settings(cache_dir=str(folder / "cache"), xdg_runtime_dir=str(folder), tmp_dir=str(folder)))


def run(code: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*before, sys.executable, "-c", code, str(folder), BUILD]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_hundred_processes_that_start_cold_build_every_key_once(tmp_path: Path) -> None:
    done = run(STAMPEDE, tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 100
    rows = [row for _, ranks_rows in found for row in ranks_rows]
    assert all(sound for _, _, sound in rows)
    assert sorted(name for name, origin, _ in rows if origin == "built") == ["a", "b", "c"]
    assert {origin for _, origin, _ in rows} == {"built", "cache"}
    # Three builds of 0.4 s one after the other at worst, and two seconds of patience.
    assert max(seconds for seconds, _ in found) < 3 * 0.4 + 2.0
    assert archive.verify(store(tmp_path)) == (3, [])
    assert not list((tmp_path / "cache").rglob("*.bad"))


def test_a_disk_that_fills_up_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o size=64k,mode=700 none "{tmp_path}/cache" && exec "$@"'
    if run("", tmp_path, "unshare", "-rm", "sh", "-c", mount, "sh").returncode != 0:
        pytest.skip("no right to mount a tmpfs here")
    done = run(FULL_DISK, tmp_path, "unshare", "-rm", "sh", "-c", mount, "sh")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    written = found["kept"].index(False)
    assert 2 <= written < 20
    assert found["kept"] == [True] * written + [False] * (40 - written)
    assert found["files"] == written  # no half-written entry and nothing in tmp/
    warnings = [line for line in done.stderr.splitlines() if "E20" in line]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]


@pytest.fixture
def nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory is on a mount that calls itself NFS; a lock on anything below it fails the test."""
    cache = str(tmp_path / "cache")
    local, flock = places.filesystem_of, fcntl.flock

    def where(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def filesystem_of(fd: int) -> tuple[str, bool]:
        return ("nfs", True) if where(fd).startswith(cache) else local(fd)

    def watched(fd: Any, operation: int) -> None:
        assert not where(fd).startswith(cache), "a lock on the shared mount"
        flock(fd, operation)

    monkeypatch.setattr(places, "filesystem_of", filesystem_of)
    monkeypatch.setattr(locks.fcntl, "flock", watched)
    return tmp_path


def test_on_a_network_mount_locks_stay_on_the_node(nfs: Path) -> None:
    made = store(nfs)
    assert made.get_or_build(key(), fake_cubin, "test").origin == "built"
    assert made.place is not None
    assert (made.place.filesystem, made.place.network) == ("nfs", True)
    assert list(nfs.glob("prime-kernels-*/*.lock"))
    assert not list((nfs / "cache").rglob("*.lock"))
    assert store(nfs).get_or_build(key(), lambda: pytest.fail("it is there"), "test").origin == "cache"


def test_a_node_without_a_local_place_builds_without_a_lock(nfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "filesystem_of", lambda fd: ("nfs", True))
    monkeypatch.setattr(locks.fcntl, "flock", lambda *_: pytest.fail("a lock on a network mount"))
    assert store(nfs).get_or_build(key(), fake_cubin, "test").origin == "built"
    assert store(nfs).read(key()) is not None


def test_a_builder_needs_nothing_back_from_a_mount_that_hides_what_it_wrote(
    nfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client remembers for seconds that a name was absent, also after another node made it."""

    def hidden(*_: Any, **__: Any) -> bytes:
        raise FileNotFoundError(errno.ENOENT, "not seen yet")

    monkeypatch.setattr(places, "read_file", hidden)
    other = fake_cubin(code=b"\2" * 64)
    assert store(nfs).get_or_build(key(), fake_cubin, "test").cubin == fake_cubin()
    assert store(nfs).get_or_build(key(), lambda: other, "test").cubin == other
    monkeypatch.undo()
    hit = store(nfs).read(key())
    assert hit is not None
    assert hit.cubin == fake_cubin()  # the first one stays


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ESTALE, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_where_locking_does_not_work_every_process_builds_for_itself(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def refuse(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            tries.append(fd)
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert store(tmp_path).get_or_build(key(), fake_cubin, "test").origin == "built"
    assert len(tries) == 1
    assert store(tmp_path).read(key()) is not None


def test_a_stale_handle_is_a_miss(nfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = store(nfs)
    made.publish(key(), fake_cubin(), "test")

    def stale(*_: Any, **__: Any) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "prime_kernels.loader"):
        patch.setattr(places, "read_file", stale)
        assert made.get_or_build(key(), fake_cubin, "test").origin == "built"
    assert entry.is_entry_path(key().path)
