"""The progress lines of a sweep, read from made-up runs. Standard error is no terminal here."""

import json
from pathlib import Path

import pytest

from qerl_lab.cli import live
from qerl_lab.cli.compose import Job
from qerl_lab.cli.live import SweepProgress
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REDRAW_SECONDS", 0.0)


def job(folder: Path, number: int) -> Job:
    run = RunDirectory(folder / str(number))
    config = RunConfig(steps=20, seed=number, run_dir=str(run.path))
    run.claim(config, TypedCommand("the command"))
    return Job(number, [f"seed={number}"], config, run.path)


def at_step(run: RunDirectory, step: int) -> None:
    lines = [{"step": n, "time": 2.0 * n, "metrics": {"reward/mean": n / 100}} for n in range(1, step + 1)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(job: Job, step: int = 0) -> RunDirectory:
    run = RunDirectory(job.run_dir)
    run.begin()
    run.begin_session(1.0)
    at_step(run, step)
    return run


def test_a_line_comes_with_the_start_of_a_job_and_each_tenth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [job(tmp_path, number) for number in range(8)]
    one = jobs[3]
    shown = SweepProgress(jobs, [one], tmp_path / "INTERRUPTED")
    shown.update()
    assert capsys.readouterr().err == ""
    run = start(one)
    shown.update()
    assert capsys.readouterr().err == "job 3: running, seed=3\n"
    at_step(run, 5)
    shown.update()
    shown.update()
    assert capsys.readouterr().err == "job 3: step 5/20, ETA 00:30, reward 0.05\n"
    at_step(run, 20)
    run.finish({})
    shown.end_job(one, "")
    assert capsys.readouterr().err == "job 3: done, reward 0.20, seed=3 (8 of 8 done)\n"


def test_a_job_that_waits_to_go_on_is_not_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = job(tmp_path, 0)
    run = start(before, 4)
    shown = SweepProgress([before], [before], tmp_path / "INTERRUPTED")
    shown.update()
    assert not shown.is_running(before)
    assert capsys.readouterr().err == ""
    run.begin_session(2.0)
    shown.update()
    assert shown.is_running(before)
    assert capsys.readouterr().err.startswith("job 0: step 4/20")


def test_a_claimed_job_of_an_earlier_command_runs_once_it_begins(tmp_path: Path) -> None:
    one = job(tmp_path, 0)  # its directory was found, and nothing in it has begun
    shown = SweepProgress([one], [one], tmp_path / "INTERRUPTED")
    RunDirectory(one.run_dir).begin()
    shown.update()
    assert shown.is_running(one), "it loads its model, before its first session is noted"


def test_the_pace_is_that_of_this_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of 20 steps, one of which an earlier command left at step 10: 5 steps in 10 s leave 25, so 50 s."""
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    fresh, before = job(tmp_path, 0), job(tmp_path, 1)
    start(before, 10)
    shown = SweepProgress([fresh, before, job(tmp_path, 2)], [fresh, before], tmp_path / "INTERRUPTED")
    start(fresh, 5)
    now[0] += 10
    shown.update()
    assert shown._summary() == "1 of 3 done, 1 running, ETA 00:50"
    (tmp_path / "INTERRUPTED").touch()
    assert shown._summary() == "1 of 3 done, 1 running"  # it does not go on


def test_a_damaged_record_stops_no_sweep(tmp_path: Path) -> None:
    one = job(tmp_path, 0)
    shown = SweepProgress([one], [one], tmp_path / "INTERRUPTED")
    run = start(one, 3)
    (run.path / "metrics.jsonl").write_text("{nonsense\n")
    (run.path / "sessions.json").write_text("{}")
    shown.update()
    assert shown._summary() == "0 of 1 done, 1 running"
