# SPDX-License-Identifier: Apache-2.0
"""torch.library ops and torch.compile: opcheck, full graphs, dynamic token counts, selective checkpointing."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from prime_kernels import MegaMoEExperts, mega_moe, prepare_weights
from prime_kernels.errors import ShapeError, StaleWeightsError, UnsupportedConfig
from prime_kernels.moe import checkpoint as moe_checkpoint
from prime_kernels.moe import ops
from tests.helpers.cases import make_case
from tests.helpers.layer import assert_same_bits, leaves_of, open_runtime, result_of, run

ALL = [True, True, True, True]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs_of(case, *, pair=False, grad=True):
    x, scores, gate_up, down = leaves_of(case)
    if pair:
        gate_up, up = case.w_gate.clone().requires_grad_(), case.w_up.clone().requires_grad_()
    else:
        up = None
    tensors = [x, scores, gate_up, up, down]
    if not grad:
        tensors = [t if t is None else t.detach() for t in tensors]
    x, scores, gate_up, up, down = tensors
    return x, case.topk_ids, scores, gate_up, up, down


def checked(op, *args):
    results = torch.library.opcheck(op, args)
    assert set(results.values()) == {"SUCCESS"}, results
    assert len(results) == 4


@pytest.mark.parametrize("tokens", [0, 20])
@pytest.mark.parametrize("pair", [False, True], ids=["packed", "pair"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_opcheck_passes_for_every_op(precision, pair, tokens):
    case = make_case(tokens=tokens, hidden=128, experts=4)
    with open_runtime(case, precision=precision) as runtime:
        args = inputs_of(case, pair=pair)
        detached = inputs_of(case, pair=pair, grad=False)
        prepared = []
        if precision != "bf16":
            checked(ops.mega_moe_prepare, *detached[3:], runtime.id)
            prepared = ops.mega_moe_prepare(*detached[3:], runtime.id)
        checked(ops.mega_moe_fwd, *args, prepared, runtime.id)
        for save in ("preact", "full"):
            checked(ops.mega_moe_fwd_preact, *args, prepared, runtime.id, save)
        y, plan, _, _, preact = ops.mega_moe_fwd_preact(*detached, prepared, runtime.id, "preact")
        for needs, dtype in ((ALL, None), (ALL, torch.float32), ([True, False, False, True], None)):
            for saved in (preact, None):
                checked(ops.mega_moe_bwd, y, *detached, plan, saved, prepared, runtime.id, needs, dtype)


@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_full_graph_has_the_bits_of_eager(save, dtype):
    case = make_case(tokens=40, dtype=dtype)
    case = case.change(topk_weights=case.topk_weights.to(dtype))
    with open_runtime(case, save=save) as runtime:
        expected = run(case, runtime)
        compiled = torch.compile(functools.partial(mega_moe, runtime=runtime), fullgraph=True, backend="aot_eager")
        for _ in range(3):
            x, scores, gate_up, down = leaves_of(case)
            before = runtime.stats()
            y = compiled(x, case.topk_ids, scores, gate_up, down)
            y.backward(case.dy)
            after = runtime.stats()
            assert (after.forwards - before.forwards, after.backwards - before.backwards) == (1, 1)
            assert_same_bits(result_of(y, x, scores, gate_up, down), expected)


def test_pairs_and_statistics_trace():
    case = make_case(tokens=40)
    with open_runtime(case) as runtime:
        layer = functools.partial(mega_moe, runtime=runtime, return_stats=True)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x, ids, scores, gate, up, down = inputs_of(case, pair=True)
        y, stats = compiled(x, ids, scores, (gate, up), down)
        y.backward(case.dy)
        assert_same_bits((y.detach(), x.grad, scores.grad, gate.grad, up.grad, down.grad), run(case, runtime))
        assert int(stats.tokens_per_expert.sum()) == case.topk_ids.numel()
        with torch.no_grad():
            assert torch.equal(compiled(x, ids, scores, (gate, up), down)[0], y)


def test_two_layers_at_two_token_counts_compile_once():
    cases = {tokens: make_case(tokens=tokens, dtype=torch.float32) for tokens in (40, 24)}
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with open_runtime(cases[40]) as runtime:

        def block(x, ids, scores, gate_up, down):
            h = x + mega_moe(x, ids, scores, gate_up, down, runtime=runtime)
            return h + mega_moe(h, ids, scores, gate_up, down, runtime=runtime)

        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
        for _ in range(3):
            for case in cases.values():
                results = []
                for function in (block, compiled):
                    x, scores, gate_up, down = leaves_of(case)
                    y = function(x, case.topk_ids, scores, gate_up, down)
                    y.backward(case.dy)
                    results.append(result_of(y, x, scores, gate_up, down))
                assert_same_bits(*results)
    assert len(graphs) == 1


@pytest.mark.parametrize("save", ["preact", "inputs"])
@pytest.mark.parametrize(("selective", "forwards"), [(True, 1), (False, 2)], ids=["selective", "full"])
def test_checkpointing_inside_a_full_graph_keeps_its_forward_count(selective, forwards, save):
    case = make_case(tokens=40)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(moe_checkpoint.save_ops()))
    extra = {"context_fn": contexts} if selective else {}
    with open_runtime(case, save=save) as runtime:

        def layer(x, scores, gate_up, down):
            return mega_moe(x * 1, case.topk_ids, scores, gate_up, down, runtime=runtime) * 1

        def block(*args):
            return checkpoint(layer, *args, use_reentrant=False, **extra)

        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        expected = run(case, runtime)
        for _ in range(3):
            leaves = leaves_of(case)
            before = runtime.stats().forwards
            y = compiled(*leaves)
            y.backward(case.dy)
            assert runtime.stats().forwards - before == forwards
            assert_same_bits(result_of(y, *leaves), expected)


def test_two_runtimes_can_be_compiled_in_one_process():
    case = make_case(tokens=24)
    with open_runtime(case) as first, open_runtime(case, save="inputs") as second:

        def layer(x, ids, scores, gate_up, down, runtime):
            return mega_moe(x, ids, scores, gate_up, down, runtime=runtime)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for runtime in (first, second, first):
            before = runtime.stats().forwards
            x, scores, gate_up, down = leaves_of(case)
            y = compiled(x, case.topk_ids, scores, gate_up, down, runtime)
            y.backward(case.dy)
            assert runtime.stats().forwards == before + 1
            assert_same_bits(result_of(y, x, scores, gate_up, down), run(case, first))


def test_bad_tensors_raise_when_the_compiled_call_runs():
    case = make_case(tokens=24)
    with open_runtime(case, max_tokens_per_rank=24) as runtime:
        x, scores, gate_up, down = leaves_of(case)
        compiled = torch.compile(
            functools.partial(mega_moe, runtime=runtime), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        good = compiled(x, case.topk_ids, scores, gate_up, down)
        with pytest.raises(ShapeError, match="x has 48 tokens; max_tokens_per_rank is 24"):
            compiled(x.repeat(2, 1), case.topk_ids.repeat(2, 1), scores.repeat(2, 1), gate_up, down)
        ids = case.topk_ids.clone()
        ids[0, 0] = 99
        with pytest.raises(ShapeError, match=r"topk_ids\[0, 0\] is 99"):
            compiled(x, ids, scores, gate_up, down)
        assert torch.equal(compiled(x, case.topk_ids, scores, gate_up, down), good)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiling_without_a_runtime_raises_and_names_create(fullgraph):
    case = make_case(tokens=24)
    compiled = torch.compile(mega_moe, fullgraph=fullgraph, backend="aot_eager")
    x, scores, gate_up, down = leaves_of(case)
    with pytest.raises(Exception, match=r"MegaMoERuntime.create") as caught:
        compiled(x, case.topk_ids, scores, gate_up, down)
    assert "runtime=None" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "word"), [({"precision": "fp8"}, "precision"), ({"wgrad": "main_grad"}, "main_grad")]
)
def test_bad_options_are_named_while_tracing(arguments, word):
    case = make_case(tokens=24)
    with open_runtime(case) as runtime:
        layer = functools.partial(mega_moe, runtime=runtime, **arguments)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x, scores, gate_up, down = leaves_of(case)
        with pytest.raises(Exception, match=word):
            compiled(x, case.topk_ids, scores, gate_up, down)
        if word == "precision":
            with pytest.raises(UnsupportedConfig, match=word):
                layer(x, case.topk_ids, scores, gate_up, down)


def test_prepared_weights_refresh_without_recompiling_and_go_stale():
    case = make_case(tokens=24, hidden=128)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with open_runtime(case, precision="fp8") as runtime:
        x, scores, gate_up, down = leaves_of(case)
        prepared = prepare_weights(gate_up, down, runtime=runtime)
        compiled = torch.compile(
            functools.partial(mega_moe, runtime=runtime, precision="fp8", prepared=prepared),
            fullgraph=True,
            backend=backend,
        )
        args = (x, case.topk_ids, scores, gate_up, down)
        for _ in range(3):
            assert torch.equal(compiled(*args), mega_moe(*args, runtime=runtime, precision="fp8"))
            with torch.no_grad():
                gate_up *= 1.25
            runtime.advance_weight_generation()
            with pytest.raises(StaleWeightsError, match="prepared weights are of generation"):
                compiled(*args)
            prepare_weights(gate_up, down, runtime=runtime, out=prepared)
    assert len(graphs) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_module_compiles_into_a_full_graph(precision):
    case = make_case(tokens=24, hidden=128)
    with open_runtime(case, precision=precision) as runtime:
        module = MegaMoEExperts(runtime.config, weights_policy="on_call")
        with torch.no_grad():
            module.w_gate_up.copy_(case.w_gate_up)
            module.w_down.copy_(case.w_down)
        module.bind(runtime)
        expected = run(case, runtime)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            module.zero_grad()
            x, scores, *_ = leaves_of(case)
            y = compiled(x, case.topk_ids, scores)
            y.backward(case.dy)
            assert_same_bits(result_of(y, x, scores, module.w_gate_up, module.w_down), expected)
            assert int(module.last_stats.tokens_per_expert.sum()) == case.topk_ids.numel()
