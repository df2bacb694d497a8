"""Commands with a stand-in for the run's process: directories, exit codes, sweeps, resuming."""

import os
import re
from pathlib import Path

import pytest
import yaml

from qerl_lab.cli.train import main
from qerl_lab.config.conf_folder import package_data
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import LoraConfig, RolloutConfig, RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system.processes import LIBRARY_VARIABLES
from qerl_lab.system.terminal import python_command
from standin import CRASHES_AFTER, DIES, DONE, EMPTY, FAILS, REFUSES, begin, seen

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("standin")]
SHORT = RolloutConfig(max_completion_tokens=64)  # within the embedded policy's context


def test_a_run_gets_a_directory_with_its_complete_configuration_and_its_own_process(capfd):
    assert main(["experiment=nvfp4_aqn", "lora.rank=4"]) == 0
    (run_dir,) = Path.cwd().glob("runs/*/seed*/*")
    assert re.fullmatch(r"runs/nvfp4_aqn/seed0/\d{8}-\d{6}", str(run_dir.relative_to(Path.cwd())))
    config = from_dict(yaml.safe_load((run_dir / "resolved.yaml").read_text()))
    assert (config.experiment, config.lora.rank, config.run_dir) == ("nvfp4_aqn", 4, str(run_dir))
    assert seen(run_dir)["files"] == [".typed", "resolved.yaml"]
    assert seen(run_dir)["pid"] != os.getpid()
    assert str(run_dir.relative_to(Path.cwd())) in capfd.readouterr().out
    assert {path.name for path in run_dir.iterdir()} == {  # no files of Hydra; the stand-in records no environment
        "resolved.yaml", ".typed", "seen.json", "metrics.jsonl", "eval.parquet", "DONE",
    }  # fmt: skip


def test_variables_of_the_child_are_set_unless_the_user_has_set_them(monkeypatch):
    for name in (*LIBRARY_VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    for threads, typed, kept in ((3, None, "3"), (3, "7", "7"), (0, None, None)):
        monkeypatch.setenv("OMP_NUM_THREADS", typed) if typed else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert begin(RunConfig(cpu_threads=threads), f"{threads} {typed}") == 0
        environment = seen(Path(f"{threads} {typed}"))["environment"]
        assert environment.get("OMP_NUM_THREADS") == kept
    assert (environment["OMP_WAIT_POLICY"], environment["TOKENIZERS_PARALLELISM"]) == ("PASSIVE", "true")


@pytest.mark.parametrize(
    ("seed", "code", "status", "reason"),
    [
        (DONE, 0, "done", None),
        (FAILS, 1, "failed", "ValueError: the reason"),
        (DIES, 1, "failed", "Killed: signal 9 (SIGKILL) ended the process, as the system does when memory runs out"),
        (EMPTY, 1, "failed", "NoRecord: the process ended with status 0"),
        (CRASHES_AFTER, 0, "done", None),
    ],
)
def test_directory_and_exit_code_say_how_the_process_ended(seed, code, status, reason):
    assert begin(RunConfig(seed=seed), "run") == code
    assert RunDirectory(Path("run")).status == status
    assert Path("run/FAILED").exists() == (reason is not None)
    if reason:
        assert RunDirectory(Path("run")).reason.startswith(reason)


@pytest.mark.parametrize("words", [[], ["run_dir=mine/a/b"], ["run_dir=mine/empty"]])
def test_a_run_that_its_own_process_refuses_leaves_no_directory(words, capfd):
    Path("mine/empty").mkdir(parents=True)
    assert main([f"seed={REFUSES}", *words]) == 2
    assert capfd.readouterr().err == "error: what is wrong. Type this.\n"
    assert not list(Path.cwd().rglob("resolved.yaml"))


@pytest.mark.parametrize("launcher", ["lab", "basic"])
def test_a_refused_job_of_a_sweep_is_reported_and_the_sweep_can_be_repeated(launcher, capfd):
    words = ["-m", f"seed={REFUSES},{DONE}", f"hydra/launcher={launcher}"]
    assert main(words) == 1
    out, err = capfd.readouterr()
    (sweep,) = Path("runs/sweeps/adhoc").iterdir()
    refused, done = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert "error: what is wrong. Type this." in err
    assert "ConfigError: what is wrong. Type this." in out
    assert f"2 jobs in {sweep}: 1 failed, 1 done" in out
    began = seen(done)["began"]
    for again in (words, [f"resume={sweep}"]):
        assert main(again) == 1
        assert "1 failed, 1 done" in capfd.readouterr().out
    assert list(Path("runs/sweeps/adhoc").iterdir()) == [sweep], "the finished job was trained again elsewhere"
    assert seen(done)["began"] == began
    text = (refused / "resolved.yaml").read_text()
    (refused / "resolved.yaml").write_text(text.replace(f"seed: {REFUSES}", f"seed: {DONE}"))  # repaired
    assert main([f"resume={sweep}"]) == 0


def test_a_resumed_run_that_is_refused_keeps_its_directory(capfd):
    assert main([f"seed={FAILS}", "run_dir=run"]) == 1
    assert capfd.readouterr().err == "failed: ValueError: the reason\nrun/FAILED has the traceback\n"
    text = Path("run/resolved.yaml").read_text()
    Path("run/resolved.yaml").write_text(text.replace("seed: 1", f"seed: {REFUSES}"))
    assert main(["resume=run"]) == 2
    assert capfd.readouterr().err == "error: what is wrong. Type this.\n"
    assert RunDirectory(Path("run")).reason == "ConfigError: what is wrong. Type this."
    Path("run/resolved.yaml").write_text(text.replace("path: pocket", "path: /no/such/place"))
    assert main(["resume=run"]) == 2
    assert "model.path=/no/such/place is no directory" in capfd.readouterr().err


def test_resume_continues_a_run_that_did_not_finish(capfd):
    assert begin(RunConfig(seed=FAILS, lora=LoraConfig(rank=4), rollout=SHORT), "run") == 1
    assert main(["resume=run", "jobs_per_gpu=2"]) == 0
    assert RunDirectory(Path("run")).config().jobs_per_gpu == 2
    assert "FAILED" not in seen(Path("run"))["files"], "FAILED is removed before the child starts"
    assert RunDirectory(Path("run")).config().lora.rank == 4
    capfd.readouterr()
    assert main(["resume=run"]) == 2
    assert "(it has a DONE file). It kept no checkpoint to go on from: start a new run." in capfd.readouterr().err
    steps = RunDirectory(Path("run")).config().steps
    Path(f"run/checkpoints/step-{steps:06d}").mkdir(parents=True)
    assert main(["resume=run"]) == 2
    said = f"Add steps={2 * steps} to extend the run, start a new run, or move DONE out of its directory to write"
    assert said in capfd.readouterr().err


def test_resume_follows_a_directory_that_was_moved():
    assert begin(RunConfig(seed=DIES, rollout=SHORT), "run") == 1
    Path("run").rename("moved")
    assert main(["resume=moved"]) == 1
    assert RunDirectory(Path("moved")).config().run_dir == str(Path("moved").absolute())


def test_a_sweep_goes_on_after_failures_and_ends_with_a_table_of_all_jobs(capfd):
    assert main(["-m", "experiment=nvfp4", f"seed={FAILS},{DONE},{DIES}"]) == 1
    out, err = capfd.readouterr()
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    table = out[out.rindex("job  overrides") :].splitlines()
    ended = [line.split(",")[0] for line in err.splitlines() if line.startswith("job ") and " of 3 done" in line]
    assert ended == ["job 0: failed", "job 1: done", "job 2: failed"]
    assert "all jobs: +experiment=nvfp4" in out  # words that all jobs share are printed once
    assert re.match(r"0 +seed=1 +failed +- +- +- +- +0-nvfp4-seed1", table[1])
    assert table[2].strip() == "ValueError: the reason"
    assert re.match(r"1 +seed=0 +done +0\.500 -> 0\.750 +0\.300 -> 0\.200 +1234 +95 +1-nvfp4-seed0", table[3])
    assert "SIGKILL" in table[5]
    assert table[-4] == f"3 jobs in {directory}: 2 failed, 1 done"
    assert table[-3] == f"next: {python_command()} -m qerl_lab.report {directory} out=results/{directory.name}"
    assert table[-2] == f"continue job 0 with: {python_command()} -m qerl_lab resume={directory}/0-nvfp4-seed1"
    assert "failed: ValueError: the reason" in err  # printed at once, and not only in the table
    assert "Traceback" not in out + err
    names = {path.name for path in directory.iterdir() if path.is_dir()}
    assert names == {"0-nvfp4-seed1", "1-nvfp4-seed0", "2-nvfp4-seed2"}
    for name in names:
        assert RunDirectory(directory / name).config().run_dir == str((directory / name).absolute())


def test_a_sweep_with_its_own_claims_ends_with_the_command_that_tests_them(capfd):
    Path("my claims.yaml").write_bytes((package_data("results/reference") / "claims.yaml").read_bytes())
    assert main(["-m", "seed=0", "preregistration=my claims.yaml"]) == 0
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    said = capfd.readouterr().out.splitlines()[-1]
    assert said == f"next: {python_command()} -m qerl_lab.report verdicts {directory} \"claims='my claims.yaml'\""


def test_hydras_own_flags_still_work(capfd):
    assert main(["experiment=nf4", "--cfg", "job"]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["format"]["name"] == "nf4"
    assert not Path("runs").exists()
