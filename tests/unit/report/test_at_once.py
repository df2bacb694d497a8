"""Runs that shared a machine are counted from their start and end times and from the options of their sweep."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from qerl_lab.report import comparison
from qerl_lab.report.runs import Origin, Run
from run_directories import make_run, save_results
from simulated_runs import record

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
PLAIN = "python -m qerl_lab"


def ran(
    begin: float | None, end: float, place: str = "GPU-1", machine: str = "NVIDIA H200", command: str = PLAIN,
    device: str = "cuda", pauses: tuple[tuple[float, float], ...] = (),
) -> Run:  # fmt: skip
    """Return a run from `begin` to `end`, in seconds after noon. `begin=None`: it did not record its start."""
    one = record({"device": device}, 0, 0.3)
    began = "" if begin is None else datetime.fromtimestamp(NOON + begin, UTC).isoformat(timespec="seconds")
    between = " ".join(f"{NOON + start:.0f}-{NOON + stop:.0f}" for start, stop in pauses)
    origin = Origin(command=command, began=began, pauses=between, place=place, machine=machine)
    return replace(one, ended=NOON + end, origin=origin)


def at_once(*records: Run) -> list[int]:
    named = [replace(one, name=str(n), seed=n) for n, one in enumerate(records)]
    return [one.at_once for one in comparison.compare(named, {}).runs]


OLD = {"place": "", "machine": "NVIDIA H200, 16 CPUs"}
SWEEP = f"{PLAIN} +sweeps=weight_formats"


@pytest.mark.parametrize(("records", "counts"), [
    ([ran(0, 100), ran(50, 150), ran(120, 200)], [2, 2, 2]),
    ([ran(0, 100), ran(10, 20), ran(30, 40), ran(35, 39)], [3, 2, 3, 3]),  # never four
    ([ran(0, 100.4), ran(100, 200), ran(300, 400)], [1, 1, 1]),  # starts are noted in whole seconds
    ([ran(0, 100), ran(98, 200)], [2, 2]),
    ([ran(None, 100), ran(0, 100)], [1, 1]),
    # a run takes no machine while it is paused
    ([ran(0, 500, pauses=((100, 200), (300, 400))), ran(100, 200), ran(300, 400)], [1, 1, 1]),
    ([ran(0, 500, pauses=((100, 200), (300, 400))), ran(150, 250), ran(160, 190)], [2, 2, 2]),
    ([ran(0, 500, pauses=((100, 200),)), ran(0, 500, pauses=((150, 250),)), ran(110, 140)], [2, 2, 2]),
    ([ran(0, 100, "GPU-1"), ran(0, 100, "GPU-2")], [1, 1]),
    ([ran(0, 100, "GPU-1 GPU-2"), ran(0, 100, "GPU-2")], [2, 2]),
    # older records name no GPU: runs of single commands share a machine if the descriptions are equal
    ([ran(0, 100, **OLD), ran(0, 100, **OLD)], [2, 2]),
    ([ran(0, 100, **OLD), ran(0, 100, "", "NVIDIA H200, 32 CPUs")], [1, 1]),
    (2 * [ran(0, 100, **OLD, command=f"{SWEEP} jobs=2 jobs_per_gpu=1")], [1, 1]),  # on two cards of one machine
    (2 * [ran(0, 100, "", "")], [1, 1]),  # nothing known
    # the larger of the counts by options and by times is taken
    (2 * [ran(0, 100, "GPU-1", command=f"{SWEEP} jobs_per_gpu=1")], [2, 2]),  # typed twice, for one card
    ([ran(0, 100, command=f"{SWEEP} jobs=4 jobs_per_gpu=4")], [4]),
    ([ran(0, 100, command=f"{SWEEP} jobs=4 jobs_per_gpu=1")], [1]),
    ([ran(0, 100, command=f"{SWEEP} jobs=4 jobs_per_gpu=1", device="cpu")], [4]),
])  # fmt: skip
def test_runs_at_once_on_one_machine_are_counted(records: list[Run], counts: list[int]) -> None:
    assert at_once(*records) == counts


# --- what the command says


SHARED = "ran beside {}: seconds and tokens/s are of shared machines"


def begun(run: Path, second: int = 0, gpu: str = "GPU-1", file: str = "env.json") -> None:
    about = {"time": f"2020-01-01T00:00:0{second}+0000", "gpus": [{"uuid": gpu, "name": "H200"}]}
    (run / file).write_text(json.dumps(about))


@pytest.mark.parametrize(("environments", "said"), [
    ([{"command": "python -m qerl_lab"}], ""),
    # the sweep's file sets jobs in the configuration; a run without a sweep runs alone
    ([{"command": "python -m qerl_lab +sweeps=mine", "sweep": None}], ""),
    ([{"command": "python -m qerl_lab +sweeps=mine", "sweep": "mine/20260131-120000"}], "up to 3 others"),
    # one session of three shared the card
    ([{"command": f"python -m qerl_lab{words}"} for words in ("", " jobs=4 jobs_per_gpu=4", "")], "up to 3 others"),
])  # fmt: skip
def test_jobs_at_once_by_command_or_configuration_are_reported(
    here: Path, printed: Callable[..., str], environments: list[dict], said: str
) -> None:
    jobs = {"jobs": 4, "jobs_per_gpu": 4} if "sweep" in environments[0] else {}
    run = make_run(here / "sweep" / "bf16-0", "bf16", 0, **jobs)
    for name, about in zip(("env.json", "env.2.json", "env.10.json"), environments, strict=False):
        (run / name).write_text(json.dumps(about))
    out = printed("sweep")
    assert SHARED.format(said) in out if said else "ran beside" not in out


def test_a_report_says_that_only_a_part_of_a_task_was_asked(here: Path, printed: Callable[..., str]) -> None:
    make_run(here / "sweep" / "bf16-0", "bf16", 0, task__name="gsm8k", task__gsm8k__max_steps=2)
    assert "The questions are of gsm8k with at most 2 steps: no accuracy here is that" in printed("sweep")


@pytest.mark.parametrize(("other", "shown"), [("GPU-1", True), ("GPU-2", False)])
def test_runs_of_separate_commands_at_once_on_one_gpu_are_reported(
    here: Path, printed: Callable[..., str], other: str, shown: bool
) -> None:
    """Stored results keep the GPU of each run, so they say the same. On two GPUs each run ran alone."""
    for seed, gpu in enumerate(("GPU-1", other)):
        begun(make_run(here / "sweep" / f"bf16-{seed}", "bf16", seed), seed, gpu)
    save_results("sweep", "results")
    for folder in ("sweep", "results"):
        assert (SHARED.format("another") in printed(folder)) == shown


def test_a_report_says_how_many_of_its_runs_shared_a_machine(here: Path, printed: Callable[..., str]) -> None:
    """The tables still have the speeds of the others."""
    for seed, gpu in enumerate(("GPU-1", "GPU-1", "GPU-2")):
        begun(make_run(here / "sweep" / f"bf16-{seed}", "bf16", seed), seed, gpu)
    assert f"2 of 3 runs {SHARED.format('another')}" in printed("sweep")


def test_a_copy_of_a_run_does_not_count_as_a_run_at_once(here: Path) -> None:
    begun(run := make_run(here / "sweep" / "bf16-0", "bf16", 0))
    shutil.copytree(run, here / "home" / "bf16-0")
    assert [run.at_once for run in comparison.read([here / "sweep", here / "home"]).runs] == [1]


def test_a_resumed_run_counts_on_the_gpus_of_all_its_sessions(here: Path) -> None:
    resumed, other = (make_run(here / "sweep" / name, "bf16", seed) for seed, name in enumerate("ab"))
    begun(resumed)
    for run, file in ((resumed, "env.2.json"), (other, "env.json")):
        begun(run, gpu="GPU-2", file=file)
    assert [run.at_once for run in comparison.read([here / "sweep"]).runs] == [2, 2]


def test_the_pauses_of_a_resumed_run_are_read_and_stored(here: Path) -> None:
    """A third run on the card, in the pause of the first, ran alone; the second ran beside the first's second session.

    Times are of 1 January 2020, which began at 1577836800.
    """
    midnight = 1577836800
    for number, (second, ended) in enumerate(((0, 60), (45, 50), (10, 30))):
        run = make_run(here / "sweep" / str(number), "bf16", number, ended=midnight + ended)
        about = {"time": f"2020-01-01T00:00:{second:02}+0000", "gpus": [{"uuid": "GPU-1", "name": "H200"}]}
        (run / "env.json").write_text(json.dumps(about))
    sessions = [[midnight, midnight + 9.8], [midnight + 40.2, midnight + 60]]
    (here / "sweep" / "0" / "sessions.json").write_text(json.dumps(sessions))
    save_results("sweep", "results")
    for folder in ("sweep", "results"):
        runs = sorted(comparison.read([here / folder]).runs, key=lambda run: run.seed)
        assert [run.at_once for run in runs] == [2, 2, 1]
