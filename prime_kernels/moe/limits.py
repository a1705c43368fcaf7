# SPDX-License-Identifier: Apache-2.0
"""Checks of plain values: each raises `UnsupportedConfig` that names the field, what it got and what is legal."""

from __future__ import annotations

import math

from prime_kernels.errors import UnsupportedConfig


def require_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in allowed):
        raise UnsupportedConfig(
            f"{name} is {value!r}; need one of {', '.join(map(repr, allowed))}.",
            facts={"argument": name, "got": repr(value), "allowed": allowed},
            remedy=f"Pass one of the listed values as {name}.",
        )


def require_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    wanted = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high):
        return
    raise UnsupportedConfig(
        f"{name} is {value!r}; need {wanted}.",
        facts={"argument": name, "got": repr(value), "low": low, "high": high},
        remedy=f"Pass {wanted} as {name}.",
    )


def require_number(name: str, value: object, *, low: float = -math.inf, low_open: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (value > low or (value == low and not low_open)):  # type: ignore[operator]
        return
    wanted = "a finite number" if low == -math.inf else f"a finite number {'>' if low_open else '>='} {low:g}"
    raise UnsupportedConfig(
        f"{name} is {value!r}; need {wanted}.",
        facts={"argument": name, "got": repr(value)},
        remedy=f"Pass {wanted} as {name}.",
    )


def require_multiple(name: str, value: int, multiple: int, precision: str) -> None:
    require_int(name, value, low=1, high=2**20)
    if value % multiple:
        below, above = value // multiple * multiple, -(-value // multiple) * multiple
        nearest = above if below == 0 or above - value <= value - below else below
        raise UnsupportedConfig(
            f"{name}={value} is not a multiple of {multiple} (precision={precision!r}).",
            code="E41",
            facts={"argument": name, "got": value, "multiple": multiple, "nearest": nearest},
            remedy=f"The nearest legal value is {nearest}; pad the weights with zero rows or columns to a larger one.",
        )
