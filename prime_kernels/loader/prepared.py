# SPDX-License-Identifier: Apache-2.0
"""Launches that are packed once and made many times: between two times only addresses change.

`Kernel.launch` packs everything on every call. A `Prepared` holds the finished buffers of a sequence of launches, knows
every place where an address stands, and rewrites those whose slot moved.

Tensor maps are encoded by the launch itself, in the same call, as long as their addresses move. Once those of a launch
have stayed for another one, they are encoded into its arguments, and nothing is left to encode until one moves.
"""

from __future__ import annotations

from typing import NamedTuple

from prime_kernels.errors import LaunchError
from prime_kernels.loader import fork
from prime_kernels.loader.abi import INVALID_CONTEXT
from prime_kernels.loader.args import RECORD
from prime_kernels.loader.launch import Buffers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from prime_kernels.loader.launch import Dims, Kernel

    Words = memoryview[int]

_WORD = 8  # bytes of an address


class Address(int):
    """Bytes past an address that is known only when the launch is made: that of `slot`.

    An int, so that what computes with addresses serves both; a sum with bytes keeps the slot.
    """

    slot: str

    def __new__(cls, slot: str, offset: int = 0) -> Address:
        made = super().__new__(cls, offset)
        made.slot = slot
        return made

    def __add__(self, more: int) -> Address:
        return Address(self.slot, int(self) + int(more))

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"Address({self.slot!r}, {int(self)})"


class Step(NamedTuple):
    """What `Kernel.launch` takes, with an `Address` wherever the address is not known yet."""

    kernel: Kernel
    grid: Dims
    args: Mapping[str, Any]
    maps: Mapping[str, tuple[bytes, int]] | None = None


class Prepared:
    """Launches in order, packed but for the addresses of `slots`. For one thread at a time.

    Args:
        steps: The launches.
        slots: Names that an `Address` in them may have; `launch` takes an address for each, in this order.

    Raises:
        LaunchError: Wrong arguments, or an `Address` in a field that holds no pointer or of an unknown slot (E43).
    """

    def __init__(self, steps: Sequence[Step], slots: Sequence[str]) -> None:
        self._slots = tuple(slots)
        # Of every slot: the buffer as 8-byte words, the index in it, and what is added to the slot's address.
        self._places: list[list[tuple[Words, int, int]]] = [[] for _ in slots]
        # Of every slot: the launches with a tensor map at one of its addresses. Sets of launches are bits of a number.
        self._mapped = [0] * len(slots)
        self._held = [self._pack(index, step) for index, step in enumerate(steps)]
        self._calls = [(step.kernel.entry, held.address) for step, held in zip(steps, self._held, strict=True)]
        self._kernels = [step.kernel for step in steps]
        # Launches that encode their tensor maps; those of all others stand in their arguments.
        self._encoding = sum(1 << index for index, kernel in enumerate(self._kernels) if kernel.packer.map_names)
        self._stream = 0
        self._addresses: tuple[int | None, ...] = (None,) * len(self._slots)

    def _pack(self, which: int, step: Step) -> Buffers:
        kernel, maps = step.kernel, step.maps or {}
        key, packer, buffers = kernel.spec.key, kernel.packer, Buffers(kernel)
        buffers.pack(step.grid, step.args, maps)
        args_words, maps_words = buffers.args.cast("Q"), buffers.maps.cast("Q")
        for name, value in step.args.items():
            if isinstance(value, Address):
                if name not in packer.pointers:
                    raise self._refuse(key, f"{name} holds no pointer, but is given {value!r}")
                self._place(key, value, args_words, packer.pointers[name])
        for index, name in enumerate(packer.map_names):
            value = maps[name][1]
            if isinstance(value, Address):
                self._mapped[self._place(key, value, maps_words, index * RECORD.size)] |= 1 << which
        return buffers

    def _place(self, key: str, value: Address, words: Words, at: int) -> int:
        """Note where an address stands; returns the index of its slot."""
        if value.slot not in self._slots:
            raise self._refuse(key, f"{value!r} is of none of the slots {', '.join(self._slots)}")
        slot = self._slots.index(value.slot)
        self._places[slot].append((words, at // _WORD, int(value)))
        return slot

    def _refuse(self, key: str, what: str) -> LaunchError:
        return LaunchError(
            f"preparing {key}: {what}.",
            facts={"key": key, "slots": self._slots},
            remedy="Use an Address of a known slot, and only for pointers and tensor maps.",
        )

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Put the launches on a stream of the calling thread's current context, as `Kernel.launch` does.

        Args:
            stream: CUstream as a number.
            addresses: The address of every slot.

        Raises:
            LaunchError: Wrong addresses, or the driver refuses a tensor map or a launch (E43).
            BackendUnavailable: A grid does not fit (E40), or the process was forked (E60).
        """
        if fork.forked:
            fork.check()
        if stream != self._stream:
            for buffers in self._held:
                buffers.request.stream = stream
            self._stream = stream
        if addresses != self._addresses:
            self._move(addresses)
        elif self._encoding:
            self._settle(self._encoding)
        for index, (entry, request) in enumerate(self._calls):
            status = entry(request)
            if status == INVALID_CONTEXT:
                status = self._kernels[index].enter_context(request)
            if status:
                raise self._kernels[index].failure(status, self._held[index].request)

    def _move(self, addresses: tuple[int, ...]) -> None:
        before = self._addresses
        # Until all are written none counts as written: an error in between must not leave an old address for the next.
        self._addresses = (None,) * len(self._slots)
        moved = 0
        try:
            for places, mapped, old, new in zip(self._places, self._mapped, before, addresses, strict=True):
                if new != old:
                    moved |= mapped
                    for words, index, offset in places:
                        words[index] = new + offset
        except (TypeError, ValueError) as err:
            raise self._refuse(self._kernels[0].spec.key, f"{err}; got addresses {addresses}") from err
        if moved != self._encoding:
            self._unsettle(moved & ~self._encoding)
            self._settle(self._encoding & ~moved)
        self._addresses = addresses

    def _unsettle(self, launches: int) -> None:
        """Let these launches encode their tensor maps."""
        self._encoding |= launches
        for which, kernel in enumerate(self._kernels):
            if launches >> which & 1:
                self._held[which].request.num_maps = len(kernel.packer.map_names)

    def _settle(self, launches: int) -> None:
        """Encode the tensor maps of these launches into their arguments. One that is refused is left to the launch."""
        for which, kernel in enumerate(self._kernels):
            if launches >> which & 1:
                encode, request = kernel.host.lib.pk_host_encode_tensor_map, self._held[which].request
                records = range(request.maps, request.maps + request.num_maps * RECORD.size, RECORD.size)
                places = zip(records, kernel.packer.map_offsets.values(), strict=True)
                if not any(encode(record, request.args + offset) for record, offset in places):
                    request.num_maps = 0
                    self._encoding &= ~(1 << which)
