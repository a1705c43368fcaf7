# SPDX-License-Identifier: Apache-2.0
"""The current CUDA stream as a number, without the object around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prime_kernels.errors import UnsupportedConfig

if TYPE_CHECKING:
    from collections.abc import Callable

# What torch's own compiled code asks. It takes a tenth of the time of `current_stream`, which the op pays twice per
# call; builds of torch without it, without CUDA among them, answer through the public function.
_raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """CUstream of the stream that is current on this device."""
    if _raw is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw(device.index)


def require_stream(device: torch.device, seen: int | None, runtime_id: int) -> int | None:
    """The one stream of a runtime's calls: `seen`, or if that is None the current one.

    Raises:
        UnsupportedConfig: the current stream is another one.
    """
    stream = current_stream(device)
    if stream == seen or torch.cuda.is_current_stream_capturing():
        return seen
    if seen is None:
        return stream
    raise UnsupportedConfig(
        f"runtime {runtime_id} was used on CUDA stream {seen:#x} and now on {stream:#x}; "
        "calls on one runtime share its workspace and must be ordered.",
        facts={"argument": "stream"},
        remedy="Call on one stream, or set allow_multi_stream=True and keep the same order on every rank.",
    )
