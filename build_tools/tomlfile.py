# SPDX-License-Identifier: Apache-2.0
"""TOML reading on every supported Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    from tomllib import loads
else:
    from tomli import loads


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file."""
    table: dict[str, Any] = loads(path.read_text(encoding="utf-8"))
    return table
