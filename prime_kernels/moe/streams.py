# SPDX-License-Identifier: Apache-2.0
"""The current CUDA stream as a number, without the object around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
