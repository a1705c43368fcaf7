# SPDX-License-Identifier: Apache-2.0
"""The environment is read once, checked, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.settings import JIT_MODES, LOG_LEVELS, PACKS, Settings, read, settings

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read({}) == Settings()


def test_every_variable_reaches_its_field() -> None:
    env = {
        "PRIME_KERNELS_CACHE_DIR": "/c",
        "PRIME_KERNELS_CACHE_RO": "/a:/b",
        "PRIME_KERNELS_CACHE_SHARED": "1",
        "PRIME_KERNELS_CACHE_DIGEST": DIGEST,
        "PRIME_KERNELS_PACK": "cu129",
        "PRIME_KERNELS_JIT": "error-after-warmup",
        "PRIME_KERNELS_NVRTC": "/n/libnvrtc.so.13",
        "PRIME_KERNELS_LOG": "debug",
    }
    others = {"HOME": "/h", "XDG_CACHE_HOME": "/x", "XDG_RUNTIME_DIR": "/r", "TMPDIR": "/t", "PATH": "/bin"}
    assert read(env | others) == Settings(
        cache_dir="/c",
        cache_ro=("/a", "/b"),
        cache_shared=True,
        cache_digest=DIGEST,
        pack="cu129",
        jit="error-after-warmup",
        nvrtc="/n/libnvrtc.so.13",
        log="debug",
        variables=tuple(sorted(env.items())),
        xdg_cache_home="/x",
        xdg_runtime_dir="/r",
        home="/h",
        tmp_dir="/t",
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [("PACK", PACKS), ("JIT", JIT_MODES), ("LOG", LOG_LEVELS), ("CACHE_SHARED", ("0", "1"))],
)
def test_a_choice_accepts_its_values_and_empty_only(name: str, values: tuple[str, ...]) -> None:
    variable = f"PRIME_KERNELS_{name}"
    for value in ("", *values):
        read({variable: value})
    for value in ("yes", values[0].upper() + "x", f" {values[0]}"):
        with pytest.raises(UnsupportedConfig, match=f"{variable} is .*; need one of ") as caught:
            read({variable: value})
        assert caught.value.code == "E70"
        assert caught.value.facts["value"] == value
        assert caught.value.remedy


@pytest.mark.parametrize("value", ["sha256:", "md5:" + "0" * 64, "sha256:" + "0" * 63, "sha256:" + "G" * 64, "0" * 64])
def test_a_malformed_digest_is_refused(value: str) -> None:
    with pytest.raises(UnsupportedConfig, match="PRIME_KERNELS_CACHE_DIGEST"):
        read({"PRIME_KERNELS_CACHE_DIGEST": value})


def test_relative_base_directories_are_ignored() -> None:
    found = read({"XDG_CACHE_HOME": "cache", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"})
    assert (found.xdg_cache_home, found.xdg_runtime_dir, found.tmp_dir) == (None, None, "/tmp")


def test_a_misspelt_variable_is_kept_for_doctor_and_build_variables_are_not() -> None:
    found = read({"PRIME_KERNELS_CACHEDIR": "/c", "PRIME_KERNELS_REQUIRE": "1", "PRIME_KERNELS_PACKS": "/p"})
    assert found.unknown == ("PRIME_KERNELS_CACHEDIR",)


def test_the_environment_is_read_at_the_first_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_KERNELS_LOG", "info")
    first = settings()
    monkeypatch.setenv("PRIME_KERNELS_LOG", "debug")
    assert settings() is first
    assert first.log == "info"
    settings.cache_clear()
    assert settings().log == "debug"
