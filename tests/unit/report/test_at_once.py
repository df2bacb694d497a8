"""Runs that ran at once on one machine are known by the words of their sweep and by their clocks, and are said."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from qerl_lab.report import copies
from qerl_lab.report.__main__ import main
from qerl_lab.report.at_once import notes as may_have_run
from qerl_lab.report.at_once import told
from qerl_lab.report.measures import MEASURES, Unmeasured
from qerl_lab.report.runs import Origin, Record, Session
from run_directories import make_run
from simulated_runs import record

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
PLAIN = "python -m qerl_lab"


def ran(begin: float, end: float, place: str = "GPU-1", machine: str = "NVIDIA H200", command: str = PLAIN) -> Record:
    """A run from and to so many seconds after noon."""
    one = record({"device": "cuda"}, 0, 0.3)
    began = datetime.fromtimestamp(NOON + begin, UTC).isoformat(timespec="seconds")
    origin = Origin(command=command, began=began, place=place, machine=machine)
    return replace(one, run=replace(one.run, ended=NOON + end), origin=origin)


def at_once(*records: Record) -> list[int]:
    return [one.side_by_side for one in told(records)]


def test_runs_that_overlap_on_a_gpu_ran_at_once() -> None:
    assert at_once(ran(0, 100), ran(50, 150), ran(120, 200)) == [2, 2, 2]
    assert at_once(ran(0, 100), ran(10, 20), ran(30, 40), ran(35, 39)) == [3, 2, 3, 3]  # never four


def test_runs_one_after_another_ran_alone() -> None:
    """The next may begin in the second in which the last ended: starts are noted in whole ones."""
    assert at_once(ran(0, 100.4), ran(100, 200), ran(300, 400)) == [1, 1, 1]
    assert at_once(ran(0, 100), ran(98, 200)) == [2, 2]


@pytest.mark.parametrize(("places", "count"), [
    (("GPU-1", "GPU-2"), 1), (("GPU-1 GPU-2", "GPU-2"), 2), (("host", "host"), 2), (("host", "other"), 1),
])  # fmt: skip
def test_machines_are_told_apart_by_their_gpus_or_hosts(places: tuple[str, str], count: int) -> None:
    assert at_once(*(ran(0, 100, place) for place in places)) == [count, count]


def test_of_older_records_runs_by_themselves_share_machines_that_are_alike() -> None:
    old = {"place": "", "machine": "NVIDIA H200, 16 CPUs"}
    assert at_once(ran(0, 100, **old), ran(0, 100, **old)) == [2, 2]
    assert at_once(ran(0, 100, **old), ran(0, 100, **old | {"machine": "NVIDIA H200, 32 CPUs"})) == [1, 1]
    sweep = f"{PLAIN} +sweeps=weight_formats jobs=2 jobs_per_gpu=1"  # on two cards of one machine
    assert at_once(*(ran(0, 100, **old, command=sweep) for _ in range(2))) == [1, 1]
    assert at_once(*(ran(0, 100, "", "") for _ in range(2))) == [1, 1]  # nothing known


def test_a_run_that_did_not_note_its_start_is_beside_none() -> None:
    silent = ran(0, 100)
    assert at_once(replace(silent, origin=replace(silent.origin, began="")), ran(0, 100)) == [1, 1]


def test_the_larger_of_words_and_clocks_counts() -> None:
    shared = f"{PLAIN} jobs=4 jobs_per_gpu=4"
    assert at_once(ran(0, 100, command=shared), ran(200, 300, command=shared)) == [4, 4]
    alone = f"{PLAIN} +sweeps=weight_formats jobs_per_gpu=1"  # typed twice, for one card
    assert at_once(ran(0, 100, command=alone), ran(0, 100, command=alone)) == [2, 2]


def test_a_copy_of_a_run_is_not_a_run_beside_it() -> None:
    first = ran(0, 100)
    copy = replace(first, run=replace(first.run, name="copy"))
    assert [one.side_by_side for one in told(copies.told([first, copy]))] == [1, 1]
    other = replace(ran(50, 150), run=replace(ran(50, 150).run, name="other", seed=1))
    assert [one.side_by_side for one in told(copies.told([first, copy, other]))] == [2, 2, 2]


def resumed(*spans: tuple[float, float | None], places: tuple[str, ...] = ("GPU-1", "GPU-1")) -> Record:
    """A run of several sessions, each from and to so many seconds after noon."""
    one = ran(spans[0][0], spans[-1][1] or 0)
    sessions = (
        Session(NOON + begin, None if end is None else NOON + end, place)
        for (begin, end), place in zip(spans, places, strict=True)
    )
    return replace(one, origin=replace(one.origin, sessions=tuple(sessions)))


def test_a_resumed_run_is_beside_none_in_its_pause() -> None:
    paused = resumed((0, 100), (200, 300))
    assert at_once(paused, ran(110, 190)) == [1, 1]
    assert at_once(paused, ran(50, 150)) == at_once(paused, ran(150, 250)) == [2, 2]
    assert at_once(paused, resumed((100, 200), (300, 400))) == [1, 1]
    moved = resumed((0, 100), (200, 300), places=("GPU-1", "GPU-2"))
    assert at_once(moved, ran(200, 300), ran(10, 20, "GPU-2")) == [1, 1, 1]
    assert at_once(moved, ran(200, 300, "GPU-2")) == [2, 2]


def test_a_resumed_run_of_which_no_pause_is_known_may_be_beside_others() -> None:
    for unknown in (resumed((0, None), (200, 300)), ran(0, 300, command=f"{PLAIN} then {PLAIN} resume=DIR")):
        pair = told([unknown, ran(110, 190)])
        assert [(one.side_by_side, one.is_surely_beside) for one in pair] == [(2, False), (2, False)]
        assert may_have_run(pair) == ["Runs may have run beside another, as it is not known when a resumed run paused: "
                                      "their seconds and tokens/s are left out."]  # fmt: skip
        with pytest.raises(Unmeasured, match="may have run beside others, as it is not known when"):
            MEASURES["step_throughput"].of(pair, pair)
        assert all(one.is_surely_beside for one in told([*pair, ran(120, 180)])[1:])
    later = told([resumed((0, None), (200, 300)), ran(210, 290)])  # in its last session
    assert [one.is_surely_beside for one in later] == [True, True]


# --- what the command says


def test_a_part_of_a_task_and_a_shared_gpu_are_said(here: Path, capsys) -> None:
    for words, shown in (("python -m qerl_lab", False), ("python -m qerl_lab jobs=4 jobs_per_gpu=4", True)):
        run = make_run(
            here / "sweep" / "bf16-0", "bf16", 0, task__name="gsm8k", task__gsm8k__max_steps=2 if shown else None
        )
        (run / "env.json").write_text(json.dumps({"command": words}))
        assert main(["sweep"]) == 0
        said = capsys.readouterr().out
        assert ("The questions are of gsm8k with at most 2 steps: no accuracy here is that" in said) == shown
        assert ("ran beside up to 3 others: seconds and tokens/s are of shared machines" in said) == shown
        shutil.rmtree(run)


def test_jobs_that_a_file_of_the_sweep_lets_run_at_once_are_said(here: Path, capsys) -> None:
    """No word of the command says so; the configuration does. A run that is of no sweep runs alone."""
    run = make_run(here / "sweep" / "bf16-0", "bf16", 0, jobs=4, jobs_per_gpu=4)
    for sweep, shown in ((None, False), ("mine/20260131-120000", True)):
        (run / "env.json").write_text(json.dumps({"command": "python -m qerl_lab +sweeps=mine", "sweep": sweep}))
        for words in (["sweep", "out=results"], ["results"]):
            assert main(words) == 0
            assert ("ran beside up to 3 others" in capsys.readouterr().out) == shown


def test_runs_that_ran_at_once_by_their_own_commands_are_said(here: Path, capsys) -> None:
    """Two shells, one GPU. Also from results, whose runs keep where they were; on two GPUs each ran alone."""
    for seed in range(2):
        make_run(here / "sweep" / f"bf16-{seed}", "bf16", seed)
    for other, shown in (("GPU-1", True), ("GPU-2", False)):
        for seed, gpu in enumerate(("GPU-1", other)):
            began = {"time": f"2020-01-01T00:00:0{seed}+0000", "gpus": [{"uuid": gpu, "name": "H200"}]}
            (here / "sweep" / f"bf16-{seed}" / "env.json").write_text(json.dumps(began))
        for words in (["sweep", "out=results"], ["results"]):
            assert main(words) == 0
            assert ("Runs ran beside another: seconds and tokens/s are of shared" in capsys.readouterr().out) == shown


def test_a_copy_beside_its_run_leaves_its_speed_to_be_compared(here: Path, capsys) -> None:
    run = make_run(here / "sweep" / "bf16-0", "bf16", 0)
    began = {"time": "2020-01-01T00:00:00+0000", "gpus": [{"uuid": "GPU-1", "name": "H200"}]}
    (run / "env.json").write_text(json.dumps(began))
    shutil.copytree(run, here / "home" / "bf16-0")
    assert main(["sweep", "home"]) == 0
    said = capsys.readouterr().out
    assert "is the same run" in said
    assert "ran beside" not in said


def test_a_run_that_went_on_beside_others_is_said(here: Path, capsys) -> None:
    """Its first session had the card to itself; the line that went on had not."""
    run = make_run(here / "sweep" / "bf16-0", "bf16", 0)
    for name, words in (("env.json", ""), ("env.2.json", " jobs=4 jobs_per_gpu=4"), ("env.10.json", "")):
        (run / name).write_text(json.dumps({"command": f"python -m qerl_lab{words}"}))
    assert main(["sweep"]) == 0
    assert "Runs ran beside up to 3 others" in capsys.readouterr().out


@pytest.mark.parametrize("known", [True, False])
def test_a_run_in_the_pause_of_a_resumed_one_has_a_speed(here: Path, capsys, known: bool) -> None:
    """Also from results. Without sessions.json nothing tells when the first session ended."""
    for name, ended in (("resumed", 300.0), ("between", 190.0)):
        make_run(here / "sweep" / name, "bf16", len(name), ended=ended)
    for run, file, second in (("resumed", "env.json", 0), ("resumed", "env.2.json", 200), ("between", "env.json", 110)):
        began = datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds")
        gpus = [{"uuid": "GPU-1", "name": "H200"}]
        (here / "sweep" / run / file).write_text(json.dumps({"time": began, "gpus": gpus}))
    if known:
        (here / "sweep" / "resumed" / "sessions.json").write_text("[[0.0, 100.0], [200.0, 301.0]]")
    for words in (["sweep", "out=results"], ["results"]):
        assert main(words) == 0
        assert ("may have run beside another" in capsys.readouterr().out) != known
