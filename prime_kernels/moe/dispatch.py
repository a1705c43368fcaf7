# SPDX-License-Identifier: Apache-2.0
"""Whether an operator call has to go through torch's dispatcher to mean what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# What an eager call consists of, when nothing but memory stands behind its tensors. Subclasses are not among them.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), tuple, list, int, str, torch.dtype})
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _profiler = torch._C._are_functorch_transforms_active, torch._C._autograd._profiler_enabled


def is_observed(args: Sequence[object]) -> bool:
    """Whether the dispatcher would do more with these arguments than find the implementation for their device.

    True under a dispatch mode (selective checkpointing, counters, fake tensors), a function mode, a functorch transform
    or the profiler, and for a tensor of a class of its own. So it is for a first argument whose bits stand for their
    negative or for zeros: autograd may hand out such a gradient; contiguous inputs of a call cannot be made such.
    """
    if _dispatch_modes() or _function_modes() or _transforms() or _profiler():
        return True
    first: Any = args[0]
    return not _PLAIN.issuperset(map(type, args)) or first.is_neg() or first._is_zerotensor()
