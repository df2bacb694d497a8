"""Parse the flags of sbatch, refuse wrong ones before submitting, and request resources from Slurm and Ray."""

import importlib.util
import pickle
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import submitit

from qerl_lab.cli import cluster, launch, scheduler, train
from qerl_lab.cli.compose import Job, Plan
from qerl_lab.cli.launch import SweepJob
from qerl_lab.cli.overrides import spell_for_hydra
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand


@pytest.mark.parametrize(("time", "minutes"), [
    ("90", 90), ("2:00:30", 121), ("1-12:30:00", 36 * 60 + 30),
])  # fmt: skip
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, minutes: int) -> None:
    assert cluster.time_limit_minutes(cluster.parse_sbatch_flags(f"--time={time}")) == minutes


@pytest.mark.parametrize(("text", "said"), [
    ("-p gpu", "-p is not --NAME=VALUE"),
    ("--time=60 --array=0-3", "the lab sets --array"),
    ("--partition=gpu", "has no --time=LIMIT;"), ("--time", "has no --time=LIMIT;"),
    ("--time=soon", "--time=soon"),
    ("--time=9", "--time in slurm= is 9 minutes"),
    ("--comment='two words --time=60", "No closing quotation"),
])  # fmt: skip
def test_other_flags_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster.time_limit_minutes(cluster.parse_sbatch_flags(text))


@pytest.mark.parametrize("typed", ["slurm=--time=60 --partition=a,b", "slurm='--time=60 --partition=a,b'"])
def test_slurm_flags_are_one_text_with_and_without_quotes(typed: str) -> None:
    assert spell_for_hydra(typed) == "slurm='--time=60 --partition=a,b'"
    found = cluster.parse_sbatch_flags("--partition=a,b --time=60 --exclusive --comment='two words'")
    assert found == {"partition": "a,b", "time": "60", "exclusive": True, "comment": "two words"}


@pytest.mark.parametrize(("device", "flags", "needs"), [
    ("auto", "", {"gpus_per_node": 2}),
    ("cuda", "--gpus-per-task=1", {}),
    ("auto", "--gres=gpu:h200:1", {}),
    ("cpu", "", {"cpus_per_task": 8}),
    ("cpu", "--cpus-per-task=8", {}),
    ("cpu", "--exclusive", {}),
])  # fmt: skip
def test_a_job_asks_slurm_for_what_it_uses_unless_the_flags_do(device: str, flags: str, needs: dict[str, int]) -> None:
    configs = [RunConfig(device=device, gpus=gpus, cpu_threads=2 * gpus) for gpus in (1, 2)]
    assert cluster.resources_to_request(configs, cluster.parse_sbatch_flags(flags)) == needs


@pytest.mark.parametrize(("changes", "there", "asked_for"), [
    ({"jobs": 8, "jobs_per_gpu": 2}, 8.0, (0.5, 2)),
    ({"jobs": 2, "jobs_per_gpu": 4, "cpu_threads": 0}, 8.0, (0.25, 1)),
    ({"device": "cpu", "cpu_threads": 3}, 8.0, (0, 3)),
    ({}, 0.0, (0, 2)),
])  # fmt: skip
def test_a_job_asks_ray_for_the_part_of_a_gpu_that_it_counts_on(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], there: float, asked_for: tuple[float, int]
) -> None:
    """A job requests the share of a GPU that it uses; on the CPU, or without GPUs in the cluster, it requests none."""
    asked = dict[str, float]()

    def remote(**needs: float) -> Callable[..., SimpleNamespace]:
        asked.update(needs)
        return lambda call: SimpleNamespace(remote=lambda job: "")

    ray = SimpleNamespace(
        init=lambda **_: None, shutdown=lambda: None, cluster_resources=lambda: {"GPU": there}, remote=remote,
        get=lambda reference: reference,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", cast(ModuleType, ray))
    cfg = RunConfig(launcher="ray", **changes)
    with cluster.submit_to_ray([SweepJob(cfg, Path("run"), TypedCommand("the command"), Path("stop"))]) as futures:
        assert futures[0].result() == ""
    assert (asked["num_gpus"], asked["num_cpus"]) == asked_for


def test_a_ray_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("ray failed") from RuntimeError("no GCS at\n10.0.0.1.")

    monkeypatch.setitem(sys.modules, "ray", cast(ModuleType, SimpleNamespace(init=init)))
    job = SweepJob(RunConfig(launcher="ray"), Path("run"), TypedCommand("the command"), Path("stop"))
    said = r"^Ray cannot be reached: no GCS at 10\.0\.0\.1\. Nothing was started\. Correct the line"
    with pytest.raises(ConfigError, match=said), cluster.submit_to_ray([job]):
        pass


def test_slurm_is_told_how_many_jobs_run_at_once_and_when_to_have_them_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = dict[str, Any]()

    class Executor:
        def __init__(self, folder: Path) -> None:
            told["folder"] = folder

        def update_parameters(self, **parameters: Any) -> None:
            told.update(parameters)

        def batch(self) -> nullcontext[None]:
            return nullcontext()

        def submit(self, job: SweepJob) -> SweepJob:
            return job

    monkeypatch.setattr(submitit, "SlurmExecutor", Executor)
    cfg = RunConfig(launcher="slurm", jobs=2, slurm="--time=1:00:00 --partition=a", device="cpu")
    jobs = [SweepJob(cfg, Path(f"run{n}"), TypedCommand("the command"), Path("stop")) for n in range(4)]
    with cluster.submit_to_slurm(jobs, tmp_path) as submitted:
        assert submitted == jobs
    assert (told["folder"], told["time"], told["array_parallelism"], told["cpus_per_task"]) == (tmp_path, 60, 2, 2)
    assert told["additional_parameters"] == {"time": "1:00:00", "partition": "a"}
    assert launch.SAVE_SECONDS < told["signal_delay_s"] < 60 * cluster.LEAST_MINUTES


def test_a_cluster_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    submitit = SimpleNamespace(origin="submitit/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: submitit if name == "submitit" else None)
    with pytest.raises(ConfigError, match="needs sbatch and srun, and this machine lacks one"):
        cluster.check_can_submit(RunConfig(launcher="slurm"))
    for there in ("sbatch", "srun"):  # a node on which nobody logs in may have one
        monkeypatch.setattr(cluster.shutil, "which", {there: f"/bin/{there}"}.get)
        with pytest.raises(ConfigError, match="needs sbatch and srun, and this machine lacks one"):
            cluster.check_can_submit(RunConfig(launcher="slurm"))
    monkeypatch.setattr(cluster.shutil, "which", lambda name: f"/bin/{name}")
    with pytest.raises(ConfigError, match=r"needs the package ray.*pip install 'qerl-lab\[ray\]'"):
        cluster.check_can_submit(RunConfig(launcher="ray"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepJob:
    """A pickled and unpickled job, which is interrupted in its first session and done in its second."""
    code = (
        "import os, sys; first = not os.path.exists('{0}/seen'); open('{0}/seen', 'a').close();"
        "sys.exit(130) if first else open('{0}/DONE', 'w').write('{{}}')"
    )
    monkeypatch.setattr(launch, "child_command", lambda run_dir: ["python3", "-S", "-c", code.format(run_dir)])
    monkeypatch.setattr(RunDirectory, "check", lambda run: None)
    run = RunDirectory(tmp_path / "run")
    config = RunConfig(run_dir=str(run.path))
    run.claim(config, TypedCommand("the command"))
    job = SweepJob(config, run.path, TypedCommand("the command"), tmp_path / "INTERRUPTED")
    return pickle.loads(pickle.dumps(job))


def test_a_job_that_its_cluster_starts_again_goes_on(job: SweepJob) -> None:
    run = RunDirectory(job.run_dir)
    job.stop_file.touch()
    assert job() == ""
    assert run.status == "not run", "no job begins after a stop"
    job.stop_file.unlink()
    for status in ("interrupted", "done", "done"):
        assert job() == ""
        assert run.status == status
    assert job.checkpoint().function is job


def test_a_job_near_its_time_limit_saves_before_it_is_put_back(job: SweepJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends SIGUSR2 to all processes of a job. The run's process ignores it, and gets SIGTERM from the job."""
    code = (
        "import os, signal, sys, time; n = open('{0}/signals', 'w');"
        "signal.signal(signal.SIGTERM, lambda *_: (n.write('TERM'), sys.exit(130)));"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]);"
        "os.kill(os.getpid(), signal.SIGUSR2); os.kill(os.getppid(), signal.SIGUSR2); time.sleep(60)"
    )
    monkeypatch.setattr(launch, "child_command", lambda run_dir: ["python3", "-S", "-c", code.format(run_dir)])

    def requeue(number: int, frame: object) -> None:
        job.checkpoint()
        raise SystemExit

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        with pytest.raises(SystemExit):
            job()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (job.run_dir / "signals").read_text() == "TERM"


def test_a_second_ctrl_c_leaves_jobs_that_a_cluster_does_not_end(
    job: SweepJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[int]()

    def look() -> None:
        assert job.stop_file.exists() == bool(looks), "the first stops"
        looks.append(len(looks))
        assert len(looks) < 5, "it waits for the job"
        time.sleep(launch.SAME_STOP_SECONDS[signal.SIGINT])  # between one Ctrl-C and the next
        signal.raise_signal(signal.SIGINT)

    progress = SimpleNamespace(update=look, is_running=lambda _: True)
    monkeypatch.setattr(scheduler, "SweepProgress", lambda *_: progress)
    monkeypatch.setattr(scheduler, "LOOK_SECONDS", {"slurm": 0.0})
    monkeypatch.setattr(cluster, "submit_to_slurm", lambda *_: nullcontext([Future()]))
    plan = Plan([Job(0, [], replace(job.config, launcher="slurm"), job.run_dir)], job.stop_file.parent, True, True)
    scheduler.run(plan, "the command")
    assert looks == [0, 1]
    assert job.stop_file.read_text() == launch.ABORT


def test_a_sweep_for_a_cluster_is_planned_anywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["-m", "seed=0,1", "launcher=slurm", "dry_run=true"]
    assert train.main([*words, "slurm=--time=1:00:00"]) == 0
    assert "not on this machine: launcher=slurm" in capsys.readouterr().out
