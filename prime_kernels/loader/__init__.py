# SPDX-License-Identifier: Apache-2.0
"""From a kernel's name to something that can be launched: packs, cache, just-in-time compiler, driver.

Standard library only; nothing here imports torch. `load_kernel` is the one entry the rest of the package needs.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from prime_kernels.loader.args import tensor_map as tensor_map
    from prime_kernels.loader.kernels import load_kernel as load_kernel
    from prime_kernels.loader.launch import Kernel as Kernel

_HOME = {"load_kernel": "kernels", "Kernel": "launch", "tensor_map": "args"}
__all__ = ["Kernel", "load_kernel", "tensor_map"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
