# SPDX-License-Identifier: Apache-2.0
"""`MegaMoEExperts`: the expert weights of one layer as an nn.Module, for models without a framework around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe.config import unsupported_reason
from prime_kernels.moe.limits import require_choice
from prime_kernels.moe.op import MegaMoEStats, mega_moe
from prime_kernels.moe.runtime import MegaMoERuntime
from prime_kernels.moe.weights import PreparedExpertWeights, prepare_weights

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.config import MegaMoEConfig

WeightsPolicy = Literal["per_step", "per_gather", "on_call"]


class MegaMoEExperts(nn.Module):
    """This rank's experts: `forward(x, topk_ids, topk_weights)` is `mega_moe` with the module's weights.

    Args:
        config: The layer; shared by all layers of a runtime.
        ep_size: Ranks of the expert-parallel group; this module holds num_experts / ep_size experts.
        weights_policy: When quantised recipes quantise: "per_step" once per weight generation, kept at fixed
            addresses; "per_gather" at every call into one buffer; "on_call" inside the op, keeping nothing.
        device: Where the parameters are made; "meta" works.
        dtype: dtype of the parameters.

    Attributes:
        w_gate_up: [E_l, 2I, H] parameter, gate rows, then up rows.
        w_down: [E_l, H, I] parameter.

    Raises:
        UnsupportedConfig: a config that no backend runs with this ep_size.

    Source: this file.
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        *,
        ep_size: int = 1,
        weights_policy: WeightsPolicy = "per_step",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        require_choice("weights_policy", weights_policy, get_args(WeightsPolicy))
        reason = unsupported_reason(config, ep_size=ep_size)
        if reason is not None:
            raise UnsupportedConfig(reason, facts={"ep_size": ep_size})
        local = config.num_experts // ep_size
        self.config = config
        self.ep_size = ep_size
        self.weights_policy = weights_policy
        sizes = (local, 2 * config.intermediate, config.hidden), (local, config.hidden, config.intermediate)
        self.w_gate_up = nn.Parameter(torch.empty(*sizes[0], device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(*sizes[1], device=device, dtype=dtype))
        # Plain attributes: nothing of the runtime or of a call enters the state dict.
        self._runtime: MegaMoERuntime | None = None
        self._prepared: PreparedExpertWeights | None = None
        self._stats: MegaMoEStats | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan_in), like nn.Linear.

        Source: this file.
        """
        with torch.no_grad():
            for weight in (self.w_gate_up, self.w_down):
                bound = weight.shape[2] ** -0.5
                weight.uniform_(-bound, bound)
        if self._runtime is not None:
            self._runtime.advance_weight_generation()

    def bind(self, runtime: MegaMoERuntime) -> None:
        """Use this runtime from now on.

        Args:
            runtime: Made with a config of the same sizes.

        Raises:
            UnsupportedConfig: sizes, recipe or number of local experts differ.

        Source: this file.
        """
        for field in ("num_experts", "topk", "hidden", "intermediate", "precision", "activation"):
            mine, theirs = getattr(self.config, field), getattr(runtime.config, field)
            if mine != theirs:
                raise UnsupportedConfig(
                    f"the runtime has {field}={theirs!r}; this module was made with {mine!r}.",
                    facts={"argument": "runtime", "field": field},
                    remedy="Create module and runtime from one MegaMoEConfig.",
                )
        if runtime.ep_size != self.ep_size:
            raise UnsupportedConfig(
                f"the runtime has ep_size {runtime.ep_size}; this module was made with {self.ep_size}.",
                facts={"argument": "runtime"},
                remedy="Pass ep_size= to MegaMoEExperts.",
            )
        self._runtime = runtime
        self._prepared = None

    @property
    def last_stats(self) -> MegaMoEStats | None:
        """Counts of the latest forward; None before it."""
        return self._stats

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run the experts; arguments, result and errors as in `mega_moe`.

        Args:
            x: [T, H] in the parameters' dtype.
            topk_ids: [T, K] int32 or int64.
            topk_weights: [T, K] fp32, bf16 or fp16.

        Returns:
            [T, H] in x.dtype.

        Raises:
            UnsupportedConfig: no runtime was bound and the experts are spread over ranks.

        Source: this file.
        """
        runtime = self._require_runtime()
        result = mega_moe(
            x,
            topk_ids,
            topk_weights,
            self.w_gate_up,
            self.w_down,
            runtime=runtime,
            precision=self.config.precision,
            prepared=self._current_weights(runtime),
            return_stats=True,
        )
        assert isinstance(result, tuple)
        y, self._stats = result
        return y

    def _require_runtime(self) -> MegaMoERuntime:
        if self._runtime is None:
            raise UnsupportedConfig(
                "this MegaMoEExperts has no runtime.",
                facts={"argument": "runtime"},
                remedy="Call experts.bind(MegaMoERuntime.create(config, group=...)) once before the first step.",
            )
        return self._runtime

    def _current_weights(self, runtime: MegaMoERuntime) -> PreparedExpertWeights | None:
        if not runtime.config.quantized or self.weights_policy == "on_call":
            return None
        stale = self._prepared is None or not self._prepared.is_current(runtime)
        if stale or self.weights_policy == "per_gather":
            self._prepared = prepare_weights(self.w_gate_up, self.w_down, runtime=runtime, out=self._prepared)
        return self._prepared
