# SPDX-License-Identifier: Apache-2.0
"""`convert_gate_up`: weights of other projects come out in the natural layout, and gradients find their way back."""

from __future__ import annotations

import pytest
import torch

from prime_kernels import convert_gate_up, mega_moe
from prime_kernels.errors import ShapeError, UnsupportedConfig
from tests.helpers.cases import make_case
from tests.helpers.layer import leaves_of, open_runtime, run

EXPERTS, INTER, HIDDEN = 3, 64, 64


def natural():
    """Every element tells its expert, its row and its column; gate rows are negative."""
    gate = -torch.arange(EXPERTS * INTER * HIDDEN, dtype=torch.float32).view(EXPERTS, INTER, HIDDEN) - 1
    return torch.cat([gate, -gate], dim=1)


def in_layout(w, layout, block):
    """Built row by row, unlike the function under test."""
    gate, up = w[:, :INTER], w[:, INTER:]
    if layout.endswith("interleaved"):
        rows = []
        for start in range(0, INTER, block):
            rows += [gate[:, r] for r in range(start, start + block)] + [up[:, r] for r in range(start, start + block)]
        w = torch.stack(rows, dim=1)
    return w.transpose(1, 2).contiguous() if layout.startswith("transposed") else w


@pytest.mark.parametrize("block", [1, 8, 64])
@pytest.mark.parametrize("layout", ["packed", "interleaved", "transposed", "transposed_interleaved"])
def test_every_layout_round_trips_with_its_gradient(layout, block):
    foreign = in_layout(natural(), layout, block).requires_grad_()
    converted = convert_gate_up(foreign, layout=layout, block=block)
    assert torch.equal(converted, natural())
    assert converted.is_contiguous()
    gradient = torch.randn(natural().shape, generator=torch.Generator().manual_seed(0))
    converted.backward(gradient)
    assert torch.equal(foreign.grad, in_layout(gradient, layout, block))


def test_a_wrong_layout_name_gives_other_rows():
    foreign = in_layout(natural(), "interleaved", 1)
    assert not torch.equal(convert_gate_up(foreign, layout="packed"), natural())
    assert not torch.equal(convert_gate_up(foreign, layout="interleaved", block=2), natural())


def test_four_dimensional_weights_are_viewed():
    w = natural().view(EXPERTS, 2, INTER, HIDDEN)
    converted = convert_gate_up(w, layout="packed")
    assert torch.equal(converted, natural())
    assert converted.data_ptr() == w.data_ptr()


def test_training_through_a_conversion_updates_the_foreign_parameter():
    case = make_case(dtype=torch.float32)
    with open_runtime(case) as runtime:
        expected = run(case, runtime)
        x, scores, _, down = leaves_of(case)
        rows = [t for pair in zip(case.w_gate.unbind(1), case.w_up.unbind(1), strict=True) for t in pair]
        foreign = torch.stack(rows, dim=1).transpose(1, 2).contiguous().requires_grad_()
        natural_weights = convert_gate_up(foreign, layout="transposed_interleaved")
        y = mega_moe(x, case.topk_ids, scores, natural_weights, down, runtime=runtime)
        y.backward(case.dy)
    assert torch.equal(y, expected.y)
    assert torch.equal(foreign.grad[:, :, 0::2].transpose(1, 2), expected.dw_gate)
    assert torch.equal(foreign.grad[:, :, 1::2].transpose(1, 2), expected.dw_up)


def test_bad_conversions_are_named():
    with pytest.raises(UnsupportedConfig, match="layout is 'concat'"):
        convert_gate_up(natural(), layout="concat")
    with pytest.raises(UnsupportedConfig, match="block is 0"):
        convert_gate_up(natural(), layout="interleaved", block=0)
    with pytest.raises(ShapeError, match=r"w is \[3, 128, 64\] for layout 'interleaved'.*divisible by 96"):
        convert_gate_up(natural(), layout="interleaved", block=48)
    with pytest.raises(ShapeError, match=r"w is \[128, 64\]"):
        convert_gate_up(natural()[0], layout="packed")
