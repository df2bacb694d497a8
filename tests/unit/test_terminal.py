"""Progress of a run on a terminal and elsewhere; imports without the garbage collector."""

import gc
import io
import os
import re
import sys
import time
from pathlib import Path

import pytest

from qerl_lab.system import terminal

METRICS = {
    "reward/mean": 0.5, "policy/entropy_nats": 0.25, "noise/sigma": 0.01, "rollout/tokens_per_second": 1234.0,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock; the test sets its time in the only entry."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_evaluation_prints_a_few_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.ProgressBar("held-out questions before training", 2000, unit="completion") as bar:
        for _ in range(100):
            clock[0] += 1.5
            bar.advance(20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == terminal.LINES
    assert lines[0] == "held-out questions before training: 200/2,000 completions, ETA 02:15"


def test_a_short_evaluation_prints_no_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.ProgressBar("held-out questions", 8, unit="completion") as bar:
        bar.advance(8)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with terminal.ProgressBar("held-out questions", 8, unit="completion") as bar:
        bar.advance(8)
    assert re.search(r"held-out questions: 100%.* 8/8 ", screen.getvalue())


def test_an_error_closes_the_bar_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = terminal.TrainingProgress(10, 0)
    assert progress.bar is not None
    assert not progress.bar.disable
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError
    assert progress.bar.disable, "closed"


def test_a_run_prints_its_progress(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    bar = terminal.TrainingProgress(10, 0)
    clock[0] += 1
    bar.show(1, METRICS)
    assert capsys.readouterr().err.startswith("step 1/10, ETA 00:09, reward 0.50")
    with terminal.ProgressBar("held-out questions", 10, unit="completion") as amount:
        clock[0] += 2
        amount.advance(5)
    assert capsys.readouterr().err.startswith("held-out questions: 5/10 completions")


def test_progress_without_a_unit_is_counted_in_bytes(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.ProgressBar("unpacking", 20 * 10**9) as bar:
        clock[0] += 2
        bar.advance(5 * 10**9, "tokenizer.json")
    assert capsys.readouterr().err == "unpacking: 5.00GB/20.0GB, ETA 00:06, tokenizer.json\n"


def test_the_time_left_of_a_resumed_run_is_from_the_steps_of_its_session(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty steps were done before. Printed are the first step of this session, each tenth of the run, and the last."""
    bar = terminal.TrainingProgress(105, 40)
    for step in range(41, 106):
        clock[0] += 2
        bar.show(step, METRICS)
    said = [line.split(", ")[:2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        [f"step {step}/105", f"ETA {left}"]
        for step, left in ((41, "02:08"), (50, "01:50"), (60, "01:30"), (70, "01:10"), (80, "00:50"), (90, "00:30"),
                           (100, "00:10"), (105, "00:00"))
    ]  # fmt: skip


def test_the_bar_of_a_resumed_run_begins_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with terminal.TrainingProgress(100, 40) as progress:
        progress.show(42, METRICS)
        assert progress.bar is not None
        assert progress.bar.n == 42
    assert "42/100" in screen.getvalue()
    terminal.say("a note")
    assert screen.getvalue().endswith("a note\n")


def test_names_are_sorted_by_their_numbers() -> None:
    names = ["rank128", "rank16", "10-bf16", "9-bf16", "full"]
    assert sorted(names, key=terminal.by_numbers) == ["9-bf16", "10-bf16", "full", "rank16", "rank128"]


def test_a_path_below_the_working_directory_is_shown_relative_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert terminal.format_path(tmp_path / "here" / "runs" / "a") == "runs/a"
    assert terminal.format_path(tmp_path / "runs") == f"{tmp_path}/runs"


def test_work_that_ends_in_time_gets_no_note_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SLOW_SECONDS", 0.2)
    with pytest.raises(KeyError), terminal.say_if_slow("grading"):
        raise KeyError
    time.sleep(0.5)
    assert capsys.readouterr().err == ""


def test_a_command_to_type_names_the_running_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(terminal.shutil, "which", lambda name: sys.executable)
    assert terminal.python_command() == "python"
    monkeypatch.setattr(terminal.shutil, "which", lambda name: "/usr/bin/python")
    monkeypatch.chdir(tmp_path)
    assert terminal.python_command() == sys.executable


def test_variables_of_libraries_are_set_before_imports_unless_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with terminal.quiet_imports():
        assert (os.environ["OMP_WAIT_POLICY"], os.environ["TOKENIZERS_PARALLELISM"]) == ("PASSIVE", "true")


def test_the_garbage_collector_is_off_during_imports_and_on_again_after_an_error() -> None:
    gc.unfreeze()
    with terminal.quiet_imports():
        assert not gc.isenabled()
        assert not gc.get_freeze_count()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    with pytest.raises(ImportError), terminal.quiet_imports():
        raise ImportError
    assert gc.isenabled()
