# SPDX-License-Identifier: Apache-2.0
"""GPU targets: parse, print, and which target runs on which compute capability. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prime_kernels.errors import UnsupportedConfig

_PATTERN = re.compile(r"sm_([1-9][0-9]{0,1})([0-9])([af]?)")


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """What a cubin was assembled for.

    Attributes:
        major: Major compute capability.
        minor: Minor compute capability.
        flavour: "" runs on the same major with an equal or higher minor; "f" the same, with instructions that only
            the family has; "a" on exactly this compute capability.
    """

    major: int
    minor: int
    flavour: str = ""

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.flavour}"

    @property
    def sm(self) -> int:
        """The number in a cubin's ELF flags, e.g. 90 or 103."""
        return self.major * 10 + self.minor

    def runs_on(self, cc: tuple[int, int]) -> bool:
        """Whether a cubin of this target loads on a device of compute capability `cc` (major, minor)."""
        if self.flavour == "a":
            return cc == (self.major, self.minor)
        return cc[0] == self.major and cc[1] >= self.minor

    @property
    def min_toolkit(self) -> tuple[int, int]:
        """Oldest CUDA toolkit (and NVRTC) that knows the target."""
        if self.flavour == "f" or self.sm > 101:
            return (12, 9)
        return (12, 8) if self.major >= 10 else (12, 0)


def parse(text: str) -> Target:
    """Read a target as `str(Target)` writes it.

    Args:
        text: "sm_90a", "sm_100f", "sm_103a", "sm_90".

    Returns:
        The target.

    Raises:
        UnsupportedConfig: The text is not a target (E41).
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UnsupportedConfig(
            f"arch is {text!r}; need sm_<major><minor>, optionally followed by a or f.",
            facts={"arch": text},
            remedy="Write for example sm_90a.",
        )
    return Target(int(match[1]), int(match[2]), match[3])


# Order of preference for each device this package is written for. Nothing else is tried: a kernel that waits on tensor
# memory or warpgroup instructions has no portable form to fall back to.
_TARGETS: dict[tuple[int, int], tuple[Target, ...]] = {
    (9, 0): (Target(9, 0, "a"),),
    (10, 0): (Target(10, 0, "a"), Target(10, 0, "f")),
    (10, 3): (Target(10, 3, "a"), Target(10, 0, "f")),
}


def targets_for(cc: tuple[int, int]) -> tuple[Target, ...]:
    """Targets to look for on a device of compute capability `cc`, best first; empty if the device is not covered."""
    return _TARGETS.get(cc, ())


def default_target(cc: tuple[int, int]) -> Target | None:
    """The target that the just-in-time compiler builds for `cc`; None if the device is not covered."""
    return next(iter(targets_for(cc)), None)


def not_covered_reason(cc: tuple[int, int], device: str, shipped: tuple[str, ...]) -> str | None:
    """Why no kernel runs on a device, or None if its compute capability is covered.

    Args:
        cc: Compute capability of the device.
        device: How to call it in the sentence, e.g. "cuda:0 is NVIDIA H200".
        shipped: Targets of the installed packs; the covered ones if empty.
    """
    if targets_for(cc):
        return None
    names = shipped or tuple(str(t) for t in sorted({t for row in _TARGETS.values() for t in row}))
    return (
        f"{device} (sm_{cc[0]}{cc[1]}). prime_kernels has {', '.join(names)}, none of which can run on "
        f"sm_{cc[0]}{cc[1]}. This is not a build problem and no flag helps."
    )
