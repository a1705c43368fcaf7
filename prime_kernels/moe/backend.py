# SPDX-License-Identifier: Apache-2.0
"""What a backend of the expert layer is: pure functions over validated, detached, contiguous tensors."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from prime_kernels.moe.abort import PeerChannel
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.peers.base import PeerMemory

    # Packed [E_l, 2I, H] (gate rows, then up rows), or (w_gate, w_up) each [E_l, I, H]. Both are zero-copy.
    Weights: TypeAlias = Tensor | tuple[Tensor, Tensor]


class ForwardResult(NamedTuple):
    """What a forward returns. None of the tensors alias each other, an input or a workspace."""

    y: Tensor  # [T, H] x.dtype
    plan: Tensor  # [plan_numel] int32, opaque to everyone but the backend that made it
    tokens_per_expert: Tensor  # [E] int32, routes this rank sent to each global expert
    recv_per_local_expert: Tensor  # [E_l] int32, rows this rank computed per local expert
    preact: Tensor | None  # preact_shape(...) x.dtype unless save == "inputs"


class BackwardResult(NamedTuple):
    """Gradients; None exactly where `Needs` says so."""

    dx: Tensor | None  # [T, H] x.dtype
    dtopk_weights: Tensor | None  # [T, K] fp32; 0 where the id is -1
    dw_gate_up: Weights | None  # same form as the weights, `wgrad_dtype`; exact zeros for empty experts
    dw_down: Tensor | None  # [E_l, H, I] `wgrad_dtype`


class Needs(NamedTuple):
    """Which gradients are asked for; the others must not be computed."""

    x: bool
    topk_weights: bool
    w_gate_up: bool
    w_down: bool


class RuntimeView(Protocol):
    """The part of `MegaMoERuntime` a backend may read."""

    peers: PeerMemory | None
    """Memory of the ranks of a group; given with virtual ranks, else what `open` of a backend that has any sets."""

    @property
    def config(self) -> MegaMoEConfig: ...
    @property
    def group(self) -> ProcessGroup | None: ...
    @property
    def ep_rank(self) -> int: ...
    @property
    def ep_size(self) -> int: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def channel(self) -> PeerChannel | None:
        """The line to the peers; None at ep_size 1."""
        ...


class Backend(Protocol):
    """One implementation of the expert layer. Subclass it to inherit the default shapes and hooks.

    `forward` and `backward` are functional and collective over the runtime's group: the sequence of collectives must
    not depend on T, on the ids or on `needs`, because those may differ per rank.
    `prepared` is passed only when the caller gave prepared weights, so a backend without quantised recipes may omit it.
    """

    name: str  # "reference" | "grouped" | "cuda"

    def unsupported_reason(self, config: MegaMoEConfig, *, ep_size: int, device: torch.device) -> str | None:
        """Why this config is not implemented, as a sentence that names the field; None when it is."""
        ...

    def unavailable_reason(self, device: torch.device, config: MegaMoEConfig) -> str | None:
        """Why this machine cannot run it: device, driver, or the engine the config names; None when it can."""
        return None

    def dtypes(self, config: MegaMoEConfig) -> tuple[torch.dtype, ...]:
        """dtypes accepted for x and the weights."""
        import torch

        return (torch.bfloat16,)

    def plan_numel(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int) -> int:
        """Length of the plan; static, since fake tensors need it. `num_tokens` may be symbolic."""
        ...

    def preact_shape(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int, save: str) -> tuple[int, int]:
        """Shape of `ForwardResult.preact`; static. `save` is "preact" or "full"; `num_tokens` may be symbolic."""
        return preact_rows(config, num_tokens=num_tokens, ep_size=ep_size), 2 * config.intermediate

    def forward(
        self,
        runtime: RuntimeView,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_gate_up: Weights,
        w_down: Tensor,
        *,
        save: str,
        prepared: tuple[Tensor, ...] | None = None,
    ) -> ForwardResult: ...

    def backward(
        self,
        runtime: RuntimeView,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_gate_up: Weights,
        w_down: Tensor,
        plan: Tensor,
        preact: Tensor | None,
        *,
        needs: Needs,
        wgrad_dtype: torch.dtype | None,
        prepared: tuple[Tensor, ...] | None = None,
    ) -> BackwardResult: ...

    def open(self, runtime: RuntimeView) -> None:
        """Collective set-up after the ranks agreed on the config (arenas, first contact between peers)."""

    def close(self, runtime: RuntimeView, *, abort: bool) -> None:
        """Release what `open` took. Not collective when `abort`."""

    def warmup(self, runtime: RuntimeView, num_tokens: tuple[int, ...]) -> None:
        """Load or compile everything calls of these token counts need."""

    def check(self, runtime: RuntimeView) -> None:
        """Raise an error the device reported since the last check. No device sync."""


def preact_rows(config: MegaMoEConfig, *, num_tokens: int, ep_size: int) -> int:
    """Rows of the saved pre-activations: T*K when this rank holds every expert, the local pool's capacity otherwise.

    With peers the rows received are known on the device only, so a bounded pool is saved and rows beyond it are
    recomputed in backward. `num_tokens` may be a symbolic integer: integer arithmetic only.
    """
    routes = num_tokens * config.topk
    if ep_size == 1:
        return routes
    factor = Fraction(config.capacity_factor).limit_denominator(1024)
    scaled = (routes * factor.numerator + factor.denominator - 1) // factor.denominator
    return (scaled + 127) // 128 * 128 + 128 * (config.num_experts // ep_size)
