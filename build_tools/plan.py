# SPDX-License-Identifier: Apache-2.0
"""What a release run will do, checked before anything is compiled.

Usage: python -m build_tools.plan [--tag v1.2.3]

Prints name=value lines, as GitHub's $GITHUB_OUTPUT wants them: version, archs (a JSON list for the job matrix), keys
(how many variants), slims (a JSON list of slim wheels). Fails if a table is malformed, if two variants clash, or, with
--tag, unless tag, package version and a dated changelog section agree.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from build_tools import entries, pack
from build_tools.tomlfile import read_toml
from build_tools.toolchain import DECLARATION
from build_tools.variants import ROOT, archs_of, read_variants


class PlanError(ValueError):
    """The tree is not fit for a release."""


def release_problems(tag: str, version: str, changelog: str) -> list[str]:
    """Why `tag` cannot be released from a tree with this version and changelog; empty when it can."""
    found = []
    if tag != f"v{version}":
        found.append(f"tag {tag} is not v{version}, the version in prime_kernels/__init__.py")
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"version {version} is no release version")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.M):
        found.append(f"CHANGELOG.md has no section '## [{version}] - <date>'")
    return found


def slims() -> list[dict[str, str]]:
    """Every combination of pack set and target that some variant is built for."""
    sets = sorted(read_toml(DECLARATION)["sets"])
    return [{"set": name, "arch": arch} for name in sets for arch in archs_of(read_variants())]


def plan(tag: str | None = None) -> dict[str, str]:
    """The output lines as a dict.

    Raises:
        PlanError: `tag` does not fit the tree.
        VariantError, EntryError, StructError: a table or an argument struct is malformed.
    """
    variants, version = read_variants(), pack.package_version()
    for variant in variants:
        entries.generate(variant)
    if tag is not None:
        found = release_problems(tag, version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
        if found:
            raise PlanError("; ".join(found))
    return {
        "version": version,
        "archs": json.dumps(list(archs_of(variants))),
        "keys": str(len(variants)),
        "slims": json.dumps(slims()),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.plan", description=__doc__)
    parser.add_argument("--tag", help="the tag that is about to be released")
    args = parser.parse_args(argv)
    try:
        print("\n".join(f"{name}={value}" for name, value in plan(args.tag).items()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
