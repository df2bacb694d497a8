"""The jobs of a sweep, with a stand-in for the run's process."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.cli import jobs, launch, scheduler
from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.train import main
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system.terminal import python_command
from standin import DONE, STOPS, seen

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("standin")]


def test_the_directory_of_a_job_records_the_words_typed_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", f"seed={DONE},10", "hydra.sweep.dir=a/sweep", "+hydra.job.env_set.X=1"]) == 0
    assert "job 1: done, reward 0.50, seed=10 (2 of 2 done)" in capfd.readouterr().err
    claimed = seen(Path("a/sweep/0-adhoc-seed0"))["claimed"]
    assert claimed == ["0-adhoc-seed0", "1-adhoc-seed10"], "every directory is claimed before the first job starts"
    environment = seen(Path("a/sweep/1-adhoc-seed10"))["environment"]
    noted = json.loads(Path("a/sweep/1-adhoc-seed10/.typed").read_text())
    assert (noted["words"], noted["sweep"]) == (["seed=10"], "a/sweep")
    assert noted["command"].startswith("python -m qerl_lab -m seed=0,10 hydra.sweep.dir=a/sweep")
    assert environment["X"] == "1"
    assert "X" not in os.environ


def test_a_job_that_a_stopped_sweep_did_not_begin_can_be_resumed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["-m", f"seed={STOPS},{DONE}", "lora.rank=4", "hydra.sweep.dir=a sweep"]) == 130
    out = capfd.readouterr().out
    assert "2 jobs in a sweep: 1 interrupted, 1 not run" in out
    assert "next: " not in out
    stopped = out.partition("continue job 0 with: ")[2].splitlines()[0]
    assert stopped == f"{python_command()} -m qerl_lab resume='a sweep/0-adhoc-seed{STOPS}'"
    assert Path(f"a sweep/0-adhoc-seed{STOPS}").is_dir()
    run = RunDirectory(Path("a sweep/1-adhoc-seed0"))
    assert run.status == "not run"
    assert main(["resume=a sweep/1-adhoc-seed0"]) == 0
    assert (run.status, run.config().seed, run.config().lora.rank) == ("done", 0, 4)
    noted = json.loads((run.path / ".typed").read_text())
    assert noted["words"] == ["seed=0", "lora.rank=4"]
    assert noted["sweep"].endswith("/a sweep")


def test_a_job_that_another_process_runs_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    plan = jobs.claim_directories(make_plan([f"seed={DONE},10", "hydra.sweep.dir=sweep"], True), "the command")
    second = RunDirectory(Path("sweep/1-adhoc-seed10"))
    Path("sweep", scheduler.STOP_FILE).touch()  # left by the command that was stopped
    with second.locked():
        second.begin()  # by resume=, for example
        scheduler.run(plan, "the command")
        assert scheduler.summarize(plan) == 130
    assert f"another process is running in {second.path.absolute()}" in capfd.readouterr().err
    assert second.status == "interrupted"
    assert RunDirectory(Path("sweep/0-adhoc-seed0")).status == "done"


def test_a_job_with_a_damaged_record_fails_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing interrupted it, and the same command would be refused again."""
    jobs.claim_directories(make_plan([f"seed={DONE},10", "hydra.sweep.dir=sweep"], True), "the command")
    damaged = RunDirectory(Path("sweep/1-adhoc-seed10"))
    damaged.begin()
    (damaged.path / "sessions.json").write_text("{")
    assert main(["resume=sweep"]) == 1
    assert "2 jobs in sweep: 1 done, 1 failed" in capfd.readouterr().out
    assert "sessions.json cannot be read" in damaged.reason
    (damaged.path / "sessions.json").unlink()
    assert main(["resume=sweep"]) == 0


def test_a_continued_sweep_runs_each_job_with_the_settings_of_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    def run_locally(sweep_jobs: Any) -> Any:
        given.update({(cfg := job.config).seed: (cfg.device, cfg.cpu_threads, cfg.jobs) for job in sweep_jobs})
        raise KeyboardInterrupt

    sweep = [f"seed={DONE},10", "hydra.sweep.dir=sweep"]
    jobs.claim_directories(make_plan([*sweep, "device=cpu", "cpu_threads=1"], True), "the command")
    monkeypatch.setattr(scheduler, "run_locally", run_locally)
    plan = jobs.continue_sweep(make_plan([*sweep, "device=cpu", "cpu_threads=2", "jobs=2"], True))
    scheduler.run(plan, "the command")
    assert given == {DONE: ("cpu", 1, 2), 10: ("cpu", 1, 2)}


def test_a_full_disk_fails_each_job_and_does_not_stop_the_sweep(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(run: RunDirectory, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "sweep")

    monkeypatch.setattr(RunDirectory, "begin", full)
    assert main(["-m", f"seed={DONE},10", "hydra.sweep.dir=sweep"]) == 1
    out, err = capfd.readouterr()
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert "2 jobs in sweep: 2 failed" in out


def test_a_bug_around_a_job_is_printed_and_the_other_jobs_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start = launch.start

    def broken(run: RunDirectory, *rest: Any) -> int:
        if run.path.name.startswith("0-"):
            raise RuntimeError("no such queue")
        return start(run, *rest)

    monkeypatch.setattr(launch, "start", broken)
    assert main(["-m", f"seed={DONE},10", "hydra.sweep.dir=sweep"]) == 1
    out, err = capfd.readouterr()
    assert "RuntimeError: no such queue" in err
    assert "2 jobs in sweep: 1 not run, 1 done" in out


def test_a_resumed_sweep_starts_no_run_outside_its_directory() -> None:
    assert main(["-m", f"seed={DONE}", "hydra.sweep.dir=sweep"]) == 0
    assert main(["-m", "seed=11", "lora.rank=4", "hydra.sweep.dir=other"]) == 0
    Path("sweep/2-other").symlink_to(Path("other/0-adhoc-seed11").absolute())
    for run in ("sweep/0-adhoc-seed0", "other/0-adhoc-seed11"):
        Path(run, "DONE").unlink()
        Path(run, "seen.json").unlink()
    assert main(["resume=sweep"]) == 0
    assert seen(Path("sweep/0-adhoc-seed0"))
    assert not Path("other/0-adhoc-seed11/seen.json").exists()
