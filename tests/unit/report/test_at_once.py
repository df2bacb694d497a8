"""Runs that shared a machine are counted from their start and end times and from the options of their sweep."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from qerl_lab.report import comparison
from qerl_lab.report.__main__ import main
from qerl_lab.report.runs import Origin, Record
from run_directories import make_run
from simulated_runs import record

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
PLAIN = "python -m qerl_lab"


def ran(
    begin: float | None, end: float, place: str = "GPU-1", machine: str = "NVIDIA H200", command: str = PLAIN,
    device: str = "cuda",
) -> Record:  # fmt: skip
    """A run from and to so many seconds after noon. `None`: it did not note its start."""
    one = record({"device": device}, 0, 0.3)
    began = "" if begin is None else datetime.fromtimestamp(NOON + begin, UTC).isoformat(timespec="seconds")
    origin = Origin(command=command, began=began, place=place, machine=machine)
    return replace(one, run=replace(one.run, ended=NOON + end), origin=origin)


def at_once(*records: Record) -> list[int]:
    named = [replace(one, run=replace(one.run, name=str(n), seed=n)) for n, one in enumerate(records)]
    return [one.at_once for one in comparison.compare(named, {}).records]


OLD = {"place": "", "machine": "NVIDIA H200, 16 CPUs"}
SWEEP = f"{PLAIN} +sweeps=weight_formats"


@pytest.mark.parametrize(("records", "counts"), [
    ([ran(0, 100), ran(50, 150), ran(120, 200)], [2, 2, 2]),
    ([ran(0, 100), ran(10, 20), ran(30, 40), ran(35, 39)], [3, 2, 3, 3]),  # never four
    ([ran(0, 100.4), ran(100, 200), ran(300, 400)], [1, 1, 1]),  # starts are noted in whole seconds
    ([ran(0, 100), ran(98, 200)], [2, 2]),
    ([ran(None, 100), ran(0, 100)], [1, 1]),
    ([ran(0, 100, "GPU-1"), ran(0, 100, "GPU-2")], [1, 1]),
    ([ran(0, 100, "GPU-1 GPU-2"), ran(0, 100, "GPU-2")], [2, 2]),
    # of older records, runs by themselves share machines that are alike
    ([ran(0, 100, **OLD), ran(0, 100, **OLD)], [2, 2]),
    ([ran(0, 100, **OLD), ran(0, 100, "", "NVIDIA H200, 32 CPUs")], [1, 1]),
    (2 * [ran(0, 100, **OLD, command=f"{SWEEP} jobs=2 jobs_per_gpu=1")], [1, 1]),  # on two cards of one machine
    (2 * [ran(0, 100, "", "")], [1, 1]),  # nothing known
    # the larger of options and times counts
    (2 * [ran(0, 100, "GPU-1", command=f"{SWEEP} jobs_per_gpu=1")], [2, 2]),  # typed twice, for one card
    ([ran(0, 100, command=f"{SWEEP} jobs=4 jobs_per_gpu=4")], [4]),
    ([ran(0, 100, command=f"{SWEEP} jobs=4 jobs_per_gpu=1")], [1]),
    ([ran(0, 100, command=f"{SWEEP} jobs=4 jobs_per_gpu=1", device="cpu")], [4]),
])  # fmt: skip
def test_runs_at_once_on_one_machine_are_counted(records: list[Record], counts: list[int]) -> None:
    assert at_once(*records) == counts


# --- what the command says


def test_a_part_of_a_task_and_a_shared_gpu_are_said(here: Path, capsys) -> None:
    for words, shown in (("python -m qerl_lab", False), ("python -m qerl_lab jobs=4 jobs_per_gpu=4", True)):
        task = {"task__name": "gsm8k", "task__gsm8k__max_steps": 2 if shown else None}
        run = make_run(here / "sweep" / "bf16-0", "bf16", 0, began={"command": words}, **task)
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
    began = {"time": "2020-01-01T00:00:00+0000", "gpus": [{"uuid": "GPU-1", "name": "H200"}]}
    run = make_run(here / "sweep" / "bf16-0", "bf16", 0, began=began)
    shutil.copytree(run, here / "home" / "bf16-0")
    assert main(["sweep", "home"]) == 0
    assert "ran beside" not in capsys.readouterr().out


def test_a_resumed_run_is_where_any_of_its_sessions_was(here: Path) -> None:
    for name, gpus in (("resumed", (1, 2)), ("other", (2,))):
        run = make_run(here / "sweep" / name, "bf16", len(name))
        for file, gpu in zip(("env.json", "env.2.json"), gpus, strict=False):
            about = {"time": "2020-01-01T00:00:00+0000", "gpus": [{"uuid": f"GPU-{gpu}", "name": "H200"}]}
            (run / file).write_text(json.dumps(about))
    assert [record.at_once for record in comparison.read([here / "sweep"]).records] == [2, 2]


def test_a_run_that_went_on_beside_others_is_said(here: Path, capsys) -> None:
    """Its first session had the card to itself; the line that went on had not."""
    run = make_run(here / "sweep" / "bf16-0", "bf16", 0)
    for name, words in (("env.json", ""), ("env.2.json", " jobs=4 jobs_per_gpu=4"), ("env.10.json", "")):
        (run / name).write_text(json.dumps({"command": f"python -m qerl_lab{words}"}))
    assert main(["sweep"]) == 0
    assert "Runs ran beside up to 3 others" in capsys.readouterr().out
