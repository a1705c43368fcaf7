# SPDX-License-Identifier: Apache-2.0
"""From the bytes that a recording build writes to intervals and to what every SM did at every moment."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from build_tools.variants import KERNELS
from prime_kernels.errors import LaunchError
from prime_kernels.timeline import records as rec
from prime_kernels.timeline import states
from tests.helpers.timelines import BASE, Lane, buffer, busy_cta, busy_launch, lanes
from tests.host_cxx import compile


def test_the_layout_is_that_of_the_kernels() -> None:
    text = (KERNELS / "profile" / "timeline.cuh").read_text()
    events = {name: int(value) for name, value in re.findall(r"\bk(\w+) = (\d+)", text.split("enum class Event")[1])}
    names = ("Wait", "Multiply", "Skip", "Epilogue", "Copy", "Push")
    assert [events[name] for name in names] == [rec.WAIT, rec.MULTIPLY, rec.SKIP, rec.EPILOGUE, rec.COPY, rec.PUSH]
    assert f"kTimelineLanes = {len(rec.LANES)};" in text
    assert f"return end(begin, Event::kCopy, row / {rec.COPY_ROWS});" in text
    waits = dict(
        re.findall(r"\bk(\w+) = (\d+)", (KERNELS / "common" / "fault.cuh").read_text().split("enum class Wait")[1])
    )
    found = [int(waits[name]) for name in ("TileFull", "TileFree", "StageFull", "StageFree", "Input")]
    assert found == [rec.TILE_FULL, rec.TILE_FREE, rec.STAGE_FULL, rec.STAGE_FREE, rec.INPUT]
    of_peers = [int(waits[name]) for name in ("PeerReady", "PeerDone", "FirstCopy")]
    assert of_peers == [rec.PEER_READY, rec.PEER_DONE, rec.FIRST_COPY]
    assert sorted(rec.WAITS) == sorted(int(value) for name, value in waits.items() if name != "None")


def test_intervals_come_back_as_they_were_recorded() -> None:
    cta = lanes(64, 9000)
    cta[4].wait(64, 128, rec.TILE_FULL).tile(128, 4000, row=256, column=512, expert=3, k_steps=32, valid=70, kind=1)
    cta[4].put(4000, 4500, rec.EPILOGUE).tile(4500, 4600, rec.SKIP, row=384, valid=64)
    cta[2].put(64, 96, rec.COPY, 11)
    found = rec.parse(rec.used(buffer([lanes(32, 9100), cta], sms=[7, 5])))
    assert found.sm.tolist() == [7, 5]
    assert (found.ctas, found.span_ns, found.start_ns, found.lost) == (2, 9068, BASE + 32, 0)
    assert found.where()[0].tolist() == [1] * 5
    assert found.where()[1].tolist() == [2, 4, 4, 4, 4]
    assert found.event.tolist() == [rec.COPY, rec.WAIT, rec.MULTIPLY, rec.EPILOGUE, rec.SKIP]
    assert found.detail.tolist() == [11, rec.TILE_FULL, 1, 0, 0]
    assert found.since.tolist() == [32, 32, 96, 3968, 4468]
    assert found.until.tolist() == [64, 96, 3968, 4468, 4568]
    tiles = [column.tolist() for column in found.tiles]
    assert tiles == [[2, 4], [256, 384], [512, 0], [3, 0], [32, 8], [70, 64]]


def test_numbers_of_a_tile_that_look_like_a_tile_are_numbers() -> None:
    cta = lanes(0, 9000)
    for at in range(3):
        cta[4].tile(100 * at, 100 * at + 50, row=at, expert=rec.MULTIPLY)
    cta[5].tile(0, 10, row=9, expert=rec.SKIP)
    found = rec.parse(rec.used(buffer([cta])))
    assert found.event.tolist() == [rec.MULTIPLY] * 4
    assert found.tiles.row.tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_what_found_no_room_is_counted(room: int) -> None:
    cta = lanes(0, 1000)
    cta[4].wait(0, 10, rec.TILE_FULL).tile(10, 20).wait(20, 30, rec.TILE_FULL)
    cta[0].wait(0, 10, rec.STAGE_FREE)
    found = rec.parse(rec.used(buffer([cta], capacity=room)))
    assert found.event.tolist() == [rec.WAIT, rec.WAIT, rec.MULTIPLY, rec.WAIT][: {1: 2, 2: 2, 3: 3, 4: 4}[room]]
    assert found.lost == {1: 3, 2: 3, 3: 1, 4: 0}[room]


@pytest.mark.parametrize("tick", [32, 1024])
def test_the_tick_of_the_clock_is_seen(tick: int) -> None:
    timelines = [busy_launch("down", 0, tick=tick).timeline]
    assert rec.tick_ns([it for it in timelines if it is not None]) == tick
    assert rec.tick_ns([rec.parse(rec.used(buffer([lanes(5, 5)])))]) == 0


def test_records_that_make_no_sense_are_refused() -> None:
    cta = lanes(100, 50)
    with pytest.raises(LaunchError, match="ends before it begins"):
        rec.parse(rec.used(buffer([cta])))
    good = buffer([lanes(0, 10)])
    with pytest.raises(LaunchError, match="bytes for 1 CTAs"):
        rec.used(good[:-16])
    raw = rec.used(good)
    raw.heads[3, 0] = 0
    with pytest.raises(LaunchError, match="a lane has no begin"):
        rec.parse(raw)


def test_a_cleared_buffer_has_a_head_and_nothing_else() -> None:
    made = torch.full((rec.buffer_bytes(2, 5),), 7, dtype=torch.uint8)
    rec.clear(made, 2, 5)
    assert made[:8].view(torch.int32).tolist() == [5, 2]
    assert int(made[8:].sum()) == 0


@pytest.mark.skipif(compile.find_compiler() is None, reason="no C++ compiler here")
def test_what_the_kernel_records_on_the_simulated_machine_is_read(tmp_path: Path) -> None:
    compiler = compile.find_compiler()
    assert compiler is not None
    program, out = compile.build("timeline", compiler=compiler), tmp_path / "buffer"
    case = "every_tile_of_every_warpgroup_is_recorded_in_order"
    subprocess.run([program, case], check=True, env={**os.environ, "PK_TIMELINE_DUMP": str(out)}, capture_output=True)
    found = rec.parse(rec.used(torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.uint8)))
    assert found.sm.tolist() == [100, 101, 102, 103]
    assert found.lost == 0
    lane = found.where()[1]
    tiles = found.tiles
    # 130 + 64 + 65 rows of experts 1, 2 and 4, in halves of 64; 192 columns are two tiles.
    multiplied = found.event[tiles.interval] == rec.MULTIPLY
    assert int(multiplied.sum()) == (3 + 1 + 2) * 2
    assert set(tiles.expert[multiplied].tolist()) == {1, 2, 4}
    assert set(tiles.k_steps.tolist()) == {320 // 64}
    assert int((found.event == rec.EPILOGUE).sum()) == int(multiplied.sum())
    copied = found.event == rec.COPY
    assert set(lane[copied].tolist()) == {2, 3}
    pool = 192 + 64 + 128
    assert sorted((found.detail[copied] * rec.COPY_ROWS).tolist()) == list(range(0, pool, rec.COPY_ROWS))
    assert int(states.sweep(found).total_ns().sum()) == found.span_ns


def ms_of(ctas: list[list[Lane]]) -> dict[str, float]:
    swept = states.sweep(rec.parse(rec.used(buffer(ctas))))
    return dict(zip(states.STATES, swept.total_ns().tolist(), strict=True))


def test_every_state_is_told_from_the_others() -> None:
    cta = lanes(0, 1000)
    one, two, load = cta[4], cta[5], cta[0]
    # one:  0-100 tile list | 100-300 multiply, stalled 150-200 | 300-400 epilogue | 400-450 list | 450-500 skip
    one.wait(0, 100, rec.TILE_FULL).wait(150, 200, rec.STAGE_FULL).tile(100, 300).wait(310, 330, rec.INPUT)
    one.put(300, 400, rec.EPILOGUE).wait(400, 450, rec.TILE_FULL).tile(450, 500, rec.SKIP)
    # two:  180-190 multiplies while one stalls; 560-700 multiply, stalled 600-680
    two.tile(180, 190).wait(600, 680, rec.STAGE_FULL).tile(560, 700)
    load.wait(650, 670, rec.INPUT)
    # The scheduler's waits for rows count while a warpgroup has no tile: at the start and from 400 to 410.
    cta[1].wait(0, 30, rec.INPUT).wait(160, 170, rec.INPUT).wait(390, 410, rec.INPUT)
    found = ms_of([cta])
    assert found == {
        "multiply": 50 + 10 + 100 + 60,
        "rows": 20 + 30 + 10,
        "operands": 50 - 10 + 60,
        "activations": 20,
        "epilogue": 80,
        "tile list": 50 - 10,
        "start": 100 - 30,
        "tail": 300,
        "no rows": 50,
        "other": 60,
        "peers": 0,
        "sending": 0,
        "last peer": 0,
    }
    assert sum(found.values()) == 1000


def test_two_ctas_are_averaged_and_an_idle_one_counts() -> None:
    cta = lanes(0, 1000)
    cta[4].tile(0, 1000)
    found = ms_of([cta, lanes(0, 10)])
    assert (found["multiply"], found["tail"]) == (500, 500)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 10), st.integers(0, 900), st.integers(0, 200)),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_states_of_an_sm_fill_the_launch_whatever_was_recorded(rows: list[tuple[int, int, int, int, int]]) -> None:
    cta = lanes(0, 1000)
    for lane, event, detail, since, length in rows:
        if event in (rec.MULTIPLY, rec.SKIP):
            cta[lane].tile(since, since + length, event)
        else:
            cta[lane].put(since, since + length, event, detail)
    swept = states.sweep(rec.parse(rec.used(buffer([lanes(10, 500), cta]))))
    assert int(swept.length.sum()) == 2 * swept.span_ns
    assert int(swept.length.min()) >= 0
    edges = torch.tensor([0, 1, 333, 700, swept.span_ns])
    total = sum(swept.binned(swept.state, index, edges) for index in range(len(states.STATES)))
    assert torch.equal(torch.as_tensor(total), (edges[1:] - edges[:-1]).expand(2, -1))


def test_bins_agree_with_totals() -> None:
    swept = busy_launch("down", 0).sweep
    assert swept is not None
    edges = torch.linspace(0, swept.span_ns, 38, dtype=torch.float64).to(torch.int64)
    for index, total in enumerate(swept.total_ns().tolist()):
        assert float(swept.binned(swept.state, index, edges).sum()) == pytest.approx(total * swept.ctas)
    helpers = sum(swept.binned(swept.helper, index, edges) for index in range(len(states.HELPERS)))
    assert int(torch.as_tensor(helpers).sum()) == swept.span_ns * swept.ctas


def test_copied_bytes_are_spread_over_the_time_they_took() -> None:
    cta = lanes(0, 400)
    cta[2].put(100, 200, rec.COPY, 0)
    cta[3].put(150, 250, rec.COPY, 1)
    found = rec.parse(rec.used(buffer([cta])))
    edges = torch.tensor([0, 100, 150, 200, 250, 400])
    moved = states.copied_bytes(found, 1024, edges)
    whole = 2.0 * 8 * 1024
    assert moved.tolist() == pytest.approx([0, whole / 2, whole, whole / 2, 0])
    assert float(states.copied_bytes(rec.parse(rec.used(buffer([lanes(0, 9)]))), 1024, edges).sum()) == 0


def test_the_helper_makes_ctas_as_kernels_do() -> None:
    made = busy_cta(3, 4, 1)
    assert [len(lane.rows) > 0 for lane in made] == [True, True, True, False, True, True]
