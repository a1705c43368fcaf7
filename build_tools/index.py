# SPDX-License-Identifier: Apache-2.0
"""Static package index over slim wheels: plain files, for any web server or a folder on a shared disk.

Usage: python -m build_tools.index dist/whl

Each <set>/<arch>/ becomes an index of its own (`--index-url .../cu130/sm_90a/`), because an installer that sees two
local versions side by side takes the alphabetically last one whatever the machine has. Every page is there twice:
index.html (PEP 503) and index.json (PEP 691, API version 1.1). The top folder gets a page that lists the combinations.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from build_tools import wheel_zip

PROJECT = "prime-kernels"
_META = {"api-version": "1.1"}


class PageError(ValueError):
    """There is nothing to index, or a folder mixes what must stay apart."""


def _requires_python(wheel: Path) -> str:
    text = next(d.decode() for n, d in wheel_zip.read(wheel).items() if n.endswith(".dist-info/METADATA"))
    return next((line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("Requires-Python: ")), "")


def _file(wheel: Path) -> dict[str, Any]:
    data = wheel.read_bytes()
    hashes = {"sha256": hashlib.sha256(data).hexdigest()}
    return {
        "filename": wheel.name,
        "url": quote(wheel.name),
        "hashes": hashes,
        "size": len(data),
        "requires-python": _requires_python(wheel),
    }


def _page(path: Path, title: str, links: list[str], data: dict[str, Any] | None) -> None:
    lines = ["<!DOCTYPE html>", f"<title>{html.escape(title)}</title>", *links, ""]
    (path / "index.html").write_text("\n".join(lines), encoding="utf-8")
    if data is not None:
        (path / "index.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _link(row: dict[str, Any]) -> str:
    python = f' data-requires-python="{html.escape(row["requires-python"])}"' if row["requires-python"] else ""
    return f'<a href="{row["url"]}#sha256={row["hashes"]["sha256"]}"{python}>{html.escape(row["filename"])}</a><br>'


def write_project(folder: Path) -> None:
    """The pages of one project folder.

    Raises:
        PageError: it holds no wheel, or wheels of several local versions.
    """
    rows = [_file(path) for path in sorted(folder.glob("*.whl"))]
    versions = sorted({row["filename"].split("-")[1] for row in rows})
    if len({v.partition("+")[2] for v in versions}) != 1:
        raise PageError(f"{folder} holds versions {versions}; need wheels of one local version")
    data = {"meta": _META, "name": PROJECT, "versions": versions, "files": rows}
    _page(folder, PROJECT, [_link(row) for row in rows], data)


def write(top: Path) -> list[str]:
    """All pages below `top`; returns the combinations, sorted.

    Raises:
        PageError: there is no <set>/<arch>/prime-kernels/ below it, or see `write_project`.
    """
    combinations = sorted(p.parent.relative_to(top).as_posix() for p in top.glob(f"*/*/{PROJECT}"))
    if not combinations:
        raise PageError(f"no <set>/<arch>/{PROJECT}/ below {top}")
    for name in combinations:
        write_project(top / name / PROJECT)
        listing = {"meta": _META, "projects": [{"name": PROJECT}]}
        _page(top / name, name, [f'<a href="{PROJECT}/">{PROJECT}</a><br>'], listing)
    _page(top, "prime-kernels, one index per combination", [f'<a href="{c}/">{c}</a><br>' for c in combinations], None)
    return combinations


def main(argv: list[str] | None = None) -> int:
    """Command line entry; prints the combinations."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.index", description=__doc__)
    parser.add_argument("top", type=Path)
    args = parser.parse_args(argv)
    try:
        print("\n".join(write(args.top)))
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
