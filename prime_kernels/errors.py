# SPDX-License-Identifier: Apache-2.0
"""Every exception that prime_kernels raises on purpose.

A message says four things in this order: what is wrong, what was got, what is needed, what to do. The last one is the
`remedy`. `code` names the row of `CODES`, so that a log line
can be searched for; `facts` holds the values of the message for programs.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

CODES: dict[str, str] = {
    "E00": "unclassified failure",
    "E01": "no NVIDIA driver library (libcuda.so.1) on this host",
    "E02": "the driver is older than every kernel pack needs",
    "E03": "the GPU's compute capability is not covered",
    "E04": "the driver finds no binary for this GPU in a pack that claims to cover it",
    "E05": "the driver refuses a kernel image",
    "E06": "the driver refuses PTX, which is never shipped",
    "E07": "no backend can run this call here",
    "E08": "a required Python package is missing or too old",
    "E09": "this installation does not contain the part asked for",
    "E10": "an installed kernel pack is damaged",
    "E11": "kernel packs and host library come from different builds",
    "E12": "two distributions own the module prime_kernels",
    "E20": "a cache directory was refused",
    "E30": "just-in-time compilation is needed and NVRTC is missing or too old",
    "E31": "just-in-time compilation is needed and switched off",
    "E32": "NVRTC reported a compile error",
    "E40": "the kernel does not fit the resources of this GPU context",
    "E41": "a size or an option is not supported",
    "E42": "a tensor has the wrong shape, dtype, layout or device",
    "E43": "a kernel launch failed",
    "E44": "a kernel gave up a wait inside one GPU",
    "E50": "ranks of one group differ in version or configuration",
    "E51": "GPUs of one group cannot reach each other's memory",
    "E52": "a rank waited longer than the limit for another",
    "E53": "another rank of the group stopped with an error",
    "E60": "the process was forked after CUDA was initialised",
    "E61": "prepared weights are older than the weights they stand for",
    "E62": "the runtime is closed",
    "E70": "an environment variable has a bad value",
}
"""Meaning of every error code. A code keeps its meaning for ever; new ones are added."""


def _rebuild(kind: type[PrimeKernelsError], message: str, state: dict[str, Any]) -> PrimeKernelsError:
    return kind(message, **state)


class PrimeKernelsError(Exception):
    """Base of all errors of this package.

    Args:
        message: What is wrong, what was got and what is needed.
        code: A key of `CODES`; None takes the class's `default_code`.
        facts: The values of the message, for programs. Picklable, so that a launcher can send the error to rank 0.
        remedy: What to do, one sentence; appended to the message.
    """

    default_code = "E00"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        facts: Mapping[str, object] | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message = message
        self.code = code if code is not None else self.default_code
        self.facts: dict[str, object] = dict(facts or {})
        self.remedy = remedy
        super().__init__(message)

    def __str__(self) -> str:
        text = self.message if self.remedy is None else f"{self.message} {self.remedy}"
        return f"{text} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's own reduction replays positional arguments only and would lose code, facts and remedy.
        return _rebuild, (type(self), self.message, {"code": self.code, "facts": self.facts, "remedy": self.remedy})


class UnsupportedConfig(PrimeKernelsError, ValueError):
    """A size, dtype recipe or option that no variant supports; names the nearest legal value."""

    default_code = "E41"


class ShapeError(PrimeKernelsError, ValueError):
    """A tensor argument with the wrong shape, dtype, strides or device; raised before anything is launched."""

    default_code = "E42"


class DtypeError(ShapeError, TypeError):
    """The `ShapeError` of a tensor whose dtype is the fault; also a TypeError, as torch users expect."""


class BackendUnavailable(PrimeKernelsError, RuntimeError):
    """What was asked for cannot run in this process: no driver, wrong GPU, missing part."""

    default_code = "E07"


class ConfigMismatch(PrimeKernelsError, RuntimeError):
    """Ranks of one group disagree; names the ranks and the field."""

    default_code = "E50"


class PeerTimeout(PrimeKernelsError, RuntimeError):
    """A rank waited longer than the limit; names rank, peer, phase and seconds."""

    default_code = "E52"


class PeerAborted(PrimeKernelsError, RuntimeError):
    """Another rank stopped with an error of its own and said so; names that rank."""

    default_code = "E53"


class StaleWeightsError(PrimeKernelsError, RuntimeError):
    """Prepared (quantised) weights belong to an earlier weight generation."""

    default_code = "E61"


class RuntimeClosedError(PrimeKernelsError, RuntimeError):
    """A call on a `MegaMoERuntime` that was closed."""

    default_code = "E62"


class ArtifactError(PrimeKernelsError, RuntimeError):
    """A kernel pack, cache entry or manifest fails its digest, schema or architecture check."""

    default_code = "E10"


class CompileError(PrimeKernelsError, RuntimeError):
    """Just-in-time compilation failed or is not possible."""

    default_code = "E32"


class LaunchError(PrimeKernelsError, RuntimeError):
    """The CUDA driver refused to load or to launch a kernel."""

    default_code = "E43"
