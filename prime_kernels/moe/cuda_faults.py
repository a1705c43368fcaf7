# SPDX-License-Identifier: Apache-2.0
"""What a kernel of the cuda backend that gave up left behind, as an error. See kernels_src/common/fault.cuh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_kernels.errors import LaunchError, PeerTimeout, PrimeKernelsError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prime_kernels.moe.backend import RuntimeView

FAULT_WORDS = 8  # FaultRecord
_ROLES = {1: "schedule", 2: "load", 3: "math", 4: "pull", 5: "plan", 6: "end", 7: "push"}
_WAITS = {
    1: "a tile",
    2: "room in the tile list",
    3: "operands",
    4: "a free stage",
    5: "rows or saved activations",
    6: "a peer's counts",
    7: "a peer's rows",
    8: "a peer's tokens",
    9: "a peer's end",
    10: "the first copy of a row",
}
_LOCAL_S = 20  # bound of a wait inside one GPU


def fault_error(record: Sequence[int], runtime: RuntimeView) -> PrimeKernelsError | None:
    """The error of this record; None if nothing is wrong."""
    code, cta, role, wait, bad_ids, peer = record[:6]
    role_name, wait_name = _ROLES.get(role, str(role)), _WAITS.get(wait, str(wait))
    facts: dict[str, object] = {"cta": cta, "role": role, "wait": wait}
    if code and peer:
        seconds = runtime.config.peer_timeout_s
        facts |= {"ep_rank": runtime.ep_rank, "peers": [peer - 1], "phase": role_name, "seconds": seconds}
        return PeerTimeout(
            f"ep_rank {runtime.ep_rank} waited {seconds:g} s in phase {role_name} for ep_rank {peer - 1}: for "
            f"{wait_name}. Output of this call is not valid.",
            facts=facts,
            remedy="Find out what that rank does, then close the runtime with abort=True; "
            "peer_timeout_s in the config sets the limit.",
        )
    if code:
        alike = "A GPU halted by a debugger looks the same."
        if runtime.ep_size > 1:
            alike = "A rank that stopped between two launches, or a GPU halted by a debugger, looks the same."
        return LaunchError(
            f"a kernel gave up after {_LOCAL_S} s: the {role_name} role of CTA {cta} waited for {wait_name}; "
            "its output is not valid.",
            code="E44",
            facts=facts,
            remedy=f"Report it with `prime-kernels doctor --json`. {alike}",
        )
    if bad_ids:
        return ShapeError(
            f"topk_ids held {bad_ids} ids outside [-1, {runtime.config.num_experts}) since the last check; "
            "those slots were skipped.",
            facts={"argument": "topk_ids", "got": bad_ids},
            remedy="Fix the router, or set validate=True to find the call.",
        )
    return None
