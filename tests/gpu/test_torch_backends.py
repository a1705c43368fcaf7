# SPDX-License-Identifier: Apache-2.0
"""The backends made of torch's own kernels, on CUDA: against float64, expert by expert, and to the bit again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import prime_kernels
from prime_kernels.moe import grouped_pointwise
from tests.gpu.helpers import BOUND, on_gpu, poison_allocator, run, runtime_for
from tests.helpers.cases import Case, Result, assert_close, dense_oracle, make_case, relative_error
from tests.helpers.layer import assert_same_bits

# torch's compiler warns about things that are no fault of this package; as errors they would make it give up.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.filterwarnings("default")]

# Worst expert or 16-column tile. fp32 sums of 300 products, in any order, are within a few units of 6e-8 sqrt(300).
BOUNDS = {torch.bfloat16: BOUND, torch.float32: 2e-6}
BACKENDS = [(name, dtype) for name in ("reference", "grouped") for dtype in BOUNDS]
SIZES = (0, 1, 7, 64, 0, 129, 30, 300, 0)


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    """What many trainers set: fp32 products may be made of TF32 ones."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    yield
    matmul.fp32_precision = before


def ragged_case(dtype: torch.dtype, seed: int = 0) -> Case:
    """One expert a token, so that rows can be told apart by expert; three experts without rows, the last among them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    ids = ids[torch.randperm(len(ids), generator=g)]
    case = make_case(tokens=len(ids), hidden=320, intermediate=192, experts=len(SIZES), topk=1, dtype=dtype, seed=seed)
    return on_gpu(case.change(topk_ids=ids[:, None]))


def mixed_case(dtype: torch.dtype) -> Case:
    """Several experts a token, skipped slots, a token without any, an expert named twice, scores of 0 and below."""
    case = make_case(tokens=211, hidden=320, intermediate=192, experts=8, topk=4, dtype=dtype, seed=3)
    ids, weights = case.topk_ids.clone(), case.topk_weights.clone()
    ids[::3, 1], ids[5] = -1, -1
    ids[::4, 2] = ids[::4, 3]
    weights[::5, 0], weights[1::5, 0] = 0.0, -0.7
    return on_gpu(case.change(topk_ids=ids, topk_weights=weights))


def result_of(case: Case, backend: str, **config: object) -> Result:
    with runtime_for(case, backend=backend, **config) as runtime:
        assert runtime.backend == backend
        assert runtime.device.type == "cuda"
        result = run(case, runtime)
    assert all(tensor.device == case.x.device for tensor in result)
    return result


def check_every_expert(case: Case, got: Result, want: Result, bound: float) -> None:
    for expert, size in enumerate(SIZES):
        tokens = case.topk_ids[:, 0] == expert
        assert int(tokens.sum()) == size
        for name in ("y", "dx", "dtopk_weights"):
            error = relative_error(getattr(got, name)[tokens], getattr(want, name)[tokens])
            assert error <= bound, (name, expert, error)
        for name in ("dw_gate", "dw_up", "dw_down"):
            gradient = getattr(got, name)[expert]
            assert relative_error(gradient, getattr(want, name)[expert]) <= bound, (name, expert)
            assert bool(gradient.any()) == (size > 0), (name, expert)


@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
def test_every_expert_agrees_with_the_oracle_and_empty_ones_get_zeros(
    backend: str, dtype: torch.dtype, save: str
) -> None:
    case = ragged_case(dtype)
    got, want = result_of(case, backend, save=save), dense_oracle(case)
    assert got.y.dtype == got.dx.dtype == got.dw_down.dtype == dtype
    assert_close(got, want, BOUNDS[dtype])
    check_every_expert(case, got, want, BOUNDS[dtype])


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
def test_skipped_slots_and_repeated_experts_and_zero_and_negative_scores(backend: str, dtype: torch.dtype) -> None:
    case = mixed_case(dtype)
    got = result_of(case, backend)
    assert_close(got, dense_oracle(case), BOUNDS[dtype])
    assert not got.dtopk_weights[case.topk_ids == -1].any()
    assert not got.y[5].any()


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
def test_the_same_inputs_give_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    case = mixed_case(dtype)
    first = result_of(case, backend)
    for _ in range(2):
        assert_same_bits(first, result_of(case, backend))


@pytest.mark.usefixtures("tf32_allowed")
def test_the_reference_multiplies_in_fp32_whatever_the_process_allowed() -> None:
    case = ragged_case(torch.float32)
    rounded = torch.ones(2048, 2048, device="cuda") * (1 + 2**-13)
    assert relative_error(rounded @ rounded, rounded.double() @ rounded.double()) > 1e-5, "TF32 is not in force"
    assert_close(result_of(case, "reference"), dense_oracle(case), BOUNDS[torch.float32])
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_fp32_weight_gradients_of_bf16_weights_are_not_rounded(backend: str) -> None:
    case = ragged_case(torch.bfloat16, seed=4)
    gradients = []
    for wgrad_dtype in (torch.float32, None):
        packed, down = case.w_gate_up.detach().requires_grad_(), case.w_down.detach().clone().requires_grad_()
        if wgrad_dtype is not None and hasattr(packed, "grad_dtype"):
            packed.grad_dtype = down.grad_dtype = None
        with runtime_for(case, backend=backend, wgrad_dtype=wgrad_dtype) as runtime:
            poison_allocator()
            y = prime_kernels.mega_moe(case.x, case.topk_ids, case.topk_weights, packed, down, runtime=runtime)
            y.backward(case.dy)
        assert packed.grad is not None
        assert down.grad is not None
        gradients.append((packed.grad, down.grad))
    for wide, narrow in zip(*gradients, strict=True):
        assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
        assert not torch.equal(wide, narrow.float())
        assert relative_error(narrow, wide) < 4e-3
        assert not wide[8].any()


def test_the_backends_agree_on_the_same_inputs() -> None:
    case = mixed_case(torch.bfloat16)
    results = [result_of(case, backend) for backend in ("reference", "grouped", "cuda")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert_close(results[one], Result(*(tensor.double() for tensor in results[other])), BOUND)


def test_the_grouped_backend_ran_compiled() -> None:
    result_of(mixed_case(torch.bfloat16), "grouped")
    assert not grouped_pointwise._uncompilable, "torch.compile failed on this machine; the log has the reason"
