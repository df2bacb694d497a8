"""Sweeps that were run before: finished jobs are skipped, stopped ones go on, also after kill -9; several at once.

The stand-in for a run's process notes its sessions in RUN_DIR/calls. Its seed says what becomes of it: 1 fails in its
first session, 2 waits in its first session until it is told to stop or killed, every other is done.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from qerl_lab import preflight, tasks
from qerl_lab.cli import launch, scheduler
from qerl_lab.cli.train import main
from qerl_lab.config.option import ConfigError
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.record.directory import RunDirectory
from standin import background
from waiting import wait_for

pytestmark = pytest.mark.integration
CHILD = """
import json, os, re, signal, sys, time
run_dir, parent = sys.argv[1], os.getppid()
path = lambda name: os.path.join(run_dir, name)
def write(name, text, mode="w"):
    with open(path(name), mode) as f: f.write(text)
stopped = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda n, frame: stopped.append(n))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
resolved = open(path("resolved.yaml")).read()
seed, steps = (int(re.search(rf"^{key}: (\\d+)", resolved, re.M)[1]) for key in ("seed", "steps"))
began, first = time.time(), not os.path.exists(path("calls"))
line = lambda step: json.dumps({"step": step, "time": began, "metrics": {"reward/mean": 0.5}}) + "\\n"
if first: write("env.json", json.dumps({"gpus": [], "words": json.loads(os.environ["QERL_LAB_WORDS"])}))
print("the console of", seed, flush=True)
write("metrics.jsonl", line(25))
write("calls", "began\\n", "a")
if seed == 1 and first: write("FAILED", "ValueError: the reason\\n"); sys.exit(1)
if seed == 2 and first:
    while not stopped and os.getppid() == parent: time.sleep(0.02)
    sys.exit(130)
if seed >= 10: time.sleep(1.0)
write("times", json.dumps([began, time.time(), os.environ.get("CUDA_VISIBLE_DEVICES", "-")]))
write("metrics.jsonl", "".join(map(line, range(1, steps + 1))))
write("eval.parquet", "PAR1"); write("DONE", "{}")  # as much as a sweep looks at
"""


@pytest.fixture(autouse=True)
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(launch, "child_command", lambda run_dir: [sys.executable, "-S", str(script), str(run_dir)])
    monkeypatch.setattr(preflight.machine, "has_gpu", lambda: False)
    preflight.machine.visible_gpus.cache_clear()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return script


def _calls() -> list[Path]:
    return sorted(Path("runs/sweeps").glob("*/*/*/calls"))


def sessions() -> list[int]:
    return [len(path.read_text().split()) for path in _calls()]


def is_free(run_dir: Path) -> bool:
    """Whether no process runs in the directory."""
    with suppress(ConfigError), RunDirectory(run_dir).locked():
        return True
    return False


def made(pattern: str) -> Path:
    """The file of the sweep, once it is there."""
    return wait_for(lambda: [*Path.cwd().glob(pattern)])[0]


def test_the_same_line_skips_what_is_done_and_goes_on_with_what_failed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=0,1"]) == 1
    assert sessions() == [1, 1]
    assert main(["-m", "seed=0,1"]) == 0
    assert sessions() == [1, 2]
    assert "1 are done already, 1 go on" in capfd.readouterr().out
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    assert main(["-m", "seed=0,1"]) == 0
    assert sessions() == [1, 2]
    out = capfd.readouterr().out
    assert "2 done" in out
    assert (directory / "table.txt").read_text().strip() in out
    assert main(["-m", "seed=0,1", "dry_run=true"]) == 0
    assert "but for 2 that are done" in capfd.readouterr().out
    for words in (["seed=0,3"], ["seed=0,1", "lora.rank=4"], ["seed=0,3", "rerun=true"]):  # another sweep
        before = len(sessions())
        main(["-m", *words])
        assert len(sessions()) == before + 2


def test_another_grid_in_the_same_directory_joins_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    for seeds in ("0,3", "4,5"):
        assert main(["-m", f"seed={seeds}", "hydra.sweep.dir=sweep"]) == 0
    runs = ["0-adhoc-seed0", "0-adhoc-seed4", "1-adhoc-seed3", "1-adhoc-seed5"]
    assert sorted(path.parent.name for path in Path("sweep").glob("*/DONE")) == runs
    capfd.readouterr()
    assert main(["resume=sweep"]) == 0
    out = capfd.readouterr().out
    assert "4 done" in out
    assert [line.split()[1] for line in out.splitlines() if re.match(r"\d  ", line)] == [
        "seed=0", "seed=4", "seed=3", "seed=5"
    ]  # fmt: skip


@pytest.mark.parametrize(("again", "said"), [
    (["rerun=true"], "has a run already. Type another hydra.sweep.dir."),
    (["steps=49"], "has a run of another configuration, or of other questions. Type another hydra.sweep.dir."),
    (["steps=49", "hydra/launcher=basic"], "has a run of another configuration"),
])  # fmt: skip
def test_a_job_does_not_go_on_with_another_run(again: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "seed=0,3", "hydra.sweep.dir=sweep"]
    assert main(words) == 0
    assert main([*words, *again]) == 2
    assert said in capfd.readouterr().err


def test_a_moved_model_is_the_same_run_and_a_replaced_one_is_another() -> None:
    words = ["-m", "seed=0,3", "scale=pocket"]
    model = shutil.copytree(ASSETS, "model")
    assert main([*words, f"model.path={model}"]) == 0
    moved = Path(model).rename("moved")
    assert main([*words, f"model.path={moved}"]) == 0
    assert sessions() == [1, 1]
    (moved / "tokenizer.json").write_text((moved / "tokenizer.json").read_text() + "\n")
    assert main([*words, f"model.path={moved}"]) == 0
    assert sessions() == [1] * 4


def test_a_run_whose_questions_were_in_a_file_that_changed_is_another_run() -> None:
    data, line = Path("data"), {"question": "1 + 1?", "answer": "#### 2"}
    data.mkdir()
    for role, first in (("train", 0), ("test", 9)):
        rows = [line | {"question": f"{first + n} + 1?"} for n in range(4)]
        (data / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["-m", "seed=0,3", "task=gsm8k", f"task.path={data.absolute()}"]
    assert main(words) == 0
    for env in Path("runs").rglob("env.json"):
        asked = tasks.load(RunDirectory(env.parent).config().task).data
        env.write_text(json.dumps({"gpus": [], "data": dict(asked)}))
    assert main(words) == 0
    assert sessions() == [1, 1]
    test = (data / "test.jsonl").read_text()
    (data / "test.jsonl").write_text(test.replace("9 + 1?", "9 + 2?"))
    preflight.question_counts._load_task.cache_clear()  # which another command would not have
    assert main(words) == 0
    assert sessions() == [1, 1, 1, 1]
    shutil.rmtree(data)
    preflight.question_counts._load_task.cache_clear()
    assert main(words) == 0  # nothing is left to run
    assert sessions() == [1, 1, 1, 1]


@pytest.mark.parametrize("how", ["the same line", "resume", "in a pool"])
def test_a_sweep_that_was_killed_with_minus_9_goes_on(child: Path, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "seed=0,2,3", *(["jobs=2", "cpu_threads=1"] if how == "in a pool" else [])]
    parent = background(child, *words)
    waiting = made("runs/sweeps/adhoc/*/1-*/calls").parent
    made("runs/sweeps/adhoc/*/0-*/DONE")
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


def test_resume_of_a_sweep_keeps_the_configurations_of_its_runs(child: Path) -> None:
    own = child.parent / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\n# mine\nexperiment: mine\nlora:\n  rank: 8\n")
    assert main(["-m", "--config-dir", str(own.parent), "experiment=mine", "seed=0,1"]) == 1
    (own / "mine.yaml").unlink()
    (directory,) = Path("runs/sweeps/adhoc").iterdir()
    assert main([f"resume={directory}"]) == 0
    assert [RunDirectory(path.parent).config().lora.rank for path in _calls()] == [8, 8]


def test_a_launcher_of_hydra_s_own_runs_checked_jobs_and_the_same_line_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["-m", "seed=0,1,3", "hydra/launcher=basic"]
    assert main([*words, "lora.rank=4,0"]) == 2
    assert "job 1 (seed=0 lora.rank=0): lora.rank=0 is not allowed" in capfd.readouterr().err
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


def test_a_pool_runs_so_many_jobs_at_once_and_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=10,11,12,1", "jobs=2", "cpu_threads=1"]) == 1
    spans = [json.loads(path.read_text())[:2] for path in Path("runs").rglob("times")]
    at_once = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert max(at_once) == 2
    out, err = capfd.readouterr()
    assert "1 failed" in out
    assert "ValueError: the reason" in err
    assert re.search(r"job [012]: step 25/50", err)  # the table is read again every second: it may miss a short job
    assert "the console of" not in out + err
    assert "the console of 10\n" in [path.read_text() for path in Path("runs").rglob("console.txt")]


def test_jobs_share_the_gpus_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.machine, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    words = ["-m", "seed=10,11,12,13", "jobs=4", "cpu_threads=1", "optim.packing=off", "jobs_per_gpu=2"]
    assert main(words) == 0
    shown = sorted(json.loads(path.read_text())[2] for path in Path("runs").rglob("times"))
    assert shown == ["3", "3", "5", "5"]


def test_a_gpu_is_shared_by_so_many_and_only_if_no_other_is_free() -> None:
    alone = scheduler.GpuPool(["0", "1"], 1)
    with alone.take(1) as first, alone.take(1) as second:
        assert {*first, *second} == {"0", "1"}
        assert alone._free.empty()
    cards = scheduler.GpuPool(["0", "1"], 2)
    with cards.take(1) as busy:
        for _ in range(4):
            with cards.take(1) as taken:
                assert taken != busy


def test_ctrl_c_stops_the_jobs_of_a_pool_and_the_same_line_goes_on(child: Path) -> None:
    parent = background(child, "-m", "seed=2,0,3", "jobs=2", "cpu_threads=1")
    made("runs/sweeps/adhoc/*/0-*/calls")
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=120)
    assert parent.returncode == 130
    assert "1 interrupted" in out
    assert main(["-m", "seed=2,0,3", "jobs=2", "cpu_threads=1"]) == 0
    assert len(list(Path("runs/sweeps/adhoc").iterdir())) == 1


@pytest.mark.parametrize(("words", "said"), [
    (["jobs=2"], "jobs=2 is of a sweep"),
    (["-m", "seed=0,1", "jobs_per_gpu=2"], "jobs_per_gpu=2 does nothing in a run with jobs=1"),
    (["-m", "seed=0,1", "jobs=2", "hydra/launcher=basic"], "jobs=2 is for hydra/launcher=lab"),
    (["-m", "seed=0,1", "hydra.sweeper.max_batch_size=3"], "Type jobs=3"),
    (["-m", "seed=0,1", "slurm=--partition=gpu"], "type for example launcher=slurm"),
    (["-m", "jobs=1,2"], "jobs holds for the whole sweep"),
    (["-m", "seed=0,1", "format=bf16", "rollout=vllm_server", "cpu_threads=1", "jobs=2"],
     "it has one run at a time. Type jobs=1"),
])  # fmt: skip
def test_words_about_jobs_are_refused_where_they_do_nothing(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capfd.readouterr().err
    assert not Path("runs").exists()


def read(terminal: int) -> str:
    """What was written to a terminal that does not block, since the last call."""
    try:
        return os.read(terminal, 65536).decode().replace("\r\n", "\n")
    except BlockingIOError:
        return ""


def test_on_a_terminal_a_table_stands_where_the_last_one_stood(child: Path) -> None:
    master, terminal = os.openpty()
    os.set_blocking(master, False)
    parent = background(child, "-m", "seed=2,0", "lora.rank=4", stderr=terminal)
    table = "job  step   reward  ETA  words\n0    25/50  0.50    -    seed=2\n0 of 2 done, 1 running, ETA "
    shown, until = "", time.monotonic() + 60
    while f"\x1b[3F\x1b[J{table}" not in shown:  # in place of a table of three lines
        assert time.monotonic() < until, shown
        time.sleep(0.2)
        shown += read(master)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    shown += read(master)
    before = re.split(r"\x1b\[(\d)F\x1b\[J", shown.partition(launch.STOPPING)[0])
    drawn, up = before[:-1:2], before[1::2]
    assert [text.count("\n") for text in drawn] == [int(lines) for lines in up]  # each where the last one stood
    after = shown.partition(f"{launch.STOPPING}\n")[2]
    assert re.match(r"(job  step|job 0: interrupted)", after)  # below the message, which stays
    assert "job 0: interrupted, reward 0.50, seed=2 (0 of 2 done, 1 interrupted)" in after
