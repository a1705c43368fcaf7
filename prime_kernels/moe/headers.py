# SPDX-License-Identifier: Apache-2.0
"""What a rank tells a peer at the start of a call, as int64 words. Pure; `abort.PeerChannel` sends them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_kernels.errors import ConfigMismatch

PHASES = ("none", "forward", "backward", "warmup")
_MAGIC = 0x504B4831  # "PKH1", the layout below; another version of the package has another number
_FIXED_WORDS = 8  # magic, call, phase, flags, tokens, bytes of the reason, fatal, spare
_REASON_WORDS = 64  # 512 bytes of UTF-8: the first lines of an error message
_COUNTS_AT = _FIXED_WORDS + _REASON_WORDS


@dataclass(frozen=True)
class Header:
    """Start of a call, seen from one rank.

    Args:
        call: Number of the call on this channel; equal on all ranks.
        phase: One of `PHASES`.
        flags: Non-negative bit set that the backend defines.
        tokens: T of the sender.
        reason: None, or why the sender will not take part in this call.
        fatal: The sender will not take part in any later call either.
    """

    call: int
    phase: str
    flags: int = 0
    tokens: int = 0
    reason: str | None = None
    fatal: bool = False


def header_words(num_local_experts: int) -> int:
    """Words of one header with its counts."""
    return _COUNTS_AT + num_local_experts


def pack_headers(header: Header, counts: Tensor) -> Tensor:
    """One header for each of R peers.

    Args:
        header: The same for all peers.
        counts: [R, E_l] int64. Rows for each expert of each peer.

    Returns:
        [R, header_words(E_l)] int64.
    """
    text = (header.reason or "").encode()[: _REASON_WORDS * 8]
    if header.reason is not None and not text:
        text = b"?"
    fixed = [
        _MAGIC,
        header.call,
        PHASES.index(header.phase),
        header.flags,
        header.tokens,
        len(text),
        int(header.fatal),
        0,
    ]
    packed = torch.tensor(list(text.ljust(_REASON_WORDS * 8, b"\0")), dtype=torch.uint8, device="cpu").view(torch.int64)
    head = torch.cat([torch.tensor(fixed, device="cpu"), packed])
    return torch.cat([head.expand(counts.shape[0], -1), counts], dim=1)


def unpack_header(words: Tensor, peer: int) -> tuple[Header, Tensor]:
    """(header, counts [E_l]) of one row that `peer` sent.

    Raises:
        ConfigMismatch: the sender uses another layout, that is, another version of this package.
    """
    magic, call, phase, flags, tokens, length, fatal, _ = words[:_FIXED_WORDS].tolist()
    if magic != _MAGIC or not 0 <= phase < len(PHASES):
        raise ConfigMismatch(
            f"ep_rank {peer} sent a header this version does not know.",
            facts={"peer": peer},
            remedy="Install the same prime-kernels on every rank.",
        )
    reason = None
    if length:
        raw = bytes(words[_FIXED_WORDS:_COUNTS_AT].contiguous().view(torch.uint8).tolist())
        reason = raw[:length].decode(errors="replace")
    return Header(call, PHASES[phase], flags, tokens, reason, bool(fatal)), words[_COUNTS_AT:]
