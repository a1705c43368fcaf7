# SPDX-License-Identifier: Apache-2.0
"""The verbs `version` and `env`: facts about this installation, none of which needs a GPU or torch."""

from __future__ import annotations

import getpass
import json
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from pathlib import Path

import prime_kernels
from prime_kernels.errors import ArtifactError
from prime_kernels.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

# What a report about this package is asked for next.
DISTRIBUTIONS = (
    "prime-kernels",
    "torch",
    "triton",
    "numpy",
    "packaging",
    "sgl-deep-gemm",
    "nvshmem4py-cu13",
    "nvidia-nvshmem-cu13",
    "nvidia-cuda-nvrtc",
    "nvidia-nccl-cu13",
)
# Credentials in an address, and what follows a word that announces a secret.
_SECRETS = (
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),
    re.compile(r"(?i)(?<=token=)[^&\s]+"),
    re.compile(r"(?i)(?<=secret=)[^&\s]+"),
    re.compile(r"(?i)\b(?:hf|ghp|gho|github_pat|sk)[_-][A-Za-z0-9_-]{16,}"),
)


def redact(text: str, home: str | None, user: str | None) -> str:
    """Text without the home folder, the user's name as a path component, or anything that looks like a credential.

    Args:
        text: Text to print.
        home: Home folder, replaced by "~"; None or "/" replaces nothing.
        user: User name, replaced by "<user>" between slashes.

    Returns:
        The text to show.
    """
    if home and home.rstrip("/"):
        text = re.sub(re.escape(home.rstrip("/")) + r"(?=/|$)", "~", text)
    if user:
        text = re.sub(rf"(?<=/){re.escape(user)}(?=/|$)", "<user>", text)
    for pattern in _SECRETS:
        text = pattern.sub("<redacted>", text)
    return text


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None  # a uid without an entry, usual in containers


def _installed(name: str) -> str | None:
    try:
        return distribution_version(name)
    except PackageNotFoundError:
        return None


def facts() -> dict[str, object]:
    """What `env` shows.

    Returns:
        Version, package folder, Python, platform, installed distributions (None: not installed) and the package's
        environment variables, redacted.

    Raises:
        UnsupportedConfig: A PRIME_KERNELS_ variable has a bad value.
    """
    config = settings()
    user = _user()

    def hide(text: str) -> str:
        return redact(text, config.home, user)

    return {
        "version": prime_kernels.__version__,
        "path": hide(str(Path(prime_kernels.__file__).parent)),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": hide(sys.executable),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "distributions": {name: _installed(name) for name in DISTRIBUTIONS},
        "environment": {name: hide(value) for name, value in config.variables},
        "unknown_variables": list(config.unknown),
    }


def env(args: argparse.Namespace) -> int:
    """The verb `env`.

    Args:
        args: `json`.

    Returns:
        0.

    Raises:
        UnsupportedConfig: A PRIME_KERNELS_ variable has a bad value.
    """
    found = facts()
    if args.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:" + ("" if value else " none set"))
            for key, entry in value.items():
                print(f"  {key:<22}{entry if entry is not None else '-'}")
        else:
            print(f"{name:<18}{', '.join(value) if isinstance(value, list) else value}")
    return 0


def version(args: argparse.Namespace) -> int:
    """The verb `version`: version, commit of the kernels and their pack sets; "none" for a tree that was not built.

    Args:
        args: `json`.

    Returns:
        0, or 1 if the list of installed packs is damaged.
    """
    from prime_kernels.loader.packs import read_manifest

    damage = None
    commit, packs = None, []
    try:
        manifest = read_manifest()
    except ArtifactError as error:
        damage = error
    else:
        if manifest is not None:
            commit, packs = manifest.commit, sorted({record.set for record in manifest.packs})
    if args.json:
        found = {"version": prime_kernels.__version__, "commit": commit, "packs": packs}
        print(json.dumps({**found, "codes": [] if damage is None else [damage.code]}))
    else:
        about = f"damaged: {damage}" if damage is not None else f"packs {'+'.join(packs) or 'none'}"
        sha, dash, mark = (commit or "").partition("-")  # "-dirty" for packs from changed sources
        origin = f"commit {sha[:7]}{dash}{mark}, " if sha else ""
        print(f"prime-kernels {prime_kernels.__version__}  ({origin}{about})")
    return 0 if damage is None else 1
