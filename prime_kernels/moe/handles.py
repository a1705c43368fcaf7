# SPDX-License-Identifier: Apache-2.0
"""Runtimes by number, which is how op schemas name them, and handles of optimizer hooks."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from prime_kernels.errors import RuntimeClosedError, StaleWeightsError, UnsupportedConfig

if TYPE_CHECKING:
    from prime_kernels.moe.runtime import MegaMoERuntime

# Numbers that are no runtime: what torch.compile traces when it may not go on. A Python exception in traced code would
# break the graph and run the call eagerly; the fake of an op that gets one of these ends the compilation. Dynamo shows
# the message only, hence no separate remedy.
NO_RUNTIME, TRACED_MAIN_GRAD, TRACED_OPTIONS = 0, -1, -2
_REFUSALS = {
    NO_RUNTIME: (
        "runtime",
        "mega_moe got runtime=None inside torch.compile, a checkpointed region or a CUDA graph capture, where creating "
        "one would differ between ranks or replays. Call MegaMoERuntime.create(config, group=...) once before the "
        "first step and pass it as runtime=.",
    ),
    TRACED_MAIN_GRAD: (
        "wgrad",
        'wgrad="main_grad" was traced by torch.compile, which cannot see the accumulation in place. Use '
        'wgrad="autograd" under torch.compile, or exclude this layer with torch.compiler.disable.',
    ),
    TRACED_OPTIONS: (
        "precision",
        "mega_moe was traced with a precision, save or wgrad that does not fit the runtime. Pass the runtime's "
        "precision in every call; the same call in eager mode names the argument and its values.",
    ),
}
_ids = itertools.count(1)
_open: weakref.WeakValueDictionary[int, MegaMoERuntime] = weakref.WeakValueDictionary()


def lookup(runtime_id: int) -> MegaMoERuntime:
    """The open runtime of this id: ops know runtimes by number only, because schemas hold no objects."""
    runtime = _open.get(runtime_id)
    if runtime is not None:
        return runtime
    if runtime_id in _REFUSALS:
        argument, message = _REFUSALS[runtime_id]
        raise UnsupportedConfig(message, facts={"argument": argument})
    raise RuntimeClosedError(
        f"the MegaMoERuntime with id {runtime_id} is closed or no longer referenced.",
        facts={"id": runtime_id},
        remedy="Keep the runtime open until the last backward has run.",
    )


def register(runtime: MegaMoERuntime) -> int:
    """Give a runtime its number. The table does not keep it alive."""
    runtime_id = next(_ids)
    _open[runtime_id] = runtime
    return runtime_id


def forget(runtime_id: int) -> None:
    """Take a closed runtime out of the table."""
    _open.pop(runtime_id, None)


def require_generation(generation: int, runtime: MegaMoERuntime) -> None:
    """Raise StaleWeightsError unless prepared weights of this generation are the current ones."""
    if generation != runtime.weight_generation:
        raise StaleWeightsError(
            f"prepared weights are of generation {generation}; the runtime is at {runtime.weight_generation}.",
            facts={"generation": generation, "current": runtime.weight_generation},
            remedy="Call prepare_weights(..., out=prepared) after each optimizer step.",
        )


class OptimizerHooks:
    """Handles of optimizer hooks; `remove()` takes them off."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
