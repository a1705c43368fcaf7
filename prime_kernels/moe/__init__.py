# SPDX-License-Identifier: Apache-2.0
"""The fused mixture-of-experts layer: op, config, runtime, weights, checkpoint policy, reference."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from prime_kernels.moe.config import MegaMoEConfig as MegaMoEConfig
    from prime_kernels.moe.config import SwiGLU as SwiGLU
    from prime_kernels.moe.config import unsupported_reason as unsupported_reason
    from prime_kernels.moe.experts import MegaMoEExperts as MegaMoEExperts
    from prime_kernels.moe.op import MegaMoEStats as MegaMoEStats
    from prime_kernels.moe.op import mega_moe as mega_moe
    from prime_kernels.moe.plan import MemoryPlan as MemoryPlan
    from prime_kernels.moe.plan import plan_memory as plan_memory
    from prime_kernels.moe.runtime import MegaMoERuntime as MegaMoERuntime
    from prime_kernels.moe.runtime import RuntimeStats as RuntimeStats
    from prime_kernels.moe.weights import PreparedExpertWeights as PreparedExpertWeights
    from prime_kernels.moe.weights import convert_gate_up as convert_gate_up
    from prime_kernels.moe.weights import prepare_weights as prepare_weights

_HOME = {
    "MegaMoEConfig": "config",
    "MegaMoEExperts": "experts",
    "MegaMoERuntime": "runtime",
    "MegaMoEStats": "op",
    "MemoryPlan": "plan",
    "PreparedExpertWeights": "weights",
    "RuntimeStats": "runtime",
    "SwiGLU": "config",
    "convert_gate_up": "weights",
    "mega_moe": "op",
    "plan_memory": "plan",
    "prepare_weights": "weights",
    "unsupported_reason": "config",
}
_MODULES = ("checkpoint",)

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    # PEP 562: `moe.config` and `moe.plan` stay importable without torch.
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
