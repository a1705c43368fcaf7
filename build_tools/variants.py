# SPDX-License-Identifier: Apache-2.0
"""Reads variants.toml and checks every row. Pure but for the reading."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from build_tools.tomlfile import read_toml

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("variants.toml")
KERNELS = ROOT / "kernels_src"

_KEY = re.compile(r"[A-Za-z0-9_.|-]{1,120}")
_SYMBOL = re.compile(r"pk_[a-z0-9_]{1,60}")
_ARCH = re.compile(r"sm_[1-9]\d{1,2}[af]")
_FIELDS = {"key", "kernel", "header", "type", "args", "archs", "supported", "facts", "measured", "max_regs", "profile"}
_OPTIONAL = {"max_regs", "facts", "profile"}
_PROFILE_KEY = "|profile"


class VariantError(ValueError):
    """A row of variants.toml is malformed; the message names the row and the field."""


@dataclass(frozen=True)
class Variant:
    """One row; the fields are described at the top of variants.toml."""

    key: str
    kernel: str
    header: str
    type: str
    args: str
    archs: tuple[str, ...]
    supported: tuple[str, ...]
    measured: str
    facts: dict[str, Any] = field(default_factory=dict, hash=False)
    max_regs: int = 255
    profile: bool = False  # whether this variant records a timeline (kernels_src/profile/timeline.cuh)

    @property
    def entry_name(self) -> str:
        """File name of the generated entry: the key with `|` spelled as a double hyphen."""
        return self.key.replace("|", "--") + ".cu"


def _check(row: dict[str, Any], where: str) -> None:
    missing, unknown = _FIELDS - _OPTIONAL - row.keys(), row.keys() - _FIELDS
    if missing or unknown:
        raise VariantError(f"{where}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    if not _KEY.fullmatch(row["key"]) or "--" in row["key"]:
        raise VariantError(f"{where}: key {row['key']!r} needs letters, digits and _.|- only, and no double hyphen")
    if not _SYMBOL.fullmatch(row["kernel"]):
        raise VariantError(f"{where}: kernel {row['kernel']!r} needs the form pk_name")
    if not (KERNELS / row["header"]).is_file():
        raise VariantError(f"{where}: kernels_src/{row['header']} does not exist")
    if not row["archs"] or not all(_ARCH.fullmatch(a) for a in row["archs"]):
        raise VariantError(f"{where}: archs {row['archs']} needs targets such as sm_90a")
    if not set(row["supported"]) <= set(row["archs"]):
        raise VariantError(f"{where}: supported {row['supported']} names a target that is not in archs")
    if row.get("profile", True) is not True:
        raise VariantError(f"{where}: profile is {row['profile']!r}; it is true, or left out")
    if not row["measured"].strip():
        raise VariantError(f"{where}: measured is empty; say what earned this row its place")


def _recording(variant: Variant) -> Variant:
    """The same kernel, built with the hooks that record a timeline: of a family of its own, since no layer takes it."""
    facts = {**variant.facts, "family": "trace"}
    measured = f"records what {variant.key} does"
    key = variant.key + _PROFILE_KEY
    return replace(variant, key=key, supported=(), facts=facts, measured=measured, profile=True)


def parse_variants(table: dict[str, Any]) -> tuple[Variant, ...]:
    """Rows of a parsed variants.toml, in file order; one with `profile` is followed by its recording twin.

    Raises:
        VariantError: a row is malformed, or a key occurs twice.
    """
    variants: list[Variant] = []
    for index, row in enumerate(table.get("variant", [])):
        where = f"variants.toml, row {index + 1} ({row.get('key', 'no key')})"
        _check(row, where)
        values = {**row, "archs": tuple(row["archs"]), "supported": tuple(row["supported"])}
        if any(v.key == row["key"] for v in variants):
            raise VariantError(f"{where}: the key occurs twice")
        twin = values.pop("profile", False)
        variants.append(Variant(**values))
        if twin:
            variants.append(_recording(variants[-1]))
    return tuple(variants)


def read_variants(path: Path = TABLE) -> tuple[Variant, ...]:
    """`parse_variants` of the file."""
    return parse_variants(read_toml(path))


def archs_of(variants: tuple[Variant, ...]) -> tuple[str, ...]:
    """Every target that some variant is built for, sorted by number."""
    found = {arch for variant in variants for arch in variant.archs}
    return tuple(sorted(found, key=lambda a: (int(a[3:-1]), a)))
