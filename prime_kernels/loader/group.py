# SPDX-License-Identifier: Apache-2.0
"""What must hold among the ranks of a group before their kernels write to each other's memory."""

from __future__ import annotations

import hashlib

import prime_kernels
from prime_kernels.errors import BackendUnavailable, ConfigMismatch
from prime_kernels.loader import abi, hostlib, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def identity(ordinal: int) -> dict[str, object]:
    """What must be equal on all ranks of a group before their kernels may write to each other's memory.

    Args:
        ordinal: CUDA device index of this rank.

    Returns:
        Plain values to be gathered over the group and given to `compare_identities`.
    """
    at, facts = resolve.installation(), hostlib.host().device(ordinal)
    entries = {key: row for pack in at.packs for key, row in pack.header.entries.items()}
    text = "\n".join(f"{key} {row.args_hash} {row.protocol}" for key, row in sorted(entries.items()))
    return {
        "version": prime_kernels.__version__,
        "compute capability": f"{facts.cc[0]}.{facts.cc[1]}",
        "host layout": f"{abi.layout():016x}",
        "kernels": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def compare_identities(ranks: Sequence[Mapping[str, object]]) -> None:
    """Refuse a group whose ranks differ.

    Args:
        ranks: `identity` of every rank, in rank order.

    Raises:
        ConfigMismatch: Ranks differ; names field, values and ranks (E50).
    """
    for name in ranks[0] if ranks else ():
        by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(ranks):
            by_value.setdefault(str(values.get(name)), []).append(rank)
        if len(by_value) > 1:
            table = "; ".join(f"{value} on rank {', '.join(map(str, where))}" for value, where in by_value.items())
            raise ConfigMismatch(
                f"ranks differ in {name}: {table}.",
                facts={"field": name, "ranks": by_value},
                remedy="Install the same prime-kernels on every node and use one kind of GPU per group.",
            )


def check_reachable(reach: Sequence[Sequence[bool]], provider: str) -> None:
    """Refuse a group in which some GPU cannot read and write another's memory.

    Args:
        reach: `reach[rank][peer]`, gathered over the group: whether `rank` maps the memory of `peer`.
        provider: What was to map it, for the message.

    Raises:
        BackendUnavailable: A pair cannot (E51); the text holds the matrix.
    """
    pairs = [
        (rank, peer) for rank, row in enumerate(reach) for peer, good in enumerate(row) if rank != peer and not good
    ]
    if not pairs:
        return
    rows = "\n".join(f"  {rank}: {' '.join('.' if good else 'x' for good in row)}" for rank, row in enumerate(reach))
    named = ", ".join(f"{rank}->{peer}" for rank, peer in pairs[:8])
    raise BackendUnavailable(
        f"{len(pairs)} pairs of ranks cannot reach each other's memory through {provider}: {named}\n{rows}\n",
        code="E51",
        facts={"pairs": pairs, "provider": provider, "ranks": len(reach)},
        remedy='Put the group inside one NVLink domain (`nvidia-smi topo -m`), or use backend="grouped".',
    )
