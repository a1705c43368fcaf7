# SPDX-License-Identifier: Apache-2.0
"""Say which sources a measurement belongs to, on a machine that may have no git.

`python benchmarks/stamp.py` (or `make stamp`) writes build/stamp.json with the commit, whether the tree differs from
it, and a digest over all tracked files. bench.py computes the digest again from the files that the stamp lists.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAMP = Path("build") / "stamp.json"


def digest_files(root: Path, names: list[str]) -> str:
    """SHA-256 over the sorted names and the contents; a missing file has a digest of its own, so it shows."""
    whole = hashlib.sha256()
    for name in sorted(names):
        path = root / name
        content = path.read_bytes() if path.is_file() else b"\0missing"
        whole.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return whole.hexdigest()


def make_stamp(root: Path) -> dict[str, Any]:
    """The stamp of a working tree.

    Raises:
        subprocess.CalledProcessError: `root` is no git repository with a commit.
    """
    files = [name for name in _git(root, "ls-files", "-z").split("\0") if name]
    # Untracked sources count as a difference: they can be imported.
    return {
        "commit": _git(root, "rev-parse", "HEAD").strip(),
        "dirty": bool(_git(root, "status", "--porcelain").strip()),
        "digest": digest_files(root, files),
        "files": files,
    }


def read_stamp(root: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(the stamp, None) if it fits the files below `root`, else (None, why not)."""
    path = root / STAMP
    if not path.is_file():
        return None, f"{STAMP} is missing; run `make stamp` where the repository is"
    stamp = json.loads(path.read_text())
    digest = digest_files(root, stamp["files"])
    if digest != stamp["digest"]:
        return None, f"{STAMP} has digest {stamp['digest'][:12]}, the files have {digest[:12]}; run `make stamp` again"
    return stamp, None


def main() -> int:
    """Write the stamp and print its first line."""
    stamp = make_stamp(ROOT)
    path = ROOT / STAMP
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(stamp, indent=1) + "\n")
    print(f"{STAMP}: {stamp['commit'][:12]}{' (dirty)' if stamp['dirty'] else ''} digest {stamp['digest'][:12]}")
    return 0


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
