# SPDX-License-Identifier: Apache-2.0
"""The unfused backend on one rank: exact semantics in every dtype, and its optional engine's layout code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prime_kernels
from prime_kernels.errors import BackendUnavailable, ConfigMismatch, UnsupportedConfig
from prime_kernels.moe import grouped_deep_gemm, grouped_pointwise
from prime_kernels.moe.grouped_gemm import Groups, TorchEngine
from tests.helpers.oracle import BOUNDS, Inputs, check_results, dense, make_inputs, relative_error
from tests.helpers.ranks import make_config, run_layer

TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 37, 6, 64, 128


def make_batch(dtype: torch.dtype, low: int = -1, high: int = EXPERTS - 2, topk: int = 3) -> Inputs:
    """Routes that leave the last two experts empty."""
    ids = torch.randint(low, high, (TOKENS, topk), generator=torch.Generator().manual_seed(2))
    return make_inputs(ids, num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, dtype=dtype)


def open_grouped(batch: Inputs, **changes: Any) -> Any:
    return prime_kernels.MegaMoERuntime.create(make_config(batch, "grouped", **changes), device="cpu")


@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_are_the_oracles_in_every_dtype_and_save_mode(dtype: torch.dtype, save: str) -> None:
    batch = make_batch(dtype)
    with open_grouped(batch, save=save) as runtime:
        got = run_layer(batch, runtime)
    want = dense(batch)
    assert all(tensor.norm() > 0 for tensor in want)
    check_results(got, want, BOUNDS[dtype], save)
    for gradient in (got.dw_gate_up, got.dw_down):
        assert not gradient[EXPERTS - 2 :].any(), "an expert without rows has a gradient of exactly 0"


def test_separate_gate_and_up_weights_give_the_same_results() -> None:
    batch = make_batch(torch.float32)
    want = dense(batch)
    gate, up = (half.contiguous().requires_grad_() for half in batch.w_gate_up.chunk(2, dim=1))
    x = batch.x.clone().requires_grad_()
    with open_grouped(batch) as runtime:
        y = prime_kernels.mega_moe(x, batch.topk_ids, batch.topk_weights, (gate, up), batch.w_down, runtime=runtime)
        y.backward(batch.dy)
    assert x.grad is not None
    assert gate.grad is not None
    assert up.grad is not None
    assert relative_error(y.detach(), want.y) < BOUNDS[torch.float32]
    assert relative_error(x.grad, want.dx) < BOUNDS[torch.float32]
    assert relative_error(torch.cat([gate.grad, up.grad], dim=1), want.dw_gate_up) < BOUNDS[torch.float32]


def test_fp32_weight_gradients_of_bf16_weights_are_not_rounded_to_bf16() -> None:
    batch = make_batch(torch.bfloat16)
    with open_grouped(batch) as runtime:
        rounded = run_layer(batch, runtime)
    needs = prime_kernels.moe.backend.Needs(x=False, topk_weights=False, w_gate_up=True, w_down=True)
    with open_grouped(batch) as runtime:
        grouped = runtime.implementation
        inputs = batch[:5]
        result = grouped.forward(runtime, *inputs, save="preact")
        fine = grouped.backward(
            runtime, batch.dy, *inputs, result.plan, result.preact, needs=needs, wgrad_dtype=torch.float32
        )
    assert fine.dx is None
    assert fine.dtopk_weights is None
    for coarse, exact in ((rounded.dw_gate_up, fine.dw_gate_up), (rounded.dw_down, fine.dw_down)):
        assert exact.dtype == torch.float32
        assert not torch.equal(exact, exact.bfloat16().float())
        assert relative_error(coarse, exact) < 4e-3


def test_rows_of_skipped_slots_cannot_spoil_anything() -> None:
    """At ep_size 1 skipped slots keep a row, computed from a token that may hold NaN."""
    batch = make_batch(torch.float32)
    ids = batch.topk_ids.clone()
    ids[0] = -1
    x = batch.x.clone()
    x[0] = float("nan")
    clean = dense(batch._replace(topk_ids=ids, x=torch.where(torch.isnan(x), 0, x)))
    with open_grouped(batch) as runtime:
        got = run_layer(batch._replace(topk_ids=ids, x=x), runtime)
    check_results(got, clean, BOUNDS[torch.float32])


def test_altered_ids_between_forward_and_backward_are_noticed() -> None:
    batch = make_batch(torch.float32)
    ids = batch.topk_ids.clone()
    x = batch.x.clone().requires_grad_()
    with open_grouped(batch) as runtime:
        y = prime_kernels.mega_moe(x, ids, *batch[2:5], runtime=runtime)
        ids.data[3, 1] = 0 if ids[3, 1] != 0 else 1
        with pytest.raises(ConfigMismatch, match="topk_ids changed"):
            y.backward(batch.dy)


def test_warm_up_needs_no_tokens_and_changes_nothing() -> None:
    batch = make_batch(torch.float32)
    with open_grouped(batch) as runtime:
        runtime.warmup((0, 5))
        check_results(run_layer(batch, runtime), dense(batch), BOUNDS[torch.float32])


def test_quantised_recipes_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedConfig, match="computes in bf16"):
        open_grouped(make_batch(torch.bfloat16), precision="fp8", hidden=128)


def test_the_optional_engine_is_never_replaced_silently() -> None:
    with pytest.raises(BackendUnavailable, match="CUDA only") as caught:
        open_grouped(make_batch(torch.bfloat16), engine="deep_gemm")
    assert 'engine="torch"' in str(caught.value)


class PaddedGemms:
    """The calls of deep_gemm as its documentation describes them, in plain torch: rows come padded to 8."""

    @staticmethod
    def get_mk_alignment_for_contiguous_layout() -> int:
        return 8

    @staticmethod
    def m_grouped_bf16_gemm_nt_contiguous(a: Tensor, b: Tensor, d: Tensor, experts: Tensor) -> None:
        for block in range(0, len(a), 8):
            owner = int(experts[block])
            assert set(experts[block : block + 8].tolist()) <= {owner, -1}
            d[block : block + 8] = a[block : block + 8] @ b[owner].t()

    @staticmethod
    def m_grouped_bf16_gemm_nn_contiguous(a: Tensor, b: Tensor, d: Tensor, experts: Tensor) -> None:
        PaddedGemms.m_grouped_bf16_gemm_nt_contiguous(a, b.transpose(1, 2), d, experts)

    @staticmethod
    def k_grouped_bf16_gemm_tn_contiguous(
        a: Tensor, b: Tensor, d: Tensor, extents: list[int], _extents: Tensor, c: Tensor
    ) -> None:
        assert c is d
        assert all(extent % 8 == 0 for extent in extents)
        start = 0
        for expert, extent in enumerate(extents):
            d[expert] += a[start : start + extent].float().t() @ b[start : start + extent].float()
            start += extent


def test_the_padded_engine_computes_what_the_loop_computes() -> None:
    engine = grouped_deep_gemm.DeepGemmEngine(PaddedGemms)
    gen = torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 0, 16, 9], dtype=torch.int32)
    rows, other = torch.randn(31, 16, generator=gen), torch.randn(31, 24, generator=gen)  # 3 rows belong to nobody
    weights = torch.randn(4, 24, 16, generator=gen)
    groups, loop = Groups(counts, 31), TorchEngine()
    for got, want in (
        (engine.nt(rows, weights, groups), loop.nt(rows, weights, groups)),
        (engine.nn(other, weights, groups), loop.nn(other, weights, groups)),
    ):
        assert torch.allclose(got[:28], want[:28], atol=1e-5)
    wgrad = engine.tn(other, rows, groups, torch.float32)
    assert torch.allclose(wgrad, loop.tn(other, rows, groups, torch.float32), atol=1e-4)
    assert not wgrad[1].any()


def test_the_pointwise_functions_can_be_compiled_once_for_all_row_counts() -> None:
    """What runs on CUDA, up to code generation: traced without a break, one graph for several T."""
    act = prime_kernels.SwiGLU(clamp=5.0, alpha=1.2, up_offset=0.5)
    torch._dynamo.reset()
    graphs = 0

    def count(graph: Any, _inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for rows in (12, 30, 21):
        gen = torch.Generator().manual_seed(rows)
        z, dh = torch.randn(rows, 8, generator=gen), torch.randn(rows, 4, generator=gen)
        scores, slots = torch.rand(rows, 1, generator=gen), torch.randperm(rows, generator=gen).view(-1, 3)
        slots[0, 1] = -1
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (grouped_pointwise._gather, (z, torch.randperm(rows, generator=gen), 1)),
            (grouped_pointwise._activate, (z, act)),
            (grouped_pointwise._activate_backward, (z, dh, scores, act)),
            (grouped_pointwise._sum_slots, (z, slots, torch.rand(rows // 3, 3, generator=gen), torch.float32)),
        ]
        for function, args in calls:
            for arg in args:
                if isinstance(arg, Tensor):
                    torch._dynamo.maybe_mark_dynamic(arg, 0)
            got = torch.compile(function, backend=count, fullgraph=True)(*args)
            torch.testing.assert_close(got, function(*args))
    assert graphs == 4
