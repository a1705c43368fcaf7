# SPDX-License-Identifier: Apache-2.0
"""What kernels found wrong after the call had returned: a record per device in memory that the host reads for free."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, NamedTuple

from prime_kernels.errors import LaunchError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor

_WORDS = 8  # FaultRecord of kernels_src/common/fault.cuh
_CODE, _CTA, _BAD_GROUPS = 0, 1, 4


class _Record(NamedTuple):
    memory: Tensor  # pinned; owns what `words` looks at
    words: ctypes.Array[ctypes.c_uint32]


_lock = threading.Lock()
_records: dict[int, _Record] = {}


def record_address(device: int) -> int:
    """Where kernels on a device leave their faults. The first call on a device allocates pinned memory.

    Raises:
        ShapeError, LaunchError: An earlier call left a fault there; it is reported once.
    """
    found = _records.get(device)
    if found is None:
        with _lock:
            found = _records.setdefault(device, _allocate())
    _raise_if_any(found)
    return found.memory.data_ptr()


def _allocate() -> _Record:
    import torch

    memory = torch.zeros(_WORDS, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    return _Record(memory, (ctypes.c_uint32 * _WORDS).from_address(memory.data_ptr()))


def _raise_if_any(found: _Record) -> None:
    words = found.words
    code, bad = words[_CODE], words[_BAD_GROUPS]
    if not (code or bad):
        return
    cta = words[_CTA]
    ctypes.memset(words, 0, ctypes.sizeof(words))
    if code:
        raise LaunchError(
            f"a grouped GEMM gave up after 20 s (CTA {cta}); what it was to write is not valid.",
            code="E44",
            facts={"cta": cta},
            remedy="Report it with `prime-kernels doctor --json`.",
        )
    raise ShapeError(
        f"grouped_layout of an earlier call was wrong in {bad} places: a group id that does not exist, a group in "
        "several pieces, one that does not start at a multiple of 64 rows, or rows outside the operands. "
        "What that call wrote is not valid.",
        facts={"argument": "grouped_layout", "got": bad},
        remedy="Call prime_kernels.deep_gemm.check() after each call to find the one.",
    )


def check(device: int | None = None) -> None:
    """Wait for a device and raise what its kernels have found wrong since the last check.

    Group layouts live on the device and calls do not wait for it, so a bad one is reported by the next call, or here.

    Args:
        device: CUDA device index; None takes the current one.

    Raises:
        ShapeError: The group layout of an earlier call was wrong (E42).
        LaunchError: A kernel gave up a wait (E44).
    """
    import torch

    index = torch.cuda.current_device() if device is None else device
    torch.cuda.synchronize(index)
    found = _records.get(index)
    if found is not None:
        _raise_if_any(found)
