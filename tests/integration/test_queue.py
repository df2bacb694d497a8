"""A queue of two tiny runs on the CPU: run, packed, merged without a lost pack, and run again for the lost one."""

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest

from processes import run_module
from qerl_lab.cli import launch
from waiting import has_ended, wait_for

QUEUE = """
words: [scale=pocket, steps=1, rollout.prompts_per_step=2, eval.questions=2, eval.samples=1, cpu_threads=1, device=cpu,
  tracking=none, checkpoint.every=0]
seconds: 1
parts:
  - name: formats
    lines: ["+experiment=bf16"]
    seeds: [0, 1]
    after: [accuracy questions=2 samples=1, accuracy questions=1 samples=2]
"""


def queue(folder: Path, *words: str) -> str:
    done = run_module("qerl_lab.tools.queue", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_whose_pack_was_lost_is_planned_again(tmp_path: Path) -> None:
    (results := tmp_path / "results").mkdir()
    (results / "queue.yaml").write_text(QUEUE)
    (results / "PREREGISTRATION.md").write_text("what was asked before")
    queue(tmp_path, "run", "results/queue.yaml", "pack=packed", "runs=machine", "minutes=4")
    packs = sorted((tmp_path / "packed").glob("*.tar.gz"))
    assert [pack.name.rpartition("-")[0] for pack in packs] == ["bf16-seed0", "bf16-seed1"]
    packs[1].unlink()
    queue(tmp_path, "collect", "results/queue.yaml", "packs=[packed]", "runs=here")

    with (results / "ledger.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["seed"], row["state"], row["evaluations"]) == ("0", "done", "2 of 2")
    assert [len(row[name]) for name in ("adapter_sha256", "preregistration")] == [64, 12]
    runs = pd.read_parquet(results / "runs.parquet")
    assert runs[["state", "seed"]].to_numpy().tolist() == [["finished", 0]]
    answers = [pd.read_parquet(file) for file in results.glob("evaluations/*/*/eval.parquet")]
    assert [len(rows) for rows in answers] == [2, 2]
    assert not any("completion" in rows for rows in answers)

    planned = [line for line in queue(tmp_path, "plan", "results/queue.yaml").splitlines() if line.startswith("python")]
    assert [line.rpartition(" ")[2] for line in planned] == ["seed=1"]
    again = queue(
        tmp_path, "run", "results/queue.yaml", "pack=again", "runs=machine", "minutes=4"
    )  # the runs are already in `machine`
    assert [pack.name for pack in (tmp_path / "again").iterdir()] == [packs[1].name], again
    queue(tmp_path, "collect", "results/queue.yaml", "packs=[packed,again]", "runs=here")
    assert pd.read_parquet(results / "runs.parquet")["seed"].tolist() == [0, 1]
    assert "python" not in queue(tmp_path, "plan", "results/queue.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("send", [lambda pid: os.kill(pid, signal.SIGTERM), lambda pid: os.killpg(pid, signal.SIGINT)],
                         ids=["alone", "terminal"])  # fmt: skip
def test_a_signal_to_the_command_makes_its_run_save_and_stop(tmp_path: Path, send: Callable[[int], None]) -> None:
    """A terminal also sends SIGINT to the run, and then the command sends SIGTERM to the run."""
    (tmp_path / "queue.yaml").write_text(QUEUE.replace("steps=1,", "steps=4000,").replace("[0, 1]", "[0]"))
    (tmp_path / "PREREGISTRATION.md").write_text("what was asked before")
    line = [sys.executable, "-m", "qerl_lab.tools.queue", "run", "queue.yaml", "pack=packed", "runs=machine"]
    queue = subprocess.Popen(
        line, cwd=tmp_path, env=os.environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: list(tmp_path.glob("machine/*/metrics.jsonl")), alive=lambda: queue.poll() is None)
    below = psutil.Process(queue.pid).children(recursive=True)
    assert len(below) > 1, "the main command and the run's process"
    send(queue.pid)
    assert queue.wait(120) == 130
    assert all(map(has_ended, below))
    said = "".join(file.read_text() for file in tmp_path.glob("machine/*.txt"))
    assert "interrupted; " in said
    assert launch.ABORTING not in said
    assert list(tmp_path.glob("machine/*/checkpoints/*"))
