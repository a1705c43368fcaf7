# SPDX-License-Identifier: Apache-2.0
"""Fused mixture-of-experts training kernels: `prime_kernels.mega_moe(...)`.

Importing this package imports no torch, opens no GPU and writes nothing: every public name is resolved at first use.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from prime_kernels import errors as errors
    from prime_kernels.moe.config import MegaMoEConfig as MegaMoEConfig
    from prime_kernels.moe.config import SwiGLU as SwiGLU
    from prime_kernels.moe.config import unsupported_reason as unsupported_reason
    from prime_kernels.moe.experts import MegaMoEExperts as MegaMoEExperts
    from prime_kernels.moe.op import mega_moe as mega_moe
    from prime_kernels.moe.plan import plan_memory as plan_memory
    from prime_kernels.moe.runtime import MegaMoERuntime as MegaMoERuntime
    from prime_kernels.moe.weights import convert_gate_up as convert_gate_up
    from prime_kernels.moe.weights import prepare_weights as prepare_weights
    from prime_kernels.registry import KERNELS as KERNELS
    from prime_kernels.registry import is_available as is_available
    from prime_kernels.registry import load as load
    from prime_kernels.registry import status as status
    from prime_kernels.registry import unavailable_reason as unavailable_reason

# Name -> module that defines it. No module has the name of what it exports: a submodule `mega_moe` would replace the
# function of that name in this namespace as soon as anything imports it.
_HOME = {
    "KERNELS": "registry",
    "MegaMoEConfig": "moe.config",
    "MegaMoEExperts": "moe.experts",
    "MegaMoERuntime": "moe.runtime",
    "SwiGLU": "moe.config",
    "convert_gate_up": "moe.weights",
    "is_available": "registry",
    "load": "registry",
    "mega_moe": "moe.op",
    "plan_memory": "moe.plan",
    "prepare_weights": "moe.weights",
    "status": "registry",
    "unavailable_reason": "registry",
    "unsupported_reason": "moe.config",
}
_MODULES = ("errors", "moe")

__all__ = [
    "KERNELS",
    "MegaMoEConfig",
    "MegaMoEExperts",
    "MegaMoERuntime",
    "SwiGLU",
    "__version__",
    "convert_gate_up",
    "errors",
    "is_available",
    "load",
    "mega_moe",
    "plan_memory",
    "prepare_weights",
    "status",
    "unavailable_reason",
    "unsupported_reason",
]


def __getattr__(name: str) -> Any:
    # PEP 562: called only for names that are not set yet; the result is stored so that each is resolved once.
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
