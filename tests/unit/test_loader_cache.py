# SPDX-License-Identifier: Apache-2.0
"""The kernel cache: what is read is what was built, races build once, and a bad disk never stops a job."""

from __future__ import annotations

import errno
import hashlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import entry, locks, places
from prime_kernels.loader.arch import parse
from prime_kernels.loader.entry import CacheKey
from prime_kernels.loader.store import Store
from prime_kernels.settings import Settings
from tests.helpers.fake_cubin import fake_cubin

BUILD = f"{'ab' * 8}-nvrtc13.0.88-{'cd' * 4}"
SPAWN = multiprocessing.get_context("spawn")


def key(name: str = "fake|b16", arch: str = "sm_90a", build: str = BUILD) -> CacheKey:
    return CacheKey(build, parse(arch), name)


def store(folder: Path, **settings: Any) -> Store:
    config = {"cache_dir": str(folder / "cache"), "xdg_runtime_dir": str(folder), "tmp_dir": str(folder)}
    return Store(Settings(**{**config, **settings}))


def file_of(folder: Path, at: CacheKey | None = None) -> Path:
    return folder / "cache" / (at or key()).path


def filled(folder: Path) -> Store:
    made = store(folder)
    assert made.publish(key(), fake_cubin(), "test")
    return made


def test_what_was_published_is_read_back_with_its_place(tmp_path: Path) -> None:
    hit = filled(tmp_path).read(key())
    assert hit is not None
    assert (hit.cubin, hit.origin, hit.where) == (fake_cubin(), "cache", str(tmp_path / "cache"))


def test_a_directory_is_made_when_something_is_written_and_not_before(tmp_path: Path) -> None:
    made = store(tmp_path)
    assert made.read(key()) is None
    assert list(made.entries()) == []
    assert not (tmp_path / "cache").exists()
    made.publish(key(), fake_cubin(), "test")
    assert [path for path, _ in made.entries()] == [key().path]


def test_a_directory_that_another_process_made_meanwhile_is_found(tmp_path: Path) -> None:
    early = store(tmp_path)
    assert early.read(key()) is None
    filled(tmp_path)
    assert early.read(key()) is not None


def test_directories_and_files_are_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        filled(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "cache").rglob("*")}
    assert set(modes.values()) == {0o700, 0o600}
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: data.replace(b"sm_90a", b"sm_91a"),
        lambda data: data.replace(b'"fake|b16"', b'"fake|b17"'),
        lambda data: data.replace(b"nvrtc13", b"nvrtc14"),
        lambda data: b"{" + data,
        lambda data: b"[" * 4000 + data,
        lambda data: entry.encode(key(), fake_cubin(sm=100), "test"),
        lambda data: entry.encode(key("other"), fake_cubin(), "test"),
        lambda data: entry.encode(key(), b"no cubin at all" * 9, "test"),
    ],
    ids=[
        "one byte short",
        "half",
        "empty",
        "one byte more",
        "flipped byte",
        "another arch",
        "another key",
        "another compiler",
        "bad json",
        "deep json",
        "cubin of another gpu",
        "renamed file",
        "no cubin",
    ],
)
def test_a_damaged_entry_is_a_miss_is_set_aside_and_is_built_again(
    damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = filled(tmp_path)
    path = file_of(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "prime_kernels.loader"):
        assert made.read(key()) is None
    assert len([record for record in caplog.records if "set aside" in record.message]) == 1
    assert not path.exists()
    assert path.with_name(path.name + ".bad").exists()
    assert made.get_or_build(key(), fake_cubin, "test").origin == "built"
    hit = made.read(key())
    assert hit is not None
    assert hit.cubin == fake_cubin()


def test_a_link_in_place_of_an_entry_is_not_followed(tmp_path: Path) -> None:
    made = filled(tmp_path)
    path, elsewhere = file_of(tmp_path), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert made.read(key()) is None
    assert elsewhere.exists()


def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    made = filled(tmp_path)
    below = tmp_path / "cache" / "v1"
    below.rename(tmp_path / "elsewhere")
    below.symlink_to(tmp_path / "elsewhere")
    assert made.read(key()) is None
    assert not made.publish(key("new"), fake_cubin(), "test")


@pytest.mark.parametrize("mode", [0o602, 0o620], ids=["everybody", "the group"])
def test_an_entry_that_others_can_write_is_a_miss(mode: int, tmp_path: Path) -> None:
    made = filled(tmp_path)
    file_of(tmp_path).chmod(mode)
    assert made.read(key()) is None


def test_a_fifo_in_place_of_an_entry_does_not_block(tmp_path: Path) -> None:
    made = filled(tmp_path)
    file_of(tmp_path).unlink()
    os.mkfifo(file_of(tmp_path), 0o600)
    assert made.read(key()) is None


@pytest.mark.parametrize("text", ["", "a b", "a/b", "../x", "a\n", "ä", "x" * 201])
def test_a_key_outside_the_charset_never_reaches_the_disk(text: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        key(text)
    assert caught.value.code == "E05"


def test_a_key_knows_nothing_of_paths_and_everything_of_arch_and_compiler() -> None:
    names = {key(a, b, c).path for a in ("x", "y") for b in ("sm_90a", "sm_100a") for c in (BUILD, BUILD[:-1] + "0")}
    assert len(names) == 8
    assert all(entry.is_entry_path(name) for name in names)
    assert not entry.is_entry_path("v1/../x")


def test_a_winner_s_entry_is_kept_and_the_loser_uses_its_own_bytes(tmp_path: Path) -> None:
    winner, loser = filled(tmp_path), store(tmp_path)

    def late() -> bytes:
        return fake_cubin(code=b"\1" * 64)

    file_of(tmp_path).rename(tmp_path / "kept")
    root = loser.open(create=True)
    assert root is not None
    hit = loser.get_or_build(key(), lambda: (tmp_path / "kept").rename(file_of(tmp_path)) and late(), "test")
    assert (hit.cubin, hit.origin) == (late(), "built")
    found = winner.read(key())
    assert found is not None
    assert found.cubin == fake_cubin()


def test_where_links_are_refused_the_entry_is_renamed_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert filled(tmp_path).read(key()) is not None
    assert list((tmp_path / "cache" / "v1" / BUILD / "tmp").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_full_or_read_only_disk_means_memory_only_and_one_warning(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    made = store(tmp_path)
    with caplog.at_level(logging.WARNING, "prime_kernels.loader"):
        assert [made.get_or_build(key(name), fake_cubin, "test").cubin for name in "ab"] == [fake_cubin()] * 2
    assert len([r for r in caplog.records if "E20" in r.message and str(tmp_path / "cache") in r.message]) == 1
    assert list((tmp_path / "cache" / "v1" / BUILD / "tmp").iterdir()) == []


def test_a_file_size_limit_that_cuts_a_write_short_leaves_no_entry(tmp_path: Path) -> None:
    process = SPAWN.Process(target=_write_under_a_limit, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def _write_under_a_limit(folder: Path) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    assert store(folder).get_or_build(key(), fake_cubin, "test").cubin == fake_cubin()


def _race(folder: Path, gate: Any, results: Any) -> None:
    def build() -> bytes:
        (folder / f"built-{os.getpid()}").touch()
        time.sleep(0.5)
        return fake_cubin()

    made = store(folder)
    gate.wait(60)
    hit = made.get_or_build(key(), build, "test")
    results.put((hit.origin, hashlib.sha256(hit.cubin).hexdigest()))


def test_eight_processes_that_start_cold_build_once(tmp_path: Path) -> None:
    gate, results = SPAWN.Barrier(8), SPAWN.Queue()
    processes = [SPAWN.Process(target=_race, args=(tmp_path, gate, results)) for _ in range(8)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert sorted(origin for origin, _ in found) == ["built"] + ["cache"] * 7
    assert {digest for _, digest in found} == {hashlib.sha256(fake_cubin()).hexdigest()}


def test_threads_of_one_process_build_once_as_well(tmp_path: Path) -> None:
    built: list[int] = []

    def build() -> bytes:
        built.append(1)
        time.sleep(0.1)
        return fake_cubin()

    threads = [
        threading.Thread(target=lambda: store(tmp_path).get_or_build(key(), build, "test"), daemon=True)
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert built == [1]


def _hold(folder: Path, started: Any) -> None:
    def build() -> bytes:
        started.set()
        time.sleep(600)
        return fake_cubin()

    store(folder).get_or_build(key(), build, "test")


def test_when_a_builder_is_killed_the_next_process_goes_on_at_once(tmp_path: Path) -> None:
    started = SPAWN.Event()
    process = SPAWN.Process(target=_hold, args=(tmp_path, started), daemon=True)
    process.start()
    assert started.wait(60)
    waiter = store(tmp_path)
    threading.Timer(0.3, lambda: os.kill(process.pid or 0, signal.SIGKILL)).start()
    begin = time.monotonic()
    assert waiter.get_or_build(key(), fake_cubin, "test").origin == "built"
    assert 0.2 < time.monotonic() - begin < 10
    process.join(30)


def test_a_builder_that_hangs_is_waited_for_a_bounded_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holder, waiter = store(tmp_path), store(tmp_path)
    waiter.lock_timeout_s = 0.2
    root = str(tmp_path / "cache")
    holder.open(create=True)
    with locks.NodeLock(root, key(), holder.settings, holder.uid) as lock:
        assert lock.wait(lambda: None, 1.0) is None
        with caplog.at_level(logging.WARNING, "prime_kernels.loader"):
            assert waiter.get_or_build(key(), fake_cubin, "test").origin == "built"
    assert any("waited 0 s for another process" in record.message for record in caplog.records)


def test_a_failing_build_raises_its_own_error_and_leaves_the_lock_free(tmp_path: Path) -> None:
    def broken() -> bytes:
        raise ValueError("no compiler")

    made = store(tmp_path)
    with pytest.raises(ValueError, match="no compiler"):
        made.get_or_build(key(), broken, "test")
    assert made.get_or_build(key(), fake_cubin, "test").origin == "built"


def test_lock_files_are_outside_the_cache_and_stay(tmp_path: Path) -> None:
    store(tmp_path).get_or_build(key(), fake_cubin, "test")
    found = list((tmp_path / f"prime-kernels-{os.geteuid()}").glob("*.lock"))
    assert len(found) == 1
    assert not list((tmp_path / "cache").rglob("*.lock"))


def test_without_a_place_for_locks_the_answer_is_to_build_at_once(tmp_path: Path) -> None:
    with locks.NodeLock(None, key(), store(tmp_path).settings, os.geteuid()) as lock:
        assert lock.wait(lambda: pytest.fail("nothing to look for"), 100.0) is None


def test_builds_by_other_compilers_of_the_same_sources_are_found_newest_first(tmp_path: Path) -> None:
    made = store(tmp_path)
    versions = ("12.9.86", "13.0.88", "13.10.1")
    for version in versions:
        made.publish(key(build=BUILD.replace("13.0.88", version)), fake_cubin(), "test")
    made.publish(key(build="0" * 16 + BUILD[16:]), fake_cubin(), "test")
    found = made.builds(BUILD[:16], BUILD[-8:])
    assert found == [BUILD.replace("13.0.88", version) for version in reversed(versions)]


def test_no_usable_directory_is_an_error_only_for_those_who_need_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = store(tmp_path, cache_dir=str(tmp_path / "file" / "x"), tmp_dir=str(tmp_path / "file"))
    assert made.get_or_build(key(), fake_cubin, "test").origin == "built"
    with pytest.raises(ArtifactError) as caught:
        made.require()
    assert caught.value.code == "E20"
    assert str(tmp_path / "file" / "x") in str(caught.value)
    assert "PRIME_KERNELS_CACHE_DIR" in (caught.value.remedy or "")
    assert caught.value.facts["refused"]


def test_places_reads_nothing_larger_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_FILE_BYTES", 100)
    assert filled(tmp_path).read(key()) is None
