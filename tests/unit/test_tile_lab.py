# SPDX-License-Identifier: Apache-2.0
"""The tile lab without a GPU: tile lists, tensor maps and checks against a walk over the tiles, records, the build."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.cost import Shape
from benchmarks.tile_lab import cases, driver, run, table, tiles
from benchmarks.watchdog import Finished
from build_tools import toolchain
from prime_kernels.loader import elf

FOLDER = Path(run.__file__).parent
FIRST_RUN = FOLDER / "2026-11-29-h200.jsonl"
# 5 n-tiles of 128 and 3 of 256, the last of them half outside: every pair along n of an odd number of tiles occurs.
SHAPE = Shape("small", hidden=256, intermediate=640, num_experts=3, topk=1)
COUNTS = (130, 100, 300)  # 2, 1 and 3 m-blocks
counts_lists = st.lists(st.integers(100, 700), min_size=1, max_size=5).map(tuple)


def test_a_pool_starts_every_expert_at_a_block() -> None:
    pool = tiles.Pool((1, 128, 129, 5))
    assert pool.starts == [0, 128, 256, 512]
    assert pool.rows == 640
    assert pool.spans()[2] == slice(256, 385)
    assert pool.blocks(2) == [256, 384]


@given(counts=counts_lists, n_tiles=st.integers(1, 6), cluster=st.sampled_from([1, 2]))
def test_every_tile_of_a_grouped_product_is_listed_once(counts: tuple[int, ...], n_tiles: int, cluster: int) -> None:
    pool = tiles.Pool(counts)
    listed = tiles.m_tiles(pool, n_tiles=n_tiles, n_step=256, k=768, cluster=cluster)
    inside = [tile for tile in listed if tile.n < n_tiles * 256]
    blocks = [(m, expert) for expert in range(len(counts)) for m in pool.blocks(expert)]
    wanted = [(m, n * 256, expert) for (m, expert), n in product(blocks, range(n_tiles))]
    assert sorted((tile.m, tile.n, tile.expert) for tile in inside) == sorted(wanted)
    assert {(tile.k0, tile.k_steps) for tile in listed} == {(0, 12)}
    assert tiles.problems(listed, cluster=cluster, ctas=cluster) == []
    # Beyond the matrix: one tile for each odd last block, if its n-tiles do not pair up themselves.
    odd = sum(len(pool.blocks(expert)) % 2 for expert in range(len(counts)))
    assert len(listed) - len(inside) == (odd if cluster == 2 and n_tiles % 2 else 0)


@given(counts=counts_lists, m_tiles=st.integers(1, 3), n_tiles=st.integers(1, 4), cluster=st.sampled_from([1, 2]))
def test_every_tile_of_a_weight_gradient_is_listed_once_with_all_its_rows(
    counts: tuple[int, ...], m_tiles: int, n_tiles: int, cluster: int
) -> None:
    pool, m, n = tiles.Pool(counts), m_tiles * 256, n_tiles * 256
    listed = tiles.w_tiles(pool, m=m, n=n, tile_n=256)
    wanted = [(i, j, e) for e in range(len(counts)) for i in range(0, m, 128) for j in range(0, n, 256)]
    assert sorted((tile.m, tile.n, tile.expert) for tile in listed) == sorted(wanted)
    for tile in listed:
        assert tile.k0 == pool.starts[tile.expert]
        assert counts[tile.expert] <= tile.k_steps * 64 < counts[tile.expert] + 64
    assert tiles.problems(listed, cluster=cluster, ctas=cluster) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows[:-1], "tiles for pairs"),
        (lambda rows: rows[:2], "2 tiles for 4 CTAs"),
        (lambda rows: [rows[0], *rows[2:], rows[1]], "no pair"),
        (lambda rows: [*rows[:-1], rows[-1]._replace(k_steps=1)], "fewer than 2 steps"),
        (lambda rows: [rows[0]._replace(multicast=0), *rows[1:]], "no pair"),
        (lambda rows: [row._replace(multicast=0) for row in rows], "no pair"),
        (lambda rows: [*rows[:-1], rows[-2]], "no pair"),
        (lambda rows: [row._replace(multicast=1) for row in rows], "no pair"),
    ],
)
def test_a_list_that_would_hang_or_lie_is_refused(change: Any, complaint: str) -> None:
    good = tiles.m_tiles(tiles.Pool((300, 100)), n_tiles=3, n_step=256, k=768, cluster=2)
    assert tiles.problems(good, cluster=2, ctas=4) == []
    assert complaint in "; ".join(tiles.problems(change(good), cluster=2, ctas=4))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The products are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_case(kind: str, cluster: int, tile_n: int) -> cases.Case:
    generator = torch.Generator().manual_seed(3)
    case = cases.KINDS[kind](cases.Bench(SHAPE, tiles.Pool(COUNTS), tile_n, cluster, generator))
    case.poison()
    return case


def memory(box: driver.Box) -> Tensor:
    """What a tensor map describes, outermost dimension first."""
    dtype = {driver.BF16: torch.bfloat16, driver.FP32: torch.float32}[box.dtype]
    strides = [1, *(stride // dtype.itemsize for stride in box.strides)]
    count = 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(box.pointer)
    return torch.frombuffer(raw, dtype=dtype).as_strided(box.sizes[::-1], strides[::-1])


def cut(box: driver.Box, at: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """(where in memory, where in the box) a box at these coordinates lies inside."""
    outer, inner = [], []
    for size, width, first in zip(box.sizes, box.box, at, strict=True):
        low, high = min(first, size), min(first + width, size)
        outer.append(slice(low, high))
        inner.append(slice(low - first, high - first) if high > low else slice(0, 0))
    return tuple(outer[::-1]), tuple(inner[::-1])


def load(box: driver.Box, *at: int) -> Tensor:
    """A box, zero outside the matrix."""
    where, inside = cut(box, at)
    out = torch.zeros(box.box[::-1])
    out[inside] = memory(box)[where].float()
    return out


def store(box: driver.Box, value: Tensor, *at: int) -> None:
    where, inside = cut(box, at)
    shaped = value.reshape(box.box[::-1])
    target = memory(box)
    target[where] = shaped[inside].to(target.dtype)


def operands(kind: str, maps: dict[str, driver.Box], t: tiles.Tile, k: int, tile_n: int) -> tuple[Tensor, Tensor]:
    """[128, 64] and [tile_n, 64] of one step, as stages.cuh loads them."""
    if kind in ("w", "w32"):
        a = load(maps["a"], 0, t.k0 + k, t.m // 64, 0)[0].transpose(1, 2).reshape(128, 64)
    else:
        a = load(maps["a"], k, t.m)
    halves = []
    for half in range(2):
        n = t.n + half * tile_n // 2
        at = {
            "g1": (k, t.n, half, t.expert),
            "g2": (k, n, 0, t.expert),
            "d2": (0, k, n // 64, t.expert),
        }.get(kind, (0, t.k0 + k, n // 64, 0))
        part = load(maps["b"], *at)[0]
        halves.append(part[0] if kind in ("g1", "g2") else part.transpose(1, 2).flatten(0, 1))
    return a, torch.cat(halves)


def finish(kind: str, case: cases.Case, acc: Tensor, t: tiles.Tile, score: Tensor | None) -> None:
    """The epilogue of a tile, slab by slab."""
    maps, tile_n = case.maps, acc.shape[1]
    for row, first in product((0, 64), range(0, tile_n // 2 if kind == "g1" else tile_n, 64)):
        rows, at_row, col = acc[row : row + 64], t.m + row, t.n + first
        slab = rows[:, first : first + 64]
        if kind == "g1":
            stored = [part.bfloat16().float() for part in (slab, rows[:, tile_n // 2 + first :][:, :64])]
            for half, part in enumerate(stored):
                store(maps["z"], part[:, None], col, half, at_row)
            store(maps["o0"], torch.nn.functional.silu(stored[0]) * stored[1], col, at_row)
        elif kind == "d2":
            assert score is not None
            g, u = (load(maps["z"], col, half, at_row)[:, 0] for half in range(2))
            s, a = score[at_row : at_row + 64, None], g.sigmoid()
            h = (g * a * u).bfloat16().float()
            grads = (s * slab * u * (a + g * a * (1 - a)), s * slab * g * a)
            for half, part in enumerate(grads):
                store(maps["o1"], part[:, None], col, half, at_row)
            store(maps["o0"], s * h, col, at_row)
            if t.n // tile_n < case.num_n_tiles:
                case.outputs["ds"][at_row : at_row + 64, t.n // tile_n] += (slab * h).sum(1)
        elif kind == "w32":
            for part in range(0, 64, 32):
                store(maps["o0"], slab[:, part : part + 32], col + part, at_row, t.expert)
        else:
            store(maps["o0"], slab, col, at_row, t.expert if kind == "w" else 0)


def walk(kind: str, case: cases.Case, tile_n: int) -> None:
    """What the kernel does, tile by tile."""
    if kind == "d2":
        case.outputs["ds"].zero_()
    score = case.kept[0] if case.kept else None
    for t in case.tiles:
        acc = torch.zeros(128, tile_n)
        for step in range(t.k_steps):
            a, b = operands(kind, case.maps, t, step * 64, tile_n)
            acc += a @ b.T
        finish(kind, case, acc, t, score)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("kind", "tile_n"), [("g1", 256), ("g2", 256), ("g2", 192), ("d2", 256), ("w", 256), ("w32", 256)]
)
def test_a_walk_over_the_tiles_by_the_tensor_maps_gives_what_the_check_expects(
    kind: str, tile_n: int, cluster: int
) -> None:
    case = make_case(kind, cluster, tile_n)
    assert tiles.problems(case.tiles, cluster=cluster, ctas=4) == []
    walk(kind, case, tile_n)
    worst, found = case.check(SHAPE.num_experts)
    assert found == []
    assert set(worst) == set(case.outputs)
    assert all(error > 0 for error in worst.values())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["g1", "g2", "d2", "w", "w32"])
def test_a_result_that_is_not_written_or_a_little_wrong_is_found(kind: str) -> None:
    case = make_case(kind, 1, 256)
    assert len(case.check(SHAPE.num_experts)[1]) == len(case.outputs) * SHAPE.num_experts
    walk(kind, case, 256)
    for name, tensor in case.outputs.items():
        row = 0 if tensor.dim() == 3 else COUNTS[0] - 1  # expert 0
        kept = tensor[row].clone()
        for wrong in (float("nan"), 0.0):
            tensor[row] = wrong
            assert [line.split(":")[0] for line in case.check(SHAPE.num_experts)[1]] == [f"{name} of expert 0"]
        tensor[row] = kept
    assert case.check(SHAPE.num_experts)[1] == []


def test_uniform_counts_are_the_same_everywhere() -> None:
    counts = cases.draw_counts(131072, 128)
    assert counts == cases.draw_counts(131072, 128)
    assert sum(counts) == 131072
    assert 800 < min(counts) < 1024 < max(counts) < 1250


def test_cases_and_kernels_are_those_of_the_source() -> None:
    kernels = re.findall(r"^PK_LAB\((\w+), k(\w+), (\w+)\)$", (FOLDER / "lab.cu").read_text(), re.M)
    assert {name for name, _, _ in kernels} == {name for name, _ in run.CASES}
    for name, kind, policy in kernels:
        assert name.split("_")[0] == kind.lower()
        assert name.split("_")[0] in cases.KINDS
        assert name[-2:] == policy[-2:].lower()


def test_arguments_have_the_size_that_the_kernels_assert() -> None:
    asserted = re.search(r"static_assert\(sizeof\(Args\) == (\d+)\)", (FOLDER / "tile.cuh").read_text())
    assert asserted is not None
    assert ctypes.sizeof(driver.Args) == int(asserted[1])


def make_record(**changes: Any) -> dict[str, Any]:
    record = table.read(FIRST_RUN)[0]
    place = {"gpu": "NVIDIA H200", "driver": "580.95", "torch": "2.11.0", "commit": "0123456789abcdef", "dirty": True}
    return {**record, **place, "time": "2026-11-30T10:00:00+00:00", "clock_mhz": 1485.0, "power_w": 691.6, **changes}


def test_the_table_has_a_row_for_every_record_and_says_where_it_is_from() -> None:
    failed = {"case": "w_i_c1", "shape": "30b", "error": "stopped after 60 s: a | b"}
    lines = table.render([make_record(), make_record(case="g1_i_c1", clock_mhz=None), failed]).splitlines()
    assert lines[0] == "NVIDIA H200, driver 580.95, torch 2.11.0, 0123456789ab dirty, 2026-11-30."
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 5
    assert {row.count("|") for row in rows} == {len(table.HEAD) + 1}
    assert "| g1_i_c2 | 30b | 1.178 | 700 | 1.178 | 1.406 | 1.248 | 661 | 1.439 | 573 | 1485, 692 |" in rows[2]
    assert "| -, 692 |" in rows[3]
    assert "| w_i_c1 | 30b | **stopped after 60 s: a / b** |" in rows[4]


def test_the_faster_start_counts_and_the_worst_error_of_both_checks() -> None:
    record = make_record(ms_stagger0=1.25, ms_stagger1=1.5, rel_err={"z": 1e-3}, rel_err_after={"z": 2e-3})
    row = table.cells(record)
    assert row[2] == "1.250"
    assert row[4] == "1.500"
    assert row[-1] == "2.0e-03"


def test_the_first_run_is_complete_and_has_no_error() -> None:
    records = table.read(FIRST_RUN)
    assert [(record["case"], record["shape"]) for record in records] == list(run.CASES)
    assert table.render(records).count("\n| ") == len(run.CASES)
    for record in records:
        best = min(record["ms_stagger0"], record["ms_stagger1"])
        assert record["tflops"] * best == pytest.approx(record["tflops_peer"] * record["peer_ms"])


def fake_run(monkeypatch: pytest.MonkeyPatch, finished: Finished, record: dict[str, Any] | None) -> None:
    def run_watched(command: list[str], *, log: Path, **_: Any) -> Finished:
        log.write_text(finished.text)
        if record is not None:
            Path(command[command.index("--out") + 1]).write_text(json.dumps(record) + "\n")
        return finished

    monkeypatch.setattr(run.watchdog, "run_watched", run_watched)


def test_a_case_that_hangs_crashes_or_is_wrong_leaves_an_error_and_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "tile_lab-g1_i_c2-30b.log"
    fake_run(monkeypatch, Finished(None, 60.0, "in launch\n\n"), None)
    hung = run.watched_case("g1_i_c2", "30b", tmp_path, 60)
    assert hung == {"case": "g1_i_c2", "shape": "30b", "error": "stopped after 60 s: in launch"}
    assert log.read_text() == "in launch\n\n"
    fake_run(monkeypatch, Finished(1, 3.0, ""), make_record())
    assert run.watched_case("g1_i_c2", "30b", tmp_path, 60)["error"] == "exit 1: no output"
    fake_run(monkeypatch, Finished(0, 3.0, "details"), {"case": "g1_i_c2", "shape": "30b", "error": "wrong"})
    assert run.watched_case("g1_i_c2", "30b", tmp_path, 60)["error"] == "wrong"
    assert log.exists()
    fake_run(monkeypatch, Finished(0, 3.0, "fine"), make_record())
    assert run.watched_case("g1_i_c2", "30b", tmp_path, 60) == make_record()
    assert not log.exists()


def test_measuring_appends_records_prints_the_table_and_fails_with_any_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.cubin").write_bytes(b"x")
    monkeypatch.setattr(run, "CUBIN", tmp_path / "lab.cubin")
    arguments = ["measure", "--out", str(tmp_path / "out"), "--only", "d2"]
    wanted = [case for case in run.CASES if case[0].startswith("d2")]
    fake_run(monkeypatch, Finished(0, 3.0, ""), make_record())
    assert run.main(arguments) == 0
    assert capsys.readouterr().out.count("\n| g1_i_c2 |") == len(wanted) == 3
    assert len(table.read(tmp_path / "out" / run.RECORDS)) == 3
    fake_run(monkeypatch, Finished(-6, 3.0, "aborted"), None)
    assert run.main(arguments) == 1
    assert "**died of SIGABRT: aborted**" in capsys.readouterr().out
    assert run.main([*arguments, "--budget", "1"]) == 1
    assert "**not run, no time left**" in capsys.readouterr().out
    assert len(table.read(tmp_path / "out" / run.RECORDS)) == 9
    assert run.main(["measure", "--out", str(tmp_path), "--only", "nothing"]) == 2
    monkeypatch.setattr(run, "CUBIN", tmp_path / "absent")
    assert run.main(arguments) == 2


GOOD_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'lab_a' for 'sm_90a'
ptxas info    : Function properties for lab_a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compiling entry function 'lab_b' for 'sm_90a'
ptxas info    : Function properties for lab_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
"""
ADVICE = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'lab_b'"


def test_spills_and_serialised_instructions_of_any_kernel_fail_the_build() -> None:
    assert run.build_report(GOOD_LOG) == (["lab_a: 168 registers", "lab_b: 128 registers"], [])
    assert run.build_report(f"{ADVICE}\n{GOOD_LOG}")[1] == [ADVICE]
    second = GOOD_LOG.replace("0 bytes stack frame, 0 bytes spill stores", "8 bytes stack frame, 16 bytes spill stores")
    assert run.build_report(second)[1][1] == "lab_b keeps 8 bytes of stack, spills 16 bytes"
    assert run.build_report("")[1] == ["no kernel was compiled"]


@pytest.mark.slow
@pytest.mark.skipif(toolchain.installed() is None, reason="needs the compiler (python -m build_tools.toolchain)")
def test_the_lab_compiles_without_spills_and_says_how_to_launch_its_kernels(tmp_path: Path) -> None:
    lines = run.build(tmp_path / "lab.cubin")
    facts = elf.inspect((tmp_path / "lab.cubin").read_bytes())
    names = {name for name, _ in run.CASES}
    assert len(lines) == len(names)
    assert set(facts.kernels) == {f"lab_{name}" for name in names}
    for name in names:
        assert facts.kernels[f"lab_{name}"].param_bytes == ctypes.sizeof(driver.Args)
        meta = facts.symbols[f"meta_{name}"]
        threads, smem, tile_n, cluster = (int.from_bytes(meta[at : at + 4], "little") for at in range(0, 16, 4))
        assert threads == (384 if "_i_c" in name else 512)
        assert smem <= 232448
        assert tile_n == (192 if "_ii_" in name else 256)
        assert cluster == int(name[-1])
