# SPDX-License-Identifier: Apache-2.0
"""`MegaMoEConfig`: one description of the layer, checked on construction. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe.limits import require_choice, require_int, require_multiple, require_number

if TYPE_CHECKING:
    import torch

Precision = Literal["bf16", "fp8", "fp8_bwd", "mxfp8"]
Save = Literal["preact", "inputs", "full"]
BackendName = Literal["auto", "cuda", "grouped", "reference"]
Engine = Literal["torch", "deep_gemm"]

MAX_TOPK = 32
MAX_EXPERTS = 65535  # expert ids travel as u16
MAX_TOKENS = 2**24 - 1  # token indices travel as 24 bits beside an 8-bit rank
MAX_EP_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiGLU:
    """h = g * sigmoid(alpha * g) * (u + up_offset), with g and u clamped first when `clamp` is set.

    Args:
        clamp: g is cut at `+clamp` from above, u at `-clamp` and `+clamp`; the gradient outside is 0. None: no clamp.
        alpha: Slope of the sigmoid; 1.0 is SiLU.
        up_offset: Added to u after the clamp.
    """

    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.clamp is not None:
            require_number("activation.clamp", self.clamp, low=0.0, low_open=True)
        require_number("activation.alpha", self.alpha)
        require_number("activation.up_offset", self.up_offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegaMoEConfig:
    """Everything that all ranks of an expert-parallel group must agree on.

    Dims: E experts (global), K routes per token, H model width, I expert width, T tokens on this rank.

    Args:
        num_experts: E, over all ranks of the group.
        topk: K, routes per token; 1..32. May exceed E: a token may name an expert twice.
        hidden: H, model width. Multiple of 64 (bf16) or 128 (quantised recipes).
        intermediate: I, width of one expert's FFN (one of gate, up). Same multiples.
        max_tokens_per_rank: Cap on T, tokens; T may be anything from 0 to it.
        precision: "bf16"; "fp8" (1x128 activations, 128x128 weights); "fp8_bwd" (bf16 forward); "mxfp8" (1x32).
        activation: `SwiGLU(...)`.
        capacity_factor: Size of the local row pool in units of T*K. Not used by "cuda": its pool holds the worst case.
        save: What forward keeps for backward: "preact", "inputs" (recompute the gate/up GEMM) or "full" (rows too).
        wgrad_dtype: dtype of weight gradients, kept by leaves and DTensor leaves. None follows the weights.
        num_sms: SMs the kernels may use. None: all but `reserve_sms`.
        reserve_sms: SMs left to others. None: 0 with one rank, 8 with more.
        deterministic: Same inputs, same bits. False permits, never promises, something faster.
        peer_timeout_s: Seconds a rank waits for another before it gives up.
        backend: "auto" is "cuda" for CUDA devices and "reference" for CPU.
        engine: GEMM engine of the "grouped" backend.
        allow_fallback: Let "auto" use the reference on a GPU when no fused kernel fits; logged once.
        allow_multi_stream: Accept calls from several CUDA streams. The order must then be the same on every rank.
        validate: Check ids on the host before launch; costs a device sync. Always on in the reference.
        debug: Extra checks, such as prepared weights against the weights they came from.

    Raises:
        UnsupportedConfig: a field is outside what the package does on any machine; the message names it.

    Source: this file; limits of values in limits.py.
    """

    num_experts: int
    topk: int
    hidden: int
    intermediate: int
    max_tokens_per_rank: int
    precision: Precision = "bf16"
    activation: SwiGLU = field(default_factory=SwiGLU)
    capacity_factor: float = 2.0
    save: Save = "preact"
    wgrad_dtype: torch.dtype | None = None
    num_sms: int | None = None
    reserve_sms: int | None = None
    deterministic: bool = True
    peer_timeout_s: float = 300.0
    backend: BackendName = "auto"
    engine: Engine = "torch"
    allow_fallback: bool = False
    allow_multi_stream: bool = False
    validate: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        require_choice("precision", self.precision, get_args(Precision))
        require_choice("save", self.save, get_args(Save))
        require_choice("backend", self.backend, get_args(BackendName))
        require_choice("engine", self.engine, get_args(Engine))
        require_int("num_experts", self.num_experts, low=1, high=MAX_EXPERTS)
        require_int("topk", self.topk, low=1, high=MAX_TOPK)
        require_multiple("hidden", self.hidden, self.size_multiple, self.precision)
        require_multiple("intermediate", self.intermediate, self.size_multiple, self.precision)
        _require_tokens(self)
        if not isinstance(self.activation, SwiGLU):
            raise UnsupportedConfig(
                f"activation is {self.activation!r}; need a SwiGLU.",
                facts={"argument": "activation"},
                remedy="Pass SwiGLU(clamp=..., alpha=..., up_offset=...); GELU and ReLU experts are not supported.",
            )
        require_number("capacity_factor", self.capacity_factor, low=0.0, low_open=True)
        require_number("peer_timeout_s", self.peer_timeout_s, low=0.0, low_open=True)
        if self.num_sms is not None:
            require_int("num_sms", self.num_sms, low=2)
        if self.reserve_sms is not None:
            require_int("reserve_sms", self.reserve_sms, low=0)
        if str(self.wgrad_dtype) not in ("None", "torch.float32", "torch.bfloat16", "torch.float16", "torch.float64"):
            raise UnsupportedConfig(
                f"wgrad_dtype is {self.wgrad_dtype!r}; need None, torch.float32 or the weights' dtype.",
                facts={"argument": "wgrad_dtype"},
                remedy="Use None to follow the weights or torch.float32 for master gradients.",
            )
        for name in ("deterministic", "allow_fallback", "allow_multi_stream", "validate", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedConfig(
                    f"{name} is {getattr(self, name)!r}; need True or False.", facts={"argument": name}
                )

    @property
    def size_multiple(self) -> int:
        """What hidden and intermediate must divide by: the K step of the GEMMs, or the scale block."""
        return 64 if self.precision == "bf16" else 128

    @property
    def quantized(self) -> bool:
        """True when some GEMM operand has fewer than 16 bits."""
        return self.precision != "bf16"

    def reserved_sms(self, ep_size: int) -> int:
        """SMs left to others: `reserve_sms`, or its default for this group size."""
        if self.reserve_sms is not None:
            return self.reserve_sms
        return 0 if ep_size == 1 else 8

    def replace(self, **changes: Any) -> MegaMoEConfig:
        """A copy with some fields changed, checked like a new one."""
        unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(self)})
        if unknown:
            raise UnsupportedConfig(
                f"MegaMoEConfig has no field {unknown[0]!r}.",
                facts={"argument": unknown[0]},
                remedy="Fields: " + ", ".join(f.name for f in dataclasses.fields(self)) + ".",
            )
        return dataclasses.replace(self, **changes)


def _require_tokens(config: MegaMoEConfig) -> None:
    tokens = config.max_tokens_per_rank
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > MAX_TOKENS:
        # x, dy and combine slots of one rank's arena; the exact figure needs ep_size (`plan_memory`).
        arena_bytes = tokens * config.hidden * 2 * (2 + config.topk)
        raise UnsupportedConfig(
            f"max_tokens_per_rank={tokens} needs {arena_bytes} bytes of peer memory per rank; "
            f"the largest supported value is {MAX_TOKENS}.",
            code="E41",
            facts={"argument": "max_tokens_per_rank", "got": tokens, "high": MAX_TOKENS, "bytes": arena_bytes},
            remedy="Pass the largest number of tokens one rank feeds to one call.",
        )
    require_int("max_tokens_per_rank", tokens, low=1, high=MAX_TOKENS)


def unsupported_reason(
    config: MegaMoEConfig, *, ep_size: int = 1, device: torch.device | str | None = None
) -> str | None:
    """Why this config cannot run with this group size on this kind of device; None when it can.

    Pure: loads no kernel. With `device=None` it asks for no device either, and imports no torch.

    Args:
        config: The config; its own fields were checked when it was made.
        ep_size: Ranks of the expert-parallel group.
        device: Device to ask about, e.g. "cuda:0". None: only what holds on every device.

    Returns:
        The sentence that `MegaMoERuntime.create` would raise, or None.

    Source: this function; backends add theirs (`Backend.unsupported_reason`).
    """
    name = config.backend
    if name == "auto" and str(device).startswith("cuda") and not config.allow_fallback:
        name = "cuda"
    reason = common_reason(config, ep_size=ep_size, backend=name)
    if reason is not None or device is None:
        return reason
    from prime_kernels.moe.backends import select_backend

    return select_backend(config, ep_size=ep_size, device=device).reason


def common_reason(config: MegaMoEConfig, *, ep_size: int, backend: str = "auto") -> str | None:
    """The part of `unsupported_reason` that holds on every device."""
    if not isinstance(ep_size, int) or not 1 <= ep_size <= MAX_EP_SIZE:
        return f"ep_size is {ep_size!r}; need an integer in 1..{MAX_EP_SIZE}."
    if config.num_experts % ep_size:
        return (
            f"num_experts={config.num_experts} is not divisible by ep_size={ep_size}. "
            "Use a group whose size divides the number of experts."
        )
    if backend == "cuda" and config.quantized:
        return (
            f"precision={config.precision!r} has no fused CUDA kernel in this version. "
            'Use precision="bf16", or backend="reference" for an emulation.'
        )
    return None
