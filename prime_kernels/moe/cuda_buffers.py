# SPDX-License-Identifier: Apache-2.0
"""Operands of launches that are prepared before their tensors exist, and the one allocation of a call's temporaries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prime_kernels.loader.prepared import Address

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGN = 256  # bytes; what the allocator of torch guarantees at least, so that a temporary is placed as a tensor is


class Operand(Protocol):
    """What a launch asks of a contiguous tensor; a `Buffer` answers the same."""

    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous tensor to come: its address, or where that will be taken from, its shape and bytes per element."""

    at: int
    shape: tuple[int, ...]
    itemsize: int = 2

    @classmethod
    def of(cls, slot: str, *shape: int, itemsize: int = 2) -> Buffer:
        """The tensor whose address the call puts into this slot."""
        return cls(Address(slot), shape, itemsize)

    def data_ptr(self) -> int:
        return self.at

    def element_size(self) -> int:
        return self.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def row(self, index: int) -> Buffer:
        """One entry of the first dimension."""
        rest = self.shape[1:]
        return Buffer(self.at + index * math.prod(rest) * self.itemsize, rest, self.itemsize)


class Workspace:
    """Places the temporaries of one call behind each other.

    Attributes:
        bytes: Size of the allocation so far.
    """

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self.bytes = 0

    def take(self, *shape: int, itemsize: int = 2) -> Buffer:
        """A temporary that overlaps no other."""
        at = self.bytes
        self.bytes += -(-math.prod(shape) * itemsize // _ALIGN) * _ALIGN
        return Buffer(Address(self._slot, at), shape, itemsize)
