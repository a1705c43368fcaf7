# SPDX-License-Identifier: Apache-2.0
"""The fused layer beside the recipe that trainers run: no less exact on the same inputs, and right at training size.

The recipe and the numerics gate are those of the benchmarks, so that what is timed is what is compared here.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks import numerics, routing
from benchmarks.baselines import unfused_layer
from tests.gpu.helpers import BOUND, on_gpu, poison_allocator, run, runtime_for, same_bits
from tests.helpers.cases import Case, Result, dense_oracle, make_case, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MAX_OVER_RECIPE = 1.5  # times the recipe's own error


class Sizes(NamedTuple):
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int


MEDIUM = Sizes(tokens=1501, hidden=768, intermediate=448, experts=24, topk=3)
LARGE = Sizes(tokens=16384, hidden=512, intermediate=256, experts=64, topk=4)


def routed_case(sizes: Sizes, kind: str, seed: int) -> Case:
    """Random activations and weights on routes of a synthetic router; every expert has rows."""
    names = ("tokens", "hidden", "intermediate", "experts")
    case = make_case(**{name: getattr(sizes, name) for name in names}, topk=1, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    ids, weights = routing.draw_routes(kind, sizes.tokens, sizes.topk, sizes.experts, generator)
    counts = torch.bincount(ids.flatten(), minlength=sizes.experts)
    assert counts.min() > 0
    return on_gpu(case.change(topk_ids=ids, topk_weights=weights))


def recipe(case: Case, dtype: torch.dtype = torch.bfloat16) -> Result:
    """y and gradients of the unfused recipe, computed and rounded in `dtype`."""
    tensors = (case.x.to(dtype), case.topk_weights, case.w_gate_up.to(dtype), case.w_down.to(dtype))
    x, scores, w_gate_up, w_down = leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        y = unfused_layer(x, case.topk_ids, scores, w_gate_up, w_down, case.w_down.shape[0], None)
        dx, dscores, dw_gate_up, dw_down = torch.autograd.grad(y, leaves, case.dy.to(dtype))
    assert y.dtype == dw_down.dtype == dtype
    return Result(y.detach(), dx, dscores, *dw_gate_up.chunk(2, 1), dw_down)


def fused(case: Case, **config: object) -> Result:
    with runtime_for(case, **config) as runtime:
        return run(case, runtime)


def worst_block(got: Tensor, want: Tensor) -> float:
    """As the gate of the benchmarks measures it, matrix by matrix."""
    pairs = zip(got, want, strict=True) if got.dim() == 3 else [(got, want)]
    return max(numerics.worst_block_error(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_tensor_is_as_exact_as_the_recipes(kind: str, seed: int) -> None:
    case = routed_case(MEDIUM, kind, seed)
    want = dense_oracle(case)
    ours, theirs = fused(case), recipe(case)
    for name in Result._fields:
        error, bar = (relative_error(getattr(result, name), getattr(want, name)) for result in (ours, theirs))
        assert 1e-4 < bar < 2e-2, f"{name}: the recipe is off by {bar:.1e}; nothing to compare with"
        assert error <= BOUND, f"{name}: {error:.2e}"
        assert error <= MAX_OVER_RECIPE * bar, f"{name}: {error:.2e}, the recipe {bar:.2e}"


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_many_tokens_agree_with_the_recipe_in_fp32(kind: str) -> None:
    case = routed_case(LARGE, kind, seed=2)
    poison_allocator()
    got, want = fused(case), recipe(case, torch.float32)
    for name in Result._fields:
        error = relative_error(getattr(got, name), getattr(want, name))
        assert error <= BOUND, f"{name}: {error:.2e}"
        block = worst_block(getattr(got, name), getattr(want, name))
        assert block <= numerics.BLOCK_BOUND, f"{name}: {block:.2e} in its worst block"


def test_the_recipe_in_fp32_is_the_oracle() -> None:
    case = routed_case(MEDIUM, "zipf", seed=3)
    got, want = recipe(case, torch.float32), dense_oracle(case)
    for name in Result._fields:
        assert relative_error(getattr(got, name), getattr(want, name)) <= 2e-6, name


@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
def test_room_for_more_tokens_or_rows_changes_no_bit(save: str) -> None:
    case = routed_case(MEDIUM, "zipf", seed=4)
    first = fused(case, save=save)
    for config in ({"max_tokens_per_rank": 16384}, {"capacity_factor": 1.0}, {"capacity_factor": 8.0}):
        assert same_bits(first, fused(case, save=save, **config)), config


def test_fewer_tokens_after_more_on_one_runtime_change_no_bit() -> None:
    large, small = routed_case(LARGE, "uniform", seed=5), routed_case(MEDIUM, "zipf", seed=5)
    small = small.change(
        x=small.x[:, :512].contiguous(),
        dy=small.dy[:, :512].contiguous(),
        w_gate=large.w_gate,
        w_up=large.w_up,
        w_down=large.w_down,
        topk_ids=torch.cat([small.topk_ids, small.topk_ids[:, :1] + 24], 1),
        topk_weights=torch.cat([small.topk_weights, small.topk_weights[:, :1]], 1),
    )
    alone = fused(small)
    with runtime_for(large) as runtime:
        before = run(large, runtime)
        assert same_bits(alone, run(small, runtime))
        assert same_bits(before, run(large, runtime))
