# SPDX-License-Identifier: Apache-2.0
"""The driver of everything that one GPU can tell, on steps that hang, crash, lie and leave children behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import one_gpu, one_gpu_steps, stamp, watchdog
from benchmarks.one_gpu_steps import Job, Step, StepError

HANG = "import time; print('here', flush=True); time.sleep(600)"
LEAVES_A_CHILD = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(child.pid)"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def gone(pid: int) -> bool:
    """Whether a process has ended; a killed one may take a moment, and nobody may be left to reap it."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def fake(name: str, code: str, *, alone: bool = False, limit_s: float = 30) -> Step:
    """A step that runs a line of Python and reports what it printed."""
    return Step(name, limit_s + 5, lambda job: job.run("", python(code), limit_s=limit_s).text.splitlines(), alone)


def rows(out: Path) -> dict[str, dict[str, object]]:
    return {row["step"]: row for row in json.loads((out / "summary.json").read_text())}


def test_a_command_that_hangs_is_stopped_and_says_where_it_was(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    done = watchdog.run_watched(python(HANG), log=tmp_path / "log", limit_s=1, env=env)
    assert done.rc is None
    assert done.ending().startswith("stopped after 1 s")
    assert done.seconds < 5
    assert done.text.startswith("here")
    assert "most recent call first" in done.text


def test_nothing_outlives_a_command(tmp_path: Path) -> None:
    done = watchdog.run_watched(python(LEAVES_A_CHILD), log=tmp_path / "log", limit_s=20)
    assert done.rc == 0
    assert gone(int(done.text))


def test_how_a_command_ended_is_said_in_words(tmp_path: Path) -> None:
    for code, words in (("raise SystemExit(3)", "exit 3"), ("import os; os.kill(os.getpid(), 11)", "died of SIGSEGV")):
        assert watchdog.run_watched(python(code), log=tmp_path / "log", limit_s=20).ending() == words


def test_no_failure_ends_the_run_and_the_table_has_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_job: Job) -> list[str]:
        raise KeyError("not there")

    def found_wanting(_job: Job) -> list[str]:
        raise StepError("12 us, at most 10", ["the numbers all the same"])

    steps = [
        fake("first:a", "print('7 ms')"),
        fake("first:b", HANG, limit_s=1),
        fake("timed", "print('one'); print('two')", alone=True),
        Step("broken", 5, broken),
        Step("wanting", 5, found_wanting),
        fake("crash", "import os; print('last words', flush=True); os.abort()"),
        Step("absent", 5, lambda job: job.run("", ["/no/such/program"], limit_s=5).tail(1)),
        fake("last", "print('fine')"),
    ]
    assert one_gpu.main(["--out", str(tmp_path / "out"), "--jobs", "2"], steps) == 1
    printed = capsys.readouterr().out
    found = rows(tmp_path / "out")
    assert list(found) == [step.name for step in steps]
    verdicts = {name: row["verdict"] for name, row in found.items()}
    assert [name for name, verdict in verdicts.items() if verdict == "ok"] == ["first:a", "timed", "last"]
    assert found["timed"]["lines"] == ["one", "two"]
    assert "stopped after" in str(found["first:b"]["lines"])
    assert found["broken"]["lines"] == ["KeyError: 'not there'"]
    assert "died of SIGABRT" in str(found["crash"]["lines"])
    for text in (
        "7 ms",
        "at most 10",
        "the numbers all the same",
        "last words",
        "FileNotFoundError",
        "3 of 8 steps ok",
    ):
        assert text in printed, text
    assert (tmp_path / "out" / "summary.txt").read_text() in printed + "\n"
    assert (tmp_path / "out" / "first-b.log").read_text().startswith("here")
    assert all(path.is_file() for path in (tmp_path / "out").iterdir()), "flat files only"


def test_steps_that_time_nothing_share_the_machine_and_the_others_do_not(tmp_path: Path) -> None:
    code = f"import time, pathlib; b = time.time(); time.sleep(0.5); p = pathlib.Path({str(tmp_path)!r}); "
    steps = [
        fake(name, f"{code}(p / '{name}').write_text(f'{{b}} {{time.time()}}')", alone=name.startswith("t"))
        for name in ("a", "b", "t1", "t2", "c")
    ]
    assert one_gpu.main(["--out", str(tmp_path / "out")], steps) == 0
    spans = {step.name: tuple(map(float, (tmp_path / step.name).read_text().split())) for step in steps}
    assert max(spans["a"][0], spans["b"][0]) < min(spans["a"][1], spans["b"][1])
    for before, after in (("a", "t1"), ("b", "t1"), ("t1", "t2"), ("t2", "c")):
        assert spans[before][1] <= spans[after][0]


def test_what_does_not_fit_the_budget_is_not_run_and_not_ok(tmp_path: Path) -> None:
    steps = [fake("long", HANG, alone=True), fake("never", "print('no')", alone=True)]
    began = time.monotonic()
    assert one_gpu.main(["--out", str(tmp_path), "--budget", "3"], steps) == 1
    assert time.monotonic() - began < 10
    assert [row["verdict"] for row in rows(tmp_path).values()] == ["FAILED", "not run"]


def test_an_interrupted_run_leaves_no_process_and_still_says_what_it_knows(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(one_gpu.ROOT)!r})
from benchmarks import one_gpu
from tests.unit.test_one_gpu import fake
slow = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
steps = [fake("quick", "print('done')"), fake("slow", slow), fake("next", "print('never')", alone=True)]
sys.exit(one_gpu.main(["--out", {str(tmp_path)!r}], steps))
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    log = tmp_path / "slow.log"
    for _ in range(200):
        if log.is_file() and log.read_text().strip() and (tmp_path / "quick.log").is_file():
            break
        time.sleep(0.1)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(20) == 1
    assert gone(int(log.read_text()))
    found = rows(tmp_path)
    assert list(found) == ["quick", "slow", "next"]
    assert found["next"]["verdict"] == "not run"


def test_steps_are_chosen_by_name_or_by_what_stands_before_the_colon(capsys: pytest.CaptureFixture[str]) -> None:
    steps = one_gpu_steps.all_steps()
    names = [step.name for step in steps]
    assert [step.name for step in one_gpu.choose(steps, "bench,demo", "bench:235b")] == ["bench:30b", "demo"]
    assert [step.name for step in one_gpu.choose(steps, "", "gpu-tests,bench,virtual")] == names[-8:]
    with pytest.raises(SystemExit) as stop:
        one_gpu.main(["--out", "unused", "--only", "bench,dema"])
    assert stop.value.code == 2
    assert "'dema'" in capsys.readouterr().err
    assert one_gpu.main(["--out", "unused", "--only", "wheel", "--list"]) == 0
    assert capsys.readouterr().out == "wheel (alone)\n"
    assert not Path("unused").exists()


def test_every_file_of_gpu_tests_has_a_step() -> None:
    files = {path.name for path in (one_gpu.ROOT / "tests" / "gpu").glob("test_*.py")}
    names = [step.name for step in one_gpu_steps.all_steps()]
    steps = {f"test_{name.removeprefix('gpu-tests:')}.py" for name in names if name.startswith("gpu-tests:")}
    assert steps | {one_gpu_steps.REFERENCE_TESTS} == files
    assert "reference-cuda" in names


def test_failed_tests_are_counted_and_quoted(tmp_path: Path) -> None:
    test = tmp_path / "test_mixed.py"
    test.write_text("def test_good(): pass\ndef test_bad(): assert 1 + 1 == 3, 'sums are off'\n")
    (outcome,) = one_gpu.run_steps([one_gpu_steps.pytest_step("t:x", test, 60)], tmp_path, jobs=1, budget_s=60)
    assert outcome.verdict == "FAILED"
    assert outcome.lines == ["1 failed, 1 passed; t-x.log"]
    assert any("test_bad" in line for line in outcome.details)
    assert any("sums are off" in line for line in outcome.details)
    test.write_text("def test_good(): pass\n")
    (outcome,) = one_gpu.run_steps([one_gpu_steps.pytest_step("t:x", test, 60)], tmp_path, jobs=1, budget_s=60)
    assert (outcome.verdict, outcome.lines) == ("ok", ["1 passed"])


def test_commands_of_a_step_are_refused_when_its_time_is_up(tmp_path: Path) -> None:
    job = Job("late", tmp_path, tmp_path, time.monotonic())
    with pytest.raises(StepError, match="no time left for it"):
        job.run("it", python("print()"), limit_s=5)


def test_without_a_fitting_stamp_nothing_is_recorded_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run(self: Job, what: str, command: list[str], **_: object) -> watchdog.Finished:
        seen.append(command)
        lines = [f"  {op:<17} {'cuda':<22}    2.345 ms  p10 2.3  p90 2.4  528.1 TFLOP/s  host 45 us" for op in OPS]
        return watchdog.Finished(0, 1.0, "\n".join(lines))

    monkeypatch.setattr(Job, "run", run)
    job = Job("bench:30b", tmp_path, tmp_path, time.monotonic() + 60)
    for problem, record, note in ((None, True, None), ("no stamp", True, "no stamp"), (None, False, "as asked")):
        monkeypatch.setattr(stamp, "read_stamp", lambda _, problem=problem: (None if problem else {}, problem))
        lines = one_gpu_steps.bench_step("bench:30b", "qwen3-30b-a3b", record=record).work(job)
        assert ("--record" in seen[-1]) == (note is None)
        assert lines[2:] == ([] if note is None else [f"NOT RECORDED: {note}"])


OPS = ("forward", "backward")
