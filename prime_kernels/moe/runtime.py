# SPDX-License-Identifier: Apache-2.0
"""`MegaMoERuntime`: what all layers of one expert-parallel group share. Holds no tensor of any call."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from prime_kernels.errors import PeerTimeout, PrimeKernelsError, RuntimeClosedError
from prime_kernels.moe.abort import PeerChannel
from prime_kernels.moe.agreement import agree
from prime_kernels.moe.backends import log_fallback, select_backend
from prime_kernels.moe.handles import OptimizerHooks, forget, register
from prime_kernels.moe.placement import device_of, memory_error, process_group
from prime_kernels.moe.plan import MemoryPlan, plan_memory
from prime_kernels.moe.streams import require_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from prime_kernels.moe.backend import Backend
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.peers.base import PeerMemory

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Counters since creation. `forwards` counts launches: a checkpointed layer adds two per step."""

    backend: str
    precision: str
    forwards: int
    backwards: int
    weight_generation: int
    symmetric_bytes: int


class MegaMoERuntime:
    """State of one (group, config), shared by all layers: use `create`, then pass it to every `mega_moe` call.

    Attributes:
        id: Number of this runtime in this process; what the torch.library ops take.
        config: The config all ranks agreed on.
        plan: Memory this config costs.
        backend: "reference", "grouped" or "cuda": what calls really run.
        group: Process group, or None when this rank holds all experts.
        ep_rank, ep_size: Place in the group.
        num_local_experts: E_l = num_experts / ep_size.
        device: Where every tensor of every call must be.
        peers: Memory that the ranks share; None at ep_size 1 and for backends that use ordinary collectives.
        stream: Where calls of a virtual rank must be made; None: on any one stream.
        weight_generation: Number of times the weights were declared changed.
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        backend: Backend,
        group: ProcessGroup | None,
        device: torch.device,
        peers: PeerMemory | None = None,
    ) -> None:
        self.id = register(self)
        self.config = config
        self.group = group
        self.ep_rank, self.ep_size = (0, 1) if peers is None else (peers.rank, peers.size)
        if group is not None:
            self.ep_rank, self.ep_size = dist.get_rank(group), dist.get_world_size(group)
        self.num_local_experts = config.num_experts // self.ep_size
        self.device = device
        self.plan: MemoryPlan = plan_memory(config, ep_size=self.ep_size)
        self.backend = backend.name
        self.implementation = backend
        self.dtypes = backend.dtypes(config)
        self.checks_ids = config.validate or backend.name == "reference"
        self.weight_generation = 0
        self.forwards = 0
        self.backwards = 0
        self.channel: PeerChannel | None = None
        self.peers = peers
        self.stream = None if peers is None else peers.stream
        self._seen_stream = None if self.stream is None else self.stream.cuda_stream
        # Tokens of the eager call in progress, whose tensors were checked; ops that get others check for themselves.
        self.vouched: Tensor | None = None
        self._failure: PrimeKernelsError | None = None
        self._closed = False

    @classmethod
    def create(
        cls,
        config: MegaMoEConfig,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> MegaMoERuntime:
        """Make the runtime of this group. Collective: every rank of the group calls it with the same config.

        Args:
            config: What the layers have in common.
            group: Expert-parallel ranks, a ProcessGroup or a 1-D DeviceMesh; rank r holds experts [r E_l, (r+1) E_l).
                None or one rank: this rank holds all experts.
            device: Device of the tensors. None: the current CUDA device where backend is "cuda", or "auto" on a
                machine with CUDA; otherwise the CPU.

        Returns:
            An open runtime; close it, or use it in a `with` statement.

        Raises:
            UnsupportedConfig: the config cannot run here; on every rank.
            BackendUnavailable: the backend cannot run on this machine; on every rank (others see PeerAborted).
            ConfigMismatch: two ranks have different configs or versions.

        Source: this file; the agreement of ranks is in agreement.py.
        """
        group = process_group(group)
        device = device_of(config, device)
        ep_size = 1 if group is None else dist.get_world_size(group)
        choice = select_backend(config, ep_size=ep_size, device=device)
        error = choice.error or memory_error(config, ep_size, device)
        if group is not None:
            agree(config, group, error=error, backend=choice.backend.name if choice.backend else None)
        if error is not None:
            raise error
        assert choice.backend is not None
        if choice.fallback is not None:
            log_fallback(choice.fallback)
        runtime = cls(config, choice.backend, group, device)
        if group is not None:
            runtime.channel = PeerChannel(
                group, num_local_experts=runtime.num_local_experts, timeout_s=config.peer_timeout_s
            )
        choice.backend.open(runtime)
        return runtime

    def require_open(self) -> None:
        """Raise unless calls are allowed: not after `close`, nor after a peer timed out."""
        if self._closed:
            raise RuntimeClosedError(
                f"mega_moe was called on runtime {self.id} after close().",
                facts={"id": self.id},
                remedy="Create a new one with MegaMoERuntime.create.",
            )
        if self._failure is not None:
            raise self._failure

    def run(self, phase: str, work: Callable[[], _T]) -> _T:
        """One forward or backward: refused when closed; at ep_size > 1 an error in it is told to the peers."""
        self.require_open()
        if self.device.type == "cuda" and not self.config.allow_multi_stream:
            self._seen_stream = require_stream(self.device, self._seen_stream, self.id)
        if torch.is_autocast_enabled(self.device.type):
            # Autocast would reach the GEMMs of the unfused backends and change the recipe behind the config's back.
            with torch.autocast(self.device.type, enabled=False):
                return self._run(phase, work)
        return self._run(phase, work)

    def _run(self, phase: str, work: Callable[[], _T]) -> _T:
        if self.channel is None:
            return work()
        try:
            with self.channel.guard(phase):
                return work()
        except PeerTimeout as error:
            self.record_failure(error)
            raise

    def record_failure(self, error: BaseException) -> None:
        """Remember an error after which the ranks no longer agree on where they are; calls repeat it until close."""
        if isinstance(error, PeerTimeout):
            self._failure = error

    def advance_weight_generation(self) -> int:
        """Declare the expert weights changed: after an optimizer step, a load, a broadcast or a swap.

        Returns:
            The new generation; prepared weights of earlier ones raise StaleWeightsError from now on.

        Source: this file.
        """
        self.weight_generation += 1
        return self.weight_generation

    def attach_optimizer(self, *optimizers: torch.optim.Optimizer) -> OptimizerHooks:
        """Advance the generation after every step of these optimizers.

        Args:
            optimizers: Anything with `register_step_post_hook`, a trainer's container of optimizers included.

        Returns:
            A handle; `remove()` detaches. The optimizers do not keep the runtime alive.

        Source: this file.
        """
        self_ref = weakref.ref(self)

        def advance(*_: object) -> None:
            runtime = self_ref()
            if runtime is not None:
                runtime.advance_weight_generation()

        return OptimizerHooks([optimizer.register_step_post_hook(advance) for optimizer in optimizers])

    def warmup(self, tokens: Sequence[int] = ()) -> None:
        """Compile or load what calls with these token counts need, and meet the peers. Collective.

        Args:
            tokens: Token counts, each at most max_tokens_per_rank; may differ per rank.

        Raises:
            PeerTimeout: a rank did not come within peer_timeout_s.

        Source: this file.
        """
        self.require_open()
        self.implementation.warmup(self, tuple(tokens))
        if self.channel is not None:
            nothing = torch.zeros(self.ep_size, self.num_local_experts, dtype=torch.int64, device="cpu")
            with self.channel.guard("warmup"):
                self.channel.exchange(nothing, phase="warmup")

    def check(self) -> None:
        """Raise an error that a kernel reported since the last check. No device synchronisation.

        Source: this file and the backend.
        """
        self.require_open()
        try:
            self.implementation.check(self)
        except PrimeKernelsError as error:
            self.record_failure(error)
            raise

    def synchronize(self) -> None:
        """Wait for the device, then `check()`: nothing that was launched can still fail unseen.

        Source: this file.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()

    def stats(self) -> RuntimeStats:
        """Counters and sizes, from the host only.

        Source: this file.
        """
        return RuntimeStats(
            backend=self.backend,
            precision=self.config.precision,
            forwards=self.forwards,
            backwards=self.backwards,
            weight_generation=self.weight_generation,
            symmetric_bytes=self.plan.symmetric_bytes,
        )

    def close(self, *, abort: bool = False) -> None:
        """Release everything. Collective unless `abort`; a second call does nothing.

        Args:
            abort: Do not wait for the peers: after a timeout, or when another rank is gone.

        Source: this file.
        """
        if self._closed:
            return
        self._closed = True
        forget(self.id)
        self.implementation.close(self, abort=abort)
        if self.channel is not None:
            self.channel.close()

    def __enter__(self) -> MegaMoERuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A rank that leaves with an error must not wait for peers that are still in a step.
        self.close(abort=error is not None)

    def __repr__(self) -> str:
        return f"MegaMoERuntime(id={self.id}, backend={self.backend!r}, ep_rank={self.ep_rank}/{self.ep_size})"
