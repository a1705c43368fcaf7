# SPDX-License-Identifier: Apache-2.0
"""What a cubin says about its own launch (kernels_src/common/launch_meta.cuh), and the spec that a launch goes by."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from prime_kernels.errors import ArtifactError
from prime_kernels.loader import abi, elf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prime_kernels.loader.arch import Target
    from prime_kernels.loader.manifest import ArgField

SYMBOL = "pk_launch_meta"
SCHEMA = 1
_FORMAT = struct.Struct("<8IQ4I4I")


@dataclass(frozen=True, slots=True)
class LaunchMeta:
    """The constant `pk_launch_meta` of a cubin: threads and dynamic shared bytes per CTA, CTAs per cluster and at least
    per SM, protocol, size and layout hash of the argument struct."""

    threads: int
    smem_bytes: int
    cluster: int
    min_ctas: int
    protocol: int
    args_bytes: int
    args_hash: int


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything a launch needs to know about a kernel, from a pack or from a compiled entry.

    Attributes:
        key: Kernel key.
        symbol: Name of the kernel in its cubin.
        arch: Target.
        meta: The cubin's own account.
        args: Fields of the argument struct.
        regs: Registers per thread.
        stack_bytes: Stack and spills per thread.
        origin: Where the cubin came from: "cu130/sm_90a", "cache", "read-only cache", "built".
    """

    key: str
    symbol: str
    arch: Target
    meta: LaunchMeta
    args: tuple[ArgField, ...]
    regs: int
    stack_bytes: int
    origin: str


def _refuse(key: str, what: str, code: str) -> ArtifactError:
    return ArtifactError(
        f"kernel {key} refused: {what}.",
        code=code,
        facts={"key": key, "problem": what},
        remedy="Reinstall: pip install --force-reinstall --no-cache-dir prime-kernels",
    )


def read(cubin: elf.Cubin, key: str) -> LaunchMeta:
    """The LaunchMeta of a parsed cubin.

    Raises:
        ArtifactError: It has none, or one of another schema or with impossible values (E11).
    """
    data = cubin.symbols.get(SYMBOL)
    if data is None or len(data) != _FORMAT.size:
        raise _refuse(key, f"its {SYMBOL} has {0 if data is None else len(data)} bytes, need {_FORMAT.size}", "E11")
    schema, threads, smem, cluster, min_ctas, protocol, args_bytes, _, args_hash, *_ = _FORMAT.unpack(data)
    if schema != SCHEMA:
        raise _refuse(key, f"its {SYMBOL} has schema {schema}, need {SCHEMA}", "E11")
    if not (1 <= threads <= 1024 and 1 <= cluster <= 16 and 0 < args_bytes <= abi.MAX_ARGS):
        raise _refuse(key, f"its {SYMBOL} says {threads} threads, {cluster} CTAs, {args_bytes} argument bytes", "E11")
    return LaunchMeta(threads, smem, cluster, min_ctas, protocol, args_bytes, args_hash)


def make_spec(
    data: bytes, *, key: str, symbol: str, arch: Target, args: tuple[ArgField, ...], args_hash: str, origin: str
) -> Spec:
    """Check a cubin against what its manifest promised and describe it.

    Args:
        data: The verified bytes.
        key: Kernel key.
        symbol: Kernel it must hold, and the only one.
        arch: Target it must be for.
        args: Argument fields of the manifest.
        args_hash: Layout hash of the manifest, 16 hex digits.
        origin: Goes into the spec.

    Raises:
        ArtifactError: Another kernel, target, argument layout or size (E05, E10, E11).
    """
    cubin = elf.inspect(data)
    if cubin.sm != arch.sm:
        raise _refuse(key, f"its cubin is for sm_{cubin.sm}, need {arch}", "E10")
    if list(cubin.kernels) != [symbol]:
        raise _refuse(key, f"its cubin holds {sorted(cubin.kernels)}, need {symbol}", "E10")
    facts, meta = cubin.kernels[symbol], read(cubin, key)
    if f"{meta.args_hash:016x}" != args_hash:
        what = f"its argument layout is {meta.args_hash:016x}, the manifest says {args_hash}: two builds are mixed"
        raise _refuse(key, what, "E11")
    if facts.param_bytes != meta.args_bytes:
        raise _refuse(key, f"it takes {facts.param_bytes} argument bytes, its {SYMBOL} says {meta.args_bytes}", "E11")
    end = max((field.offset + field.bytes for field in args), default=0)
    if end > meta.args_bytes:
        raise _refuse(key, f"its argument fields end at {end}, the struct has {meta.args_bytes} bytes", "E11")
    return Spec(key, symbol, arch, meta, args, facts.regs, facts.stack_bytes, origin)
