# SPDX-License-Identifier: Apache-2.0
"""The build that records a timeline, and the normal build, which carries nothing of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from build_tools import compile, entries, toolchain
from build_tools.variants import KERNELS, VariantError, parse_variants, read_variants
from prime_kernels.moe.config import MegaMoEConfig
from prime_kernels.moe.cuda_variants import gemm_key

VARIANTS = {variant.key: variant for variant in read_variants()}
OPS = ("gate_up", "down", "down_grad", "gate_up_grad", "wgrad_bf16", "wgrad_f32")
PEER_OPS = ("gate_up_peers", "down_peers", "down_grad_peers", "gate_up_grad_peers", "forward")
LAYER = MegaMoEConfig(num_experts=8, topk=2, hidden=128, intermediate=64, max_tokens_per_rank=64)
HOOKS = KERNELS / "profile" / "timeline.cuh"

needs_compiler = pytest.mark.skipif(
    toolchain.installed() is None,
    reason="the compiler wheels are not in build/toolchain; run python -m build_tools.toolchain",
)


@pytest.mark.parametrize("op", OPS + PEER_OPS)
def test_every_gemm_of_a_layer_has_a_twin_that_differs_in_one_line(op: str) -> None:
    plain = VARIANTS[gemm_key(op, LAYER)]
    twin = VARIANTS[f"{plain.key}|profile"]
    one, other = entries.generate(plain), entries.generate(twin)
    assert [line for line in other.text.splitlines() if line not in one.text.splitlines()] == [
        f"// {twin.key}: generated from build_tools/variants.toml, never edited.",
        "#define PK_PROFILE",
    ]
    assert other.text.index("#define") < other.text.index("#include")
    assert other.fields == one.fields
    assert other.args_hash == one.args_hash
    assert twin.supported == ()
    assert twin.facts == {**plain.facts, "family": "trace"}


def test_a_row_has_a_twin_or_does_not_mention_it() -> None:
    row = {"key": "a", "kernel": "pk_a", "header": "moe/down.cuh", "type": "A", "args": "Args", "archs": ["sm_90a"]}
    row |= {"supported": ["sm_90a"], "measured": "1 us"}
    assert [v.key for v in parse_variants({"variant": [row]})] == ["a"]
    assert [v.key for v in parse_variants({"variant": [{**row, "profile": True}]})] == ["a", "a|profile"]
    with pytest.raises(VariantError, match="profile is False"):
        parse_variants({"variant": [{**row, "profile": False}]})


def without_hooks(folder: Path) -> Path:
    """The device sources less every line that names the timeline, and less its file."""
    for path in sorted(KERNELS.rglob("*.cuh")):
        if path != HOOKS:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if not re.search(r"timeline|kProfile", line, re.IGNORECASE)]
            target = folder / path.relative_to(KERNELS)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(kept), encoding="utf-8")
    return folder


def ptx_of(key: str, sources: Path, folder: Path) -> str:
    tools = toolchain.installed()
    assert tools is not None
    folder.mkdir(exist_ok=True)
    source = folder / "kernel.cu"
    source.write_text(entries.generate(VARIANTS[key], sources).text)
    command = [str(tools.nvcc), "-ptx", "-arch=sm_90a", *entries.OPTIONS, f"-I{sources}", str(source), "-o"]
    command.append(str(folder / "kernel.ptx"))
    run = subprocess.run(command, env=tools.environment(), capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stderr
    return compile.normalise((folder / "kernel.ptx").read_text())


# What only the hooks ask for: the number of the SM, and half of the clock.
MARKS = ("%smid", "%globaltimer_lo")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("key", [gemm_key(op, LAYER) for op in OPS + PEER_OPS])
def test_the_normal_build_is_that_of_sources_without_the_hooks(key: str, tmp_path: Path) -> None:
    stripped = without_hooks(tmp_path / "sources")
    assert "timeline" not in "".join(path.read_text().lower() for path in stripped.rglob("*.cuh"))
    normal = ptx_of(key, KERNELS, tmp_path / "normal")
    assert not any(mark in normal for mark in MARKS)
    assert normal == ptx_of(key, stripped, tmp_path / "stripped")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("op", ["down", "down_peers"])
def test_the_recording_build_records(op: str, tmp_path: Path) -> None:
    text = ptx_of(f"{gemm_key(op, LAYER)}|profile", KERNELS, tmp_path / "profile")
    assert all(mark in text for mark in MARKS)
