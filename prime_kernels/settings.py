# SPDX-License-Identifier: Apache-2.0
"""The process's environment, read once and in this module only.

Everything else in the package takes its options as arguments. `prime-kernels env` prints what was found here.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import lru_cache

from prime_kernels.errors import UnsupportedConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PREFIX = "PRIME_KERNELS_"
PACKS = ("cu129", "cu130")
JIT_MODES = ("auto", "warn", "never", "error-after-warmup")
LOG_LEVELS = ("warning", "info", "debug")
_BOOLEANS = {"": False, "0": False, "1": True}
_KNOWN = ("CACHE_DIR", "CACHE_RO", "CACHE_SHARED", "CACHE_DIGEST", "PACK", "JIT", "NVRTC", "LOG")
# Read by the build backend; listed so that they do not count as misspelt when they are still set at run time.
_BUILD_TIME = ("PACKS", "REQUIRE")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        cache_dir: PRIME_KERNELS_CACHE_DIR, first candidate for the kernel cache; None if unset.
        cache_ro: PRIME_KERNELS_CACHE_RO, read-only caches in search order (separated by ':').
        cache_shared: PRIME_KERNELS_CACHE_SHARED=1, accept a group-writable cache directory.
        cache_digest: PRIME_KERNELS_CACHE_DIGEST, "sha256:<64 hex>" that a read-only cache's manifest must have.
        pack: PRIME_KERNELS_PACK, "cu129" or "cu130"; None picks by driver version.
        jit: PRIME_KERNELS_JIT, one of `JIT_MODES`.
        nvrtc: PRIME_KERNELS_NVRTC, path of the libnvrtc to use; None searches.
        log: PRIME_KERNELS_LOG, one of `LOG_LEVELS`.
        variables: Every PRIME_KERNELS_ variable that is set, as (name, value).
        unknown: Variables that start with PRIME_KERNELS_ and mean nothing here, for `doctor` to show.
        xdg_cache_home: XDG_CACHE_HOME if absolute (the base directory rules say to ignore it otherwise).
        xdg_runtime_dir: XDG_RUNTIME_DIR if absolute.
        home: HOME; None if unset.
        tmp_dir: TMPDIR, else "/tmp".
    """

    cache_dir: str | None = None
    cache_ro: tuple[str, ...] = ()
    cache_shared: bool = False
    cache_digest: str | None = None
    pack: str | None = None
    jit: str = "auto"
    nvrtc: str | None = None
    log: str = "warning"
    variables: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()
    xdg_cache_home: str | None = None
    xdg_runtime_dir: str | None = None
    home: str | None = None
    tmp_dir: str = "/tmp"


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = env.get(PREFIX + name, "")
    if value and value not in allowed:
        raise UnsupportedConfig(
            f"{PREFIX}{name} is {value!r}; need one of {', '.join(allowed)}.",
            code="E70",
            facts={"variable": PREFIX + name, "value": value, "allowed": allowed},
            remedy=f"Unset {PREFIX}{name} or set an allowed value.",
        )
    return value or None


def _digest(env: Mapping[str, str]) -> str | None:
    value = env.get(PREFIX + "CACHE_DIGEST", "")
    kind, _, digits = value.partition(":")
    if value and not (kind == "sha256" and len(digits) == 64 and set(digits) <= set("0123456789abcdef")):
        raise UnsupportedConfig(
            f"{PREFIX}CACHE_DIGEST is {value!r}; need 'sha256:' and 64 lower-case hexadecimal digits.",
            code="E70",
            facts={"variable": PREFIX + "CACHE_DIGEST", "value": value},
            remedy="Take the value that `prime-kernels cache export` printed.",
        )
    return value or None


def _absolute(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name, "")
    return value if value.startswith("/") else None


def read(env: Mapping[str, str]) -> Settings:
    """Turn an environment into settings.

    Args:
        env: Variable names and values; `settings()` passes the process's own.

    Returns:
        The settings; an empty value counts as unset.

    Raises:
        UnsupportedConfig: A PRIME_KERNELS_ variable has a value outside its domain (code E70).
    """
    known = {PREFIX + name for name in _KNOWN + _BUILD_TIME}
    _choice(env, "CACHE_SHARED", ("0", "1"))
    return Settings(
        cache_dir=env.get(PREFIX + "CACHE_DIR") or None,
        cache_ro=tuple(part for part in env.get(PREFIX + "CACHE_RO", "").split(":") if part),
        cache_shared=_BOOLEANS[env.get(PREFIX + "CACHE_SHARED", "")],
        cache_digest=_digest(env),
        pack=_choice(env, "PACK", PACKS),
        jit=_choice(env, "JIT", JIT_MODES) or "auto",
        nvrtc=env.get(PREFIX + "NVRTC") or None,
        log=_choice(env, "LOG", LOG_LEVELS) or "warning",
        variables=tuple(sorted((name, value) for name, value in env.items() if name.startswith(PREFIX))),
        unknown=tuple(sorted(name for name in env if name.startswith(PREFIX) and name not in known)),
        xdg_cache_home=_absolute(env, "XDG_CACHE_HOME"),
        xdg_runtime_dir=_absolute(env, "XDG_RUNTIME_DIR"),
        home=env.get("HOME") or None,
        tmp_dir=_absolute(env, "TMPDIR") or "/tmp",
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings; the environment is read at the first call (`settings.cache_clear()` reads it again).

    Returns:
        The same frozen object at every call.

    Raises:
        UnsupportedConfig: A PRIME_KERNELS_ variable has a value outside its domain (code E70).
    """
    return read(os.environ)


@contextlib.contextmanager
def without_multicast() -> Iterator[None]:
    """Ask torch to make no multicast objects while it exchanges memory; the one variable that this package sets."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
