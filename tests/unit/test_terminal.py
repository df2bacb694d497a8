"""What a run says while it goes, on a terminal and elsewhere."""

import io
import re
import sys
import time

import pytest

from qerl_lab.system import terminal

METRICS = {
    "reward/mean": 0.5, "policy/entropy_nats": 0.25, "noise/sigma": 0.01, "rollout/tokens_per_second": 1234.0,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves when its only entry does."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_evaluation_shows_a_few_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.Amount("held-out questions before training", 2000, unit="completion") as bar:
        for _ in range(100):
            clock[0] += 1.5
            bar.advance(20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == terminal.LINES
    assert lines[0] == "held-out questions before training: 200/2,000 completions, ETA 02:15"


def test_a_short_evaluation_shows_none(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.Amount("held-out questions", 8, unit="completion") as bar:
        bar.advance(8)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with terminal.Amount("held-out questions", 8, unit="completion") as bar:
        bar.advance(8)
    assert re.search(r"held-out questions: 100%.* 8/8 ", screen.getvalue())


def test_an_error_closes_the_bar_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = terminal.Progress(10, 0)
    assert progress.bar is not None
    assert not progress.bar.disable
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError
    assert progress.bar.disable, "closed"


def test_a_run_says_how_far_it_is(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    bar = terminal.Progress(10, 0)
    clock[0] += 1
    bar.show(1, METRICS)
    assert capsys.readouterr().err.startswith("step 1/10, ETA 00:09, reward 0.50")
    with terminal.Amount("held-out questions", 10, unit="completion") as amount:
        clock[0] += 2
        amount.advance(5)
    assert capsys.readouterr().err.startswith("held-out questions: 5/10 completions")
