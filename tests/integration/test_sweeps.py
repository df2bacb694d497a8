"""Repeated sweeps: finished jobs are skipped, stopped jobs go on, also after kill -9. Several jobs run at once.

Seeds act as in standin.py: in a first session 1 fails and 4 waits. Others finish, and from 20 on they take a second.
"""

import json
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hydra.plugins.sweeper import Sweeper

from qerl_lab import preflight, tasks
from qerl_lab.cli import launch, scheduler
from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.jobs import continue_sweep
from qerl_lab.cli.train import main
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand, code_hash
from standin import background, seen, started
from waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("standin")]


def _runs() -> list[Path]:
    """Return the directories of the started runs, in order of their names."""
    return [path.parent for path in sorted(Path("runs/sweeps").glob("*/*/*/seen.json"))]


def sessions() -> list[int]:
    return [seen(run)["sessions"] for run in _runs()]


def is_free(run_dir: Path) -> bool:
    """Return whether no process runs in the directory."""
    with suppress(ConfigError), RunDirectory(run_dir).locked():
        return True
    return False


def test_the_same_command_skips_finished_jobs_and_continues_failed_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=0,1"]) == 1
    assert sessions() == [1, 1]
    assert main(["-m", "seed=0,1"]) == 0
    assert sessions() == [1, 2]
    assert "begun before: 1 done, 1 to run (hydra.sweep.dir" in capfd.readouterr().out
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    assert main(["-m", "seed=0,1"]) == 0
    assert sessions() == [1, 2]
    out = capfd.readouterr().out
    assert "2 done" in out
    assert (directory / "table.txt").read_text().strip() in out
    assert main(["-m", "seed=0,1", "dry_run=true"]) == 0
    assert "except 2 that are done" in capfd.readouterr().out
    for words in (
        ["seed=0,10"],
        ["seed=0,1", "lora.rank=4"],
        ["seed=0,10", "hydra.sweep.dir=runs/sweeps/adhoc/z"],
    ):  # another sweep
        before = len(sessions())
        main(["-m", *words])
        assert len(sessions()) == before + 2
    assert main(["-m", "seed=0,10", "hydra.sweep.dir=runs/sweeps/adhoc/a"]) == 0
    capfd.readouterr()
    assert main(["-m", "seed=0,10"]) == 0  # three sweeps have these jobs: the one begun last goes on, whatever its name
    assert "2 jobs in runs/sweeps/adhoc/a\n" in capfd.readouterr().out


def test_a_sweep_with_a_deleted_run_is_named_with_the_word_that_completes_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=0,10,11"]) == 0
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    shutil.rmtree(directory / "1-adhoc-seed10")
    capfd.readouterr()
    assert main(["-m", "seed=0,10,11", "dry_run=true"]) == 0
    typed = f"hydra.sweep.dir={directory}"
    assert f"note: 2 of these runs are in {directory}: type {typed} to run only the others\n" in capfd.readouterr().out
    assert main(["-m", "seed=0,10,11", typed]) == 0
    assert sessions() == [1, 1, 1]
    for words in (["seed=0,12"], ["seed=0,10,11", "lora.rank=4"]):  # these grids are not part of that sweep
        main(["-m", *words, "dry_run=true"])
        assert "of these runs" not in capfd.readouterr().out


def _record_code(run: Path, *codes: str) -> None:
    """Write the env.json of a run's sessions, one session for each hash in `codes`. The stand-in writes none."""
    for number, code in enumerate(codes, 1):
        text = json.dumps({"gpus": [], "data": {}, "code_hash": code})
        (run / ("env.json" if number == 1 else f"env.{number}.json")).write_text(text)


def test_changed_code_starts_a_new_sweep_and_names_the_one_to_continue(capfd: pytest.CaptureFixture[str]) -> None:
    words, here = ["-m", "seed=0,1"], code_hash()
    assert main(words) == 1
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    finished, failed = _runs()  # the failed one has no env.json
    _record_code(finished, here)
    assert main([*words, "dry_run=true"]) == 0
    assert f"in {directory} except 1 that are done" in capfd.readouterr().out
    typed = f"hydra.sweep.dir={directory}"
    why = "made by other source files of qerl_lab (code_hash in env.json), and here all begin anew"
    note = f"note: 2 of these runs are in {directory}, {why}: type {typed} to go on with those\n"
    for of_finished, of_failed in ((["other"], []), ([here], ["other"]), ([here, "other"], [])):
        _record_code(finished, *of_finished)
        _record_code(failed, *of_failed)
        assert main([*words, "dry_run=true"]) == 0
        out = capfd.readouterr().out
        assert note in out
        assert "that are done" not in out
    assert main([*words, typed]) == 0
    assert sessions() == [1, 2]
    assert main(words) == 1
    assert sessions() == [1, 2, 1, 1], "a new sweep"
    assert main(words) == 0
    assert sessions() == [1, 2, 1, 2], "the same words continue the new sweep"
    assert "other source files" not in capfd.readouterr().out.rpartition("begun before")[2]


def test_another_grid_in_the_same_directory_joins_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    for seeds in ("0,10", "11,12"):
        assert main(["-m", f"seed={seeds}", "hydra.sweep.dir=sweep"]) == 0
    runs = ["0-adhoc-seed0", "0-adhoc-seed11", "1-adhoc-seed10", "1-adhoc-seed12"]
    assert sorted(path.parent.name for path in Path("sweep").glob("*/DONE")) == runs
    capfd.readouterr()
    assert main(["resume=sweep"]) == 0
    out = capfd.readouterr().out
    assert "4 done" in out
    assert [line.split()[1] for line in out.splitlines() if re.match(r"\d  ", line)] == [
        "seed=0", "seed=11", "seed=10", "seed=12"
    ]  # fmt: skip


def test_a_job_refuses_the_directory_of_another_run(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "seed=0,10", "hydra.sweep.dir=sweep"]
    assert main(words) == 0
    assert "begun before" not in capfd.readouterr().out
    assert main([*words, "steps=49"]) == 2
    assert (
        "has a run with another configuration or other questions. Type another hydra.sweep.dir."
        in capfd.readouterr().err
    )


def test_runs_on_another_number_of_gpus_are_other_runs() -> None:
    words = ["seed=0,10", "device=cpu", "optim.micro_batch_size=8"]
    assert main(["-m", *words]) == 0
    for gpus, is_begun in ((1, True), (2, False)):
        plan = continue_sweep(make_plan([*words, f"gpus={gpus}"], multirun=True))
        assert [job.begun for job in plan.jobs] == [is_begun] * 2


def test_a_moved_model_is_the_same_run_and_a_replaced_one_is_another() -> None:
    words = ["-m", "seed=0", "scale=pocket"]
    model = shutil.copytree(ASSETS, "model")
    assert main([*words, f"model.path={model}"]) == 0
    moved = Path(model).rename("moved")
    assert main([*words, f"model.path={moved}"]) == 0
    assert sessions() == [1]
    (moved / "tokenizer.json").write_text((moved / "tokenizer.json").read_text() + "\n")
    assert main([*words, f"model.path={moved}"]) == 0
    assert sessions() == [1, 1]


def _questions(folder: str) -> Path:
    """Write four questions for training and four others into a new `folder`; return its absolute path."""
    data, line = Path(folder).absolute(), {"question": "1 + 1?", "answer": "#### 2"}
    data.mkdir()
    for role, first in (("train", 0), ("test", 9)):
        rows = [line | {"question": f"{first + n} + 1?"} for n in range(4)]
        (data / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


def _record_questions(run: Path) -> None:
    """Write the env.json of a run with the hashes of its questions, which the stand-in does not."""
    asked = tasks.load(RunDirectory(run).config().task).data
    (run / "env.json").write_text(json.dumps({"gpus": [], "data": dict(asked), "code_hash": code_hash()}))


def test_a_run_is_another_run_if_the_file_of_its_questions_changed() -> None:
    data = _questions("data")
    words = ["-m", "seed=0", "task=gsm8k", f"task.path={data}"]
    assert main(words) == 0
    (run,) = _runs()
    _record_questions(run)
    assert main(words) == 0
    assert sessions() == [1]
    test = (data / "test.jsonl").read_text()
    moved = data.rename("moved")
    assert main([*words[:-1], f"task.path={moved.absolute()}"]) == 0
    assert sessions() == [1], "the same questions at another path"
    assert main([*words[:-1], "task.path=/no/questions.jsonl"]) == 2
    moved.rename(data)
    (data / "test.jsonl").write_text(test.replace("9 + 1?", "9 + 2?"))
    preflight.question_counts._load_task.cache_clear()  # another command would have an empty cache
    assert main(words) == 0
    assert sessions() == [1, 1]
    shutil.rmtree(data)
    preflight.question_counts._load_task.cache_clear()
    assert main(words) == 0  # nothing is left to run
    assert sessions() == [1, 1]


def test_without_hashes_questions_at_another_path_make_another_run() -> None:
    for folder in ("data", "copy"):
        assert main(["-m", "seed=0", "task=gsm8k", f"task.path={_questions(folder)}"]) == 0
    assert sessions() == [1, 1]


def test_a_stopped_run_with_moved_questions_continues_through_a_link(capfd: pytest.CaptureFixture[str]) -> None:
    data = _questions("data")
    words = ["-m", "seed=0,1", "task=gsm8k"]
    assert main([*words, f"task.path={data}"]) == 1
    for run in _runs():
        _record_questions(run)
    moved = data.rename("moved").absolute()
    capfd.readouterr()
    assert main([*words, f"task.path={moved}"]) == 2
    said = capfd.readouterr().err
    assert f"job 1 (seed=1 task=gsm8k task.path={moved}): task.path={data} is not there" in said
    assert "a link will do" in said
    data.symlink_to(moved)
    assert main([*words, f"task.path={moved}"]) == 0
    assert sessions() == [1, 2]


@pytest.mark.parametrize("how", ["resume", "in a pool"])
def test_a_sweep_that_was_killed_with_sigkill_continues(
    standin: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "seed=0,4,10", *(["jobs=2", "cpu_threads=1"] if how == "in a pool" else [])]
    parent = background(standin, *words)
    waiting = started("runs/sweeps/adhoc/*/1-*")
    wait_for(lambda: [*Path.cwd().glob("runs/sweeps/adhoc/*/0-*/DONE")])
    assert main(words) == 2
    assert "another command runs the sweep in" in capfd.readouterr().err
    parent.kill()
    parent.communicate()
    wait_for(lambda: is_free(waiting))  # the child ends by itself
    assert main([f"resume={waiting.parent}"] if how == "resume" else words) == 0
    statuses = {path.name: RunDirectory(path).status for path in waiting.parent.iterdir() if path.is_dir()}
    assert set(statuses.values()) == {"done"}
    assert len(list(Path("runs/sweeps/adhoc").iterdir())) == 1
    assert sessions() == [1, 2, 1]
    assert "3 done" in (waiting.parent / "table.txt").read_text()


def test_resume_of_a_sweep_keeps_the_configurations_of_its_runs(standin: Path) -> None:
    own = standin.parent / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\n# mine\nexperiment: mine\nlora:\n  rank: 8\n")
    assert main(["-m", "--config-dir", str(own.parent), "experiment=mine", "seed=0,1"]) == 1
    (own / "mine.yaml").unlink()
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    assert main([f"resume={directory}"]) == 0
    assert [RunDirectory(run).config().lora.rank for run in _runs()] == [8, 8]


def test_hydras_basic_launcher_runs_checked_jobs_and_the_same_command_continues(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["-m", "seed=0,1,10", "hydra/launcher=basic"]
    assert main([*words, "lora.rank=4,-1"]) == 2
    assert "job 1 (seed=0 lora.rank=-1): lora.rank=-1 is not allowed" in capfd.readouterr().err
    assert not Path("runs").exists()
    assert main(words) == 1
    assert "3 jobs in" in capfd.readouterr().out
    assert sessions() == [1, 1, 1]
    (sweep,) = Path("runs/sweeps/adhoc").iterdir()
    noted = json.loads((sweep / "1-adhoc-seed1" / ".typed").read_text())
    assert noted["words"] == ["seed=1"]
    assert noted["sweep"] == f"adhoc/{sweep.name}"
    assert main(words) == 0
    assert sessions() == [1, 2, 1]


def test_hydra_composes_only_the_first_job_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback has composed all jobs, and composing one takes a quarter of a second."""
    again = list[int]()
    monkeypatch.setattr(Sweeper, "validate_batch_is_legal", lambda _, batch: again.append(len(batch)))
    assert main(["-m", "seed=20,21,22"]) == 0
    assert again == [1]
    assert sessions() == [1, 1, 1]


def most_at_once() -> int:
    """Return the largest number of jobs that ran at one moment. Jobs that did not end are left out."""
    spans = [(seen(run)["began"], seen(run)["ended"]) for run in _runs() if "ended" in seen(run)]
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


def test_a_pool_runs_exactly_the_given_number_of_jobs_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=20,21,10,1", "jobs=2", "cpu_threads=1"]) == 1
    assert most_at_once() == 2
    out, err = capfd.readouterr()
    assert "1 failed" in out
    assert "ValueError: the reason" in err
    assert re.search(r"job [012]: step 25/50", err)  # progress is read every second, so a short job may be missed
    assert "the console of" not in out + err
    assert "the console of 20\n" in [path.read_text() for path in Path("runs").rglob("console.txt")]


def test_jobs_share_the_gpus_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.machine, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    words = ["-m", "seed=20,21,22,23", "jobs=4", "cpu_threads=1", "optim.packing=off", "jobs_per_gpu=2"]
    assert main(words) == 0
    shown = sorted(seen(run)["environment"]["CUDA_VISIBLE_DEVICES"] for run in _runs())
    assert shown == ["3", "3", "5", "5"]


def test_a_sweep_with_a_damaged_record_starts_anew() -> None:
    words = ["-m", "seed=0,10"]
    assert main(words) == 0
    for number, file in ((1, "resolved.yaml"), (2, "env.json")):
        (_runs()[-1] / file).write_text("{")
        assert main(words) == 0
        assert sessions() == [1, 1] * (number + 1)


def test_a_continued_run_takes_the_jobs_per_gpu_that_is_typed_now(capfd: pytest.CaptureFixture[str]) -> None:
    """A run that ran out of half the memory would otherwise run out of it again."""
    words = ["-m", "seed=1,0", "jobs=2", "cpu_threads=1"]
    assert main([*words, "jobs_per_gpu=2"]) == 1
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    assert main([f"resume={directory}", "jobs_per_gpu=1"]) == 2
    said = f"jobs_per_gpu=1 is for one run here, and resume={directory.absolute()} is a sweep. Leave it out; for"
    assert said in capfd.readouterr().err
    assert main(words) == 0
    assert sessions() == [2, 1]
    assert [RunDirectory(run).config().jobs_per_gpu for run in _runs()] == [1, 2]  # the second was done before


def test_two_jobs_that_share_no_gpu_take_two_gpus() -> None:
    alone = scheduler.GpuPool(["0", "1"], 1)
    with alone.take(1) as first, alone.take(1) as second:
        assert {*first, *second} == {"0", "1"}
        assert not any(alone._room.values())


def test_a_job_sees_the_gpus_that_it_takes_and_a_cpu_job_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job(launch.SweepJob):
        def __call__(self) -> str:
            return self.variables.get("CUDA_VISIBLE_DEVICES", "none")

    def job(**settings: Any) -> Job:
        return Job(RunConfig(jobs=2, **settings), Path("run"), TypedCommand("the command"), Path("stop"))

    monkeypatch.setattr(preflight.machine, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with scheduler.run_locally([job(gpus=2), job(device="cpu"), job()]) as futures:
        assert [future.result() for future in futures] == ["3,5", "none", "3"]
    shared = scheduler.gpu_pool_of([RunConfig(jobs=4, jobs_per_gpu=2)])
    assert shared is not None
    assert shared._room == {"3": 2, "5": 2}


def test_an_idle_gpu_is_taken_before_one_that_still_has_a_job() -> None:
    cards = scheduler.GpuPool(["0", "1"], 2)
    jobs = [cards.take(1) for _ in range(4)]
    assert [job.__enter__() for job in jobs] == [["0"], ["1"], ["0"], ["1"]]
    for ended in (0, 1, 3):  # one job is left, on the first GPU
        jobs[ended].__exit__(None, None, None)
    with cards.take(1) as taken:
        assert taken == ["1"]


def read(terminal: int) -> str:
    """Return the text that was written to a non-blocking terminal since the last call."""
    try:
        return os.read(terminal, 65536).decode().replace("\r\n", "\n")
    except BlockingIOError:
        return ""


def test_on_a_terminal_each_table_replaces_the_last_one(standin: Path) -> None:
    master, terminal = os.openpty()
    os.set_blocking(master, False)
    parent = background(standin, "-m", "seed=4,0", "lora.rank=4", stderr=terminal)
    table = "job  step   reward  ETA  words\n0    25/50  0.50    -    seed=4\n0 of 2 done, 1 running, ETA "
    shown: list[str] = []
    wait_for(lambda: shown.append(read(master)) or f"\x1b[3F\x1b[J{table}" in "".join(shown))  # in place of 3 lines
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    text = "".join([*shown, read(master)])
    before = re.split(r"\x1b\[(\d)F\x1b\[J", text.partition(launch.STOPPING)[0])
    drawn, up = before[:-1:2], before[1::2]
    assert [text.count("\n") for text in drawn] == [int(lines) for lines in up]  # each replaces the last one
    after = text.partition(f"{launch.STOPPING}\n")[2]
    assert re.match(r"(job  step|job 0: interrupted)", after)  # below the message, which stays
    assert "job 0: interrupted, reward 0.50, seed=4 (0 of 2 done, 1 interrupted)" in after


@pytest.mark.slow
def test_a_sweep_that_is_stopped_when_all_jobs_are_done_is_done(standin: Path) -> None:
    """The signal comes while the last job ends."""
    standin.write_text(standin.read_text() + "\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(0.5)\n")
    command = background(standin, "-m", "seed=0", "lora.rank=4", "hydra.sweep.dir=sweep")
    out, _ = command.communicate(timeout=120)
    assert "1 job in sweep: 1 done" in out
    assert command.returncode == 0
    assert not Path("sweep/INTERRUPTED").exists()


def test_a_sweep_that_is_refused_leaves_no_directory(
    standin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **_of_call: bool) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(preflight, "check", refuse)
    for words in ([], ["hydra.sweep.dir=a/sweep"]):
        assert main(["-m", "seed=0", "device=cpu", "lora.rank=4,8", *words]) == 2
        assert "no room" in capfd.readouterr().err
        assert not list(Path.cwd().iterdir())
