# SPDX-License-Identifier: Apache-2.0
"""The just-in-time path: where NVRTC is found, what is compiled under which name, and when compiling is refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build_tools import stage
from prime_kernels import MegaMoEConfig
from prime_kernels.errors import ArtifactError, BackendUnavailable, CompileError
from prime_kernels.loader import elf, jit, nvrtc, resolve, select, warmup
from prime_kernels.loader.arch import parse
from prime_kernels.loader.entry import CacheKey
from prime_kernels.loader.nvrtc import Nvrtc
from prime_kernels.moe.cuda import CudaBackend
from tests.helpers import installation as made

KEY = "made|t128"
H200 = (9, 0)
COMPILER, TRIED = nvrtc.find(None)
needs_nvrtc = pytest.mark.skipif(COMPILER is None, reason=f"no NVRTC here ({nvrtc.PIP_LINE}); tried: {TRIED}")


def fake_nvrtc(version: tuple[int, int] = (13, 0), archs: tuple[int, ...] = (90, 100, 103)) -> Nvrtc:
    return Nvrtc("/x/libnvrtc.so", "test", version, f"{version[0]}.{version[1]}", archs, None)


def unit_of(folder: Path, **changes: Any) -> jit.Unit:
    made.write_sources(folder, **changes)
    sources = jit.read_sources(folder)
    assert sources is not None
    unit = jit.read_unit(sources, KEY, folder)
    assert unit is not None
    return unit


# --- finding NVRTC


def test_a_mapped_library_is_found_by_its_path_and_builtins_are_not_taken_for_it() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 fd:01 12  /venv/lib/nvidia/cu13/lib/libnvrtc.so.13\n"
        "7f01-7f02 r--p 00000000 fd:01 12  /venv/lib/nvidia/cu13/lib/libnvrtc.so.13\n"
        "7f02-7f03 r-xp 00000000 fd:01 13  /venv/lib/nvidia/cu13/lib/libnvrtc-builtins.so.13.0\n"
        "7f03-7f04 r-xp 00000000 fd:01 14  /a b/libnvrtc.so.12.8.93\n"
        "7f04-7f05 r-xp 00000000 fd:01 15  /venv/libnvrtc.alt.so.13\n"
    )
    assert nvrtc.mapped_libraries(maps) == ["/venv/lib/nvidia/cu13/lib/libnvrtc.so.13", "/a b/libnvrtc.so.12.8.93"]


def test_an_override_is_the_only_candidate_and_its_failure_is_told() -> None:
    assert list(nvrtc.candidates("/x/libnvrtc.so")) == [("PRIME_KERNELS_NVRTC", "/x/libnvrtc.so")]
    found, tried = nvrtc.find("/nonexistent/libnvrtc.so.13")
    assert found is None
    error = nvrtc.missing(tried)
    assert error.code == "E30"
    assert "/nonexistent/libnvrtc.so.13 (PRIME_KERNELS_NVRTC)" in str(error)
    assert "pip install 'nvidia-cuda-nvrtc" in (error.remedy or "")
    assert error.facts["tried"]


def test_a_library_that_is_no_nvrtc_is_skipped_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "libnvrtc.so.13").write_bytes(b"not a library")
    found, tried = nvrtc.find(str(tmp_path / "libnvrtc.so.13"))
    assert found is None
    assert str(tmp_path) in tried[0]


@pytest.mark.parametrize(
    ("version", "archs", "target", "word"),
    [
        ((12, 6), (90,), "sm_100a", "need 12.8 or newer"),
        ((12, 8), (90, 100), "sm_103a", "need 12.9 or newer"),
        ((12, 8), (90, 100), "sm_100f", "need 12.9 or newer"),
        ((13, 0), (90,), "sm_100a", "supports 90, need 100"),
    ],
)
def test_a_compiler_that_does_not_know_the_target_is_refused(
    version: tuple[int, int], archs: tuple[int, ...], target: str, word: str
) -> None:
    error = jit.unbuildable(fake_nvrtc(version, archs), parse(target), 13000)
    assert error is not None
    assert error.code == "E30"
    assert word in str(error)
    assert error.facts["target"] == target
    assert error.remedy


def test_a_compiler_of_a_newer_major_than_the_driver_is_refused() -> None:
    error = jit.unbuildable(fake_nvrtc(), parse("sm_90a"), 12090)
    assert error is not None
    assert "a driver for CUDA 12.9 does not load" in str(error)
    assert jit.unbuildable(fake_nvrtc(), parse("sm_90a"), 13000) is None
    assert jit.unbuildable(fake_nvrtc((12, 9)), parse("sm_90a"), 13000) is None
    assert jit.unbuildable(fake_nvrtc(), parse("sm_90a"), None) is None


def test_a_target_the_kernel_is_not_written_for_is_told_as_such(tmp_path: Path) -> None:
    made.write_sources(tmp_path / "src", archs=["sm_90a"])
    with pytest.raises(BackendUnavailable, match="written for sm_90a, not for sm_100a") as caught:
        resolve.resolve(KEY, (10, 0), 13000, made.installation(tmp_path, sources=False))
    assert caught.value.code == "E09"


# --- what is compiled, and its name


def test_a_unit_holds_every_include_under_its_name_from_the_root(tmp_path: Path) -> None:
    unit = unit_of(tmp_path)
    assert list(unit.headers) == ["common/scale.cuh", "moe/body.cuh"]
    assert '#include "common/scale.cuh"' in unit.headers["moe/body.cuh"]
    assert unit.options == ("-std=c++20", "-default-device")


def test_the_cache_key_follows_every_source_the_options_the_compiler_and_the_target(tmp_path: Path) -> None:
    base = unit_of(tmp_path / "a")
    assert unit_of(tmp_path / "elsewhere").cache_key("13.0.88", parse("sm_90a")) == base.cache_key(
        "13.0.88", parse("sm_90a")
    )
    (tmp_path / "b").mkdir()
    other = unit_of(tmp_path / "b", source=made.SOURCE + "// more\n")
    (tmp_path / "a" / "common" / "scale.cuh").write_text(made.SCALE.replace("3.0f", "4.0f"))
    sources = jit.read_sources(tmp_path / "a")
    assert sources is not None
    header = jit.read_unit(sources, KEY, tmp_path / "a")
    assert header is not None
    keys = {
        unit.cache_key(release, parse(target)).path
        for unit in (base, other, header)
        for release in ("13.0.88", "13.1.2")
        for target in ("sm_90a", "sm_100a")
    }
    assert len(keys) == 12


@pytest.mark.parametrize("include", ["../../etc/passwd", "/etc/passwd", "../../../x.cuh"])
def test_an_include_outside_the_sources_is_refused(include: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        unit_of(tmp_path, source=f'#include "{include}"\n')
    assert caught.value.code == "E10"


def test_a_missing_source_is_a_damaged_installation(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"gone\.cuh"):
        unit_of(tmp_path, source='#include "moe/gone.cuh"\n')


# --- policy


def test_a_pack_built_from_other_sources_than_those_beside_it_is_refused(tmp_path: Path) -> None:
    at = made.installation(tmp_path, sources=False)
    made.write_sources(tmp_path / "src", key=made.KEY, src_fp="1" * 64)
    at = made.installation(tmp_path, sources=False)
    with pytest.raises(ArtifactError) as caught:
        resolve.resolve(made.KEY, H200, 13000, at)
    assert caught.value.code == "E11"
    assert "two builds are mixed" in str(caught.value)
    assert caught.value.facts["sources"] == str(tmp_path / "src")
    assert "build_tools.stage" in (caught.value.remedy or "")


def test_without_sources_the_error_is_the_whole_trace(tmp_path: Path) -> None:
    at = made.installation(tmp_path, sources=False)
    with pytest.raises(BackendUnavailable) as caught:
        resolve.resolve("fake|other", H200, 13000, at)
    assert caught.value.code == "E09"
    assert "cu130/sm_90a" in str(caught.value)
    assert "no sources of this kernel are installed" in str(caught.value)
    assert caught.value.facts["trace"]
    assert caught.value.remedy


def test_a_compile_that_is_switched_off_names_key_shipped_keys_and_the_warmup_line(tmp_path: Path) -> None:
    at = made.installation(tmp_path, jit="never")
    made.write_sources(tmp_path / "src", key="fake|b8|t256")
    at = made.installation(tmp_path, sources=False, jit="never")
    with pytest.raises(CompileError) as caught:
        resolve.resolve("fake|b8|t256", H200, 13000, at)
    error = caught.value
    assert error.code == "E31"
    assert "fake|b8|t256 for sm_90a" in str(error)
    assert error.facts["nearest"] == [made.KEY]
    assert "prime-kernels warmup --arch sm_90a" in (error.remedy or "")


def test_after_warmup_means_after_the_job_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_warm", False)
    at = made.installation(tmp_path, packs=False, jit="error-after-warmup", nvrtc="/nonexistent")
    with pytest.raises(CompileError) as before:
        resolve.resolve(KEY, H200, 13000, at)
    assert before.value.code == "E30"
    assert before.value.facts["needed"] == "12.0"
    assert nvrtc.PIP_LINE in (before.value.remedy or "")
    resolve.finish_warmup()
    with pytest.raises(CompileError, match="after warm-up") as after:
        resolve.resolve(KEY, H200, 13000, at)
    assert after.value.code == "E31"


def test_a_runtime_s_warmup_is_what_ends_the_warmup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_warm", False)
    at = made.installation(tmp_path, packs=False, jit="error-after-warmup", nvrtc="/nonexistent")
    codes: list[str] = []

    def load(key: str, *, device: int | None = None) -> None:
        with pytest.raises(CompileError) as caught:
            resolve.resolve(KEY, H200, 13000, at)
        codes.append(caught.value.code)

    monkeypatch.setattr("prime_kernels.loader.load_kernel", load)
    sizes = {"num_experts": 8, "topk": 2, "hidden": 64, "intermediate": 128, "max_tokens_per_rank": 64}
    runtime: Any = SimpleNamespace(peers=None, config=MegaMoEConfig(**sizes), device=SimpleNamespace(index=0))
    # The second runtime of a job is warmed up like the first: E30 is "no compiler", E31 would be "not allowed".
    for _ in range(2):
        codes.clear()
        CudaBackend().warmup(runtime, ())
        assert len(codes) >= 4
        assert set(codes) == {"E30"}
        with pytest.raises(CompileError, match="after warm-up"):
            resolve.resolve(KEY, H200, 13000, at)


def test_a_warmup_that_fails_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_warm", False)
    with pytest.raises(KeyError), resolve.warming_up():
        raise KeyError
    assert not resolve._jit_off("error-after-warmup")


def test_asking_without_building_says_what_would_happen(tmp_path: Path) -> None:
    at = made.installation(tmp_path, packs=False, nvrtc="/nonexistent")
    found, trace = resolve.resolve(KEY, H200, 13000, at, build=False)
    assert found is None
    assert [type(step).__name__ for step in trace] == ["Rejected", "Rejected"]
    assert "no NVRTC was found" in select.trace_text(trace)


def test_a_cached_build_is_used_without_any_compiler(tmp_path: Path) -> None:
    at = made.installation(tmp_path, packs=False, nvrtc="/nonexistent")
    unit = jit.read_unit(at.sources, KEY, at.sources_folder) if at.sources else None
    assert unit is not None
    cubin = made.fake_cubin("pk_made", meta=made.launch_meta(args_bytes=16, args_hash=0x77))
    at.store.publish(unit.cache_key("13.1.5", parse("sm_90a")), cubin, "test")
    found, trace = resolve.resolve(KEY, H200, 13000, at)
    assert found is not None
    assert (found[0], found[1].origin, select.first_accepted(trace).where) == (cubin, "cache", "cache")  # type: ignore[union-attr]
    # A driver for 12.9 does not load what NVRTC 13 makes.
    with pytest.raises(CompileError) as caught:
        resolve.resolve(KEY, H200, 12090, at)
    assert caught.value.code == "E30"


# --- compiling


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_a_kernel_compiles_without_a_gpu_for_the_target_asked_for(target: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    older = COMPILER.cannot_build(parse(target))
    if older is not None:
        pytest.skip(older)
    unit = unit_of(tmp_path)
    cubin = jit.compile_unit(unit, COMPILER, parse(target))
    found = elf.inspect(cubin)
    assert (found.sm, list(found.kernels)) == (parse(target).sm, ["pk_made"])
    assert found.kernels["pk_made"].param_bytes == 16
    assert jit.compile_unit(unit, COMPILER, parse(target)) == cubin


@needs_nvrtc
def test_a_compiled_kernel_is_kept_and_found_the_next_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    at = made.installation(tmp_path, packs=False)
    with caplog.at_level(logging.WARNING, "prime_kernels.loader"):
        first, _ = resolve.resolve(KEY, H200, 13000, at)
    assert [record.message.split(" ")[0] for record in caplog.records] == ["compiling", "compiled"]
    again, trace = resolve.resolve(KEY, H200, 13000, made.installation(tmp_path, packs=False, nvrtc="/nonexistent"))
    assert first is not None
    assert again is not None
    assert (first[1].origin, again[1].origin, trace[-1].where) == ("built", "cache", "cache")
    assert first[0] == again[0]


@needs_nvrtc
def test_warn_mode_compiles_and_says_what_would_have_avoided_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "prime_kernels.loader"):
        resolve.resolve(KEY, H200, 13000, made.installation(tmp_path, packs=False, jit="warn"))
    assert any("E31" in record.message and "warmup" in record.message for record in caplog.records)


@needs_nvrtc
def test_a_compile_error_shows_its_first_lines_and_keeps_the_log_private(tmp_path: Path) -> None:
    at = made.installation(tmp_path, packs=False, sources=False)
    made.write_sources(tmp_path / "src", source=made.SOURCE + "int broken = nothing_of_this_name;\n" * 40)
    at = made.installation(tmp_path, packs=False, sources=False)
    with pytest.raises(CompileError) as caught:
        resolve.resolve(KEY, H200, 13000, at)
    error = caught.value
    assert error.code == "E32"
    assert 'identifier "nothing_of_this_name" is undefined' in str(error)
    assert len(error.facts["errors"]) == 20  # type: ignore[arg-type]
    log = Path(str(error.facts["log_path"]))
    assert str(log) in str(error)
    assert log.read_text().count("nothing_of_this_name") >= 40
    assert log.stat().st_mode & 0o777 == 0o600
    assert error.remedy


@needs_nvrtc
@pytest.mark.parametrize(
    "change",
    [{"args_hash": f"{0x78:016x}"}, {"kernel": "pk_other"}, {"args": [["x", "ptr", 3, 0]]}],
    ids=["layout hash", "symbol", "struct size"],
)
def test_a_result_that_is_not_what_was_promised_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    assert COMPILER is not None
    with pytest.raises(CompileError, match="made something else of") as caught:
        jit.compile_unit(unit_of(tmp_path, **change), COMPILER, parse("sm_90a"))
    assert caught.value.code == "E32"


@needs_nvrtc
def test_spills_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert COMPILER is not None
    spilling = made.BODY.replace(
        "x[threadIdx.x] *= kScale;",
        "{ float a[64]; for (unsigned i = 0; i < n; ++i) a[i % 64] = x[i]; "
        "for (unsigned i = 0; i < n; ++i) x[i] = a[i * 7 % 64]; }",
    )
    made.write_sources(tmp_path)
    (tmp_path / "moe" / "body.cuh").write_text(spilling)
    sources = jit.read_sources(tmp_path)
    unit = jit.read_unit(sources, KEY, tmp_path) if sources else None
    assert unit is not None
    with caplog.at_level(logging.WARNING, "prime_kernels.loader"):
        jit.compile_unit(unit, COMPILER, parse("sm_90a"))
    assert any("bytes of stack per thread, need 0" in record.message for record in caplog.records)


def _compile_cold(folder: Path, gate: Any, results: Any) -> None:
    at = made.installation(folder, packs=False, sources=False)
    gate.wait(60)
    found, _ = resolve.resolve(KEY, H200, 13000, at)
    assert found is not None
    results.put(found[1].origin)


@needs_nvrtc
def test_ranks_that_start_cold_compile_once(tmp_path: Path) -> None:
    made.write_sources(tmp_path / "src")
    spawn = multiprocessing.get_context("spawn")
    gate, results = spawn.Barrier(4), spawn.Queue()
    processes = [spawn.Process(target=_compile_cold, args=(tmp_path, gate, results)) for _ in range(4)]
    for process in processes:
        process.start()
    origins = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    assert origins == ["built", "cache", "cache", "cache"]


@needs_nvrtc
def test_the_interpreter_runs_on_while_a_kernel_compiles(tmp_path: Path) -> None:
    import threading

    assert COMPILER is not None
    unit, ticks, done = unit_of(tmp_path), [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    jit.compile_unit(unit, COMPILER, parse("sm_90a"))
    done.set()
    thread.join(10)
    assert ticks[0] >= 5


@needs_nvrtc
def test_warmup_fills_a_cache_in_several_processes_and_then_finds_it_full(tmp_path: Path) -> None:
    at = made.installation(tmp_path)
    targets = [parse("sm_90a"), parse("sm_100a")]
    assert warmup.todo(at, targets, [None]) == [(KEY, target) for target in targets]
    assert {warmup.build(KEY, target, at) for target in targets} == {"built"}
    assert {warmup.build(KEY, target, at) for target in targets} == {"cache"}


@needs_nvrtc
@pytest.mark.slow
def test_the_shipped_sources_compile_with_nvrtc_to_what_the_build_promised(tmp_path: Path) -> None:
    stage.stage_sources(tmp_path)
    sources = jit.read_sources(tmp_path / "_src")
    assert sources is not None
    assert COMPILER is not None
    assert sources.entries
    raw = json.loads((tmp_path / "_src" / "ENTRIES.json").read_text())["entries"]
    # One variant of each kernel: the others differ in a template argument.
    for key in {entry.kernel: key for key, entry in sources.entries.items()}.values():
        unit = jit.read_unit(sources, key, tmp_path / "_src")
        assert unit is not None
        cubin = jit.compile_unit(unit, COMPILER, parse("sm_90a"))
        spec = jit.describe(cubin, unit.entry, parse("sm_90a"), "built")
        assert spec.meta.args_bytes == raw[key]["args_bytes"]
        assert isinstance(unit.cache_key("13.0.88", parse("sm_90a")), CacheKey)
