# SPDX-License-Identifier: Apache-2.0
"""`prime-kernels trace`: a timeline of what every SM does during one call."""

from __future__ import annotations

import argparse

from prime_kernels.errors import BackendUnavailable


def run(args: argparse.Namespace) -> int:
    """Refuse: this version ships no kernel that records a timeline.

    Args:
        args: Options of the verb.

    Raises:
        BackendUnavailable: Always (code E09).
    """
    raise BackendUnavailable(
        "no kernel of this version writes trace records; `trace` reads them from the fused CUDA kernels.",
        code="E09",
        facts={"verb": "trace"},
        remedy="Use a version whose `prime-kernels list` names a variant with trace.",
    )
