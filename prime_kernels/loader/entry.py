# SPDX-License-Identifier: Apache-2.0
"""One file of the kernel cache: its name, its one-line header and its checks. Pure.

An entry is a JSON object (arch, build, bytes, key, sha256, tool) on one line, a newline, and the cubin.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import elf
from prime_kernels.loader.arch import Target

SCHEMA = "v1"
SUFFIX = ".pkc"
_MAX_HEADER = 4096
_KEY = re.compile(r"[A-Za-z0-9_.|-]{1,200}")
_BUILD = re.compile(r"[0-9a-f]{16}-nvrtc[0-9]{1,3}\.[0-9]{1,3}(?:\.[0-9]{1,5})?-[0-9a-f]{8}")
_PATH = re.compile(rf"{SCHEMA}/({_BUILD.pattern})/(sm_[0-9]{{2,3}}[af]?)/([0-9a-f]{{64}}){re.escape(SUFFIX)}")


def check_key(key: str) -> str:
    """Return a kernel key, or refuse one with characters outside `A-Z a-z 0-9 _ . | -`.

    Raises:
        ArtifactError: Bad characters, empty, or longer than 200 (E05).
    """
    if _KEY.fullmatch(key) is None:
        raise _bad(f"kernel key {key[:80]!r} has characters other than letters, digits and _.|-")
    return key


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a cached cubin was built from.

    Attributes:
        build: "<sources>-nvrtc<version>-<options>": all that reaches the compiler except key and target. No path,
            no time, no torch version and no device number, so a cache can be carried to another machine.
        arch: Target of the cubin.
        key: Kernel key.
    """

    build: str
    arch: Target
    key: str

    def __post_init__(self) -> None:
        check_key(self.key)
        if _BUILD.fullmatch(self.build) is None:
            raise _bad(f"cache build id is {self.build[:80]!r}")

    @property
    def directory(self) -> tuple[str, str, str]:
        """Directory names below the cache's root."""
        return (SCHEMA, self.build, str(self.arch))

    @property
    def file(self) -> str:
        """File name inside `directory`."""
        return hashlib.sha256(self.key.encode()).hexdigest() + SUFFIX

    @property
    def path(self) -> str:
        """Path relative to the cache's root, as archives and manifests write it."""
        return "/".join((*self.directory, self.file))


def _bad(what: str) -> ArtifactError:
    return ArtifactError(
        f"cache entry refused: {what}.",
        code="E05",
        facts={"problem": what},
        remedy="It is built again; `prime-kernels cache clear` removes the rest.",
    )


def nvrtc_of(build: str) -> tuple[int, ...]:
    """Version of the NVRTC in a build id, e.g. (13, 0, 88); empty if it is no build id."""
    if _BUILD.fullmatch(build) is None:
        return ()
    return tuple(int(part) for part in build.split("-")[1].removeprefix("nvrtc").split("."))


def is_entry_path(path: str) -> bool:
    """Whether a relative path is one that `CacheKey.path` can produce."""
    return _PATH.fullmatch(path) is not None


def check_cubin(cubin: bytes, arch: Target) -> None:
    """Refuse bytes that are no cubin for `arch`.

    Raises:
        ArtifactError: No cubin, or one for another GPU (E05).
    """
    found = elf.ident(cubin)[2]
    if found != arch.sm:
        raise _bad(f"the cubin is for sm_{found}, need {arch}")


def encode(key: CacheKey, cubin: bytes, tool: str) -> bytes:
    """Bytes of the entry that holds `cubin`; `tool` says what compiled it, e.g. "nvrtc 13.0.88"."""
    header = {
        "arch": str(key.arch),
        "build": key.build,
        "bytes": len(cubin),
        "key": key.key,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "tool": tool,
    }
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode() + b"\n" + cubin


def split(data: bytes) -> tuple[CacheKey, str, bytes]:
    """Key, tool and verified cubin of an entry, whatever its key is.

    Raises:
        ArtifactError: Truncated, hash differs, bad header, or no cubin for its own target (E05).
    """
    from prime_kernels.errors import UnsupportedConfig
    from prime_kernels.loader.arch import parse

    end = data.find(b"\n", 0, _MAX_HEADER)
    if end < 0:
        raise _bad("no header line")
    try:
        header = json.loads(data[:end])
        texts = [header[name] for name in ("arch", "build", "key", "sha256", "tool")]
        size = header["bytes"]
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise _bad(f"unreadable header ({err.__class__.__name__})") from err
    if not all(isinstance(text, str) for text in texts) or not isinstance(size, int):
        raise _bad("a header field has the wrong type")
    arch, build, key, digest, tool = texts
    cubin = data[end + 1 :]
    if len(cubin) != size:
        raise _bad(f"{len(cubin)} bytes, the header says {size}")
    actual = hashlib.sha256(cubin).hexdigest()
    if actual != digest:
        raise _bad(f"sha256 is {actual[:12]}, the header says {digest[:12]}")
    try:
        found = CacheKey(build, parse(arch), key)
    except UnsupportedConfig as err:
        raise _bad(f"arch is {arch[:20]!r}") from err
    check_cubin(cubin, found.arch)
    return found, tool, cubin


def decode(data: bytes, expected: CacheKey) -> bytes:
    """The verified cubin of an entry that must be for `expected`; a renamed file is refused.

    Raises:
        ArtifactError: As `split`, or another key, build or target (E05).
    """
    found, _, cubin = split(data)
    if found != expected:
        raise _bad(f"it holds {found.key} ({found.build}, {found.arch}), asked for {expected.key}")
    return cubin
