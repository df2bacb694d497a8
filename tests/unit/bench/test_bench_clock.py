"""The cost of the clock's waits: steps with and without them take turns, and a cost that is there is found."""

import os
import signal
import time
from pathlib import Path

import pytest

from bench_jobs import ARCHITECTURE
from qerl_lab import exits
from qerl_lab.bench import __main__ as command
from qerl_lab.bench import clock
from qerl_lab.bench.options import ClockOptions, StepOptions
from qerl_lab.report.bench import clock_line
from qerl_lab.train import trainer


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "least"), [(0.0, -100), (0.25, 60)])
def test_a_wait_that_costs_is_found(seconds: float, least: float, monkeypatch, tmp_path: Path) -> None:
    """A step of four short completions takes some tenths of a second, and waits three times.

    Waits that cost nothing are told by the seconds inside of them: the steps' own vary with what else the machine does.
    """

    class Slow(trainer.Clock):
        def __init__(self, _: object) -> None:
            super().__init__(lambda: time.sleep(seconds))

    monkeypatch.setattr(trainer, "Clock", Slow)
    monkeypatch.setitem(clock.ARCHITECTURES, "small", ARCHITECTURE)
    size = StepOptions(
        model="small", groups=2, group_size=2, prompt=12, new=4, micro_batch=4, rank=4, scratch=str(tmp_path)
    )
    told: list[dict] = []
    row = clock.measure(ClockOptions(pairs=3, block=1, device="cpu", engine="transformers"), told.append, size)
    assert [pair["pairs"] for pair in told] == [1, 2, 3]
    assert {**told[-1], "at_most_percent": row["at_most_percent"]} == row  # of one step more
    assert row["cost_percent"] > least
    assert row["low"] <= row["cost_percent"] <= row["high"]
    in_waits = row["at_most_percent"] / 100 * row["ms_per_step_waiting"] / 1000
    assert 2 * seconds <= in_waits < 2.1 * seconds + 0.05  # the third is before the loss is read, where a GPU waits
    assert clock_line({**row, "options": {"pairs": 3}}).endswith(f"at most {row['at_most_percent']:.2f}%")


def test_a_signal_ends_it_in_order(monkeypatch, tmp_path: Path) -> None:
    """So that it removes its checkpoint."""

    def ended(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(clock, "measure", ended)
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    heard = {number: signal.getsignal(number) for number in exits.SIGNALS}
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listens to the signal"))
    try:
        assert command.main(["clock", f"out={tmp_path / 'clock'}"]) == exits.INTERRUPTED
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def test_the_cost_is_that_of_pairs() -> None:
    row = clock.row_of(waiting=[1.02, 2.04, 4.0], running=[1.0, 2.0, 4.0])
    assert row["cost_percent"] == pytest.approx(2.0)
    assert row["low"] == pytest.approx(0.0)
    assert row["high"] == pytest.approx(2.0)
