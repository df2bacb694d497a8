"""A run survives the loss of its console: real signals, pipes and terminals, and a real run."""

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mlflow_store import runs
from processes import run_module
from qerl_lab.cli import launch
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.record.directory import RunDirectory
from repeated import last_step
from waiting import has_ended, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]
WORDS = (
    "device=cpu", "cpu_threads=1", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_completion_tokens=16", "optim.micro_batch_size=4", "lora.rank=4", "task.train_questions=64",
    "eval.questions=8", "eval.samples=2", "tracking.mlflow=false", "checkpoint.every=1", "run_dir=run",
)  # fmt: skip
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `python -m qerl_lab` with a small run in its own process group; kill the group at the end."""
    groups = []

    def begin(*words: str, **how: object) -> subprocess.Popen[str]:
        by_key = {word.partition("=")[0]: word for word in (*WORDS, *words)}  # a key may be typed once
        command = [sys.executable, "-m", "qerl_lab", *by_key.values()]
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True, **how}
        process = subprocess.Popen(command, cwd=tmp_path, text=True, **given)
        groups.append(process)
        return process

    yield begin
    for process in groups:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    """Wait until the run's process exists and has torch loaded, and return it."""

    def importing() -> psutil.Process | None:
        children = psutil.Process(process.pid).children()
        maps = Path(f"/proc/{children[0].pid}/maps").read_text() if children else ""
        return children[0] if "libtorch" in maps else None

    return wait_for(importing)


def test_a_run_finishes_when_nobody_reads_its_output(start: Start, tmp_path: Path) -> None:
    process = start("steps=2")  # as with `2>&1 | head -n 1`
    assert process.stdout.readline() == "run directory: run\n"
    process.stdout.close(), process.stderr.close()
    assert process.wait(timeout=300) == 0
    assert RunDirectory(tmp_path / "run").status == "done"
    assert last_step(tmp_path / "run") == 2


def test_ctrl_c_while_torch_is_imported_ends_the_run_at_once(start: Start, tmp_path: Path) -> None:
    process = start("steps=2")
    child = child_of(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=5)
    assert process.returncode == 130
    assert err == f"{launch.STOPPING}\n"
    assert "interrupted; 0 of 2 steps are saved. Continue with\n" in out
    assert has_ended(child)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"resolved.yaml", ".typed"}


def test_a_run_that_loses_its_terminal_saves_the_current_step(start: Start, tmp_path: Path) -> None:
    """A real terminal closes. tests/integration/test_resume.py sends SIGINT to the parent only."""
    run = tmp_path / "run"
    master, slave = pty.openpty()
    own = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
    process = start("steps=500", stdin=slave, stdout=slave, stderr=slave, preexec_fn=own)
    os.close(slave)
    wait_for(lambda: last_step(run) >= 1)
    child = child_of(process)
    os.close(master)
    assert process.wait(timeout=300) == 130
    assert has_ended(child)
    assert RunDirectory(run).status == "interrupted"
    assert (run / "checkpoints" / f"step-{last_step(run):06d}" / "manifest.json").exists()


def test_a_record_never_gets_the_number_of_a_closed_standard_stream(tmp_path: Path) -> None:
    code = "from qerl_lab.system import exits; exits.survive_lost_console(); print('gone'); "
    code += "print(open('record', 'w').fileno() > 2)"
    subprocess.run(["bash", "-c", f'exec {sys.executable} -c "{code}" >&- 2>&- <&-'], cwd=tmp_path, check=True)
    assert (tmp_path / "record").read_text() == ""


def test_a_moved_run_with_umlauts_is_resumed_from_another_directory(start: Start, tmp_path: Path) -> None:
    """The paths of model and store are relative, the run directory is moved, and `resume` is typed elsewhere."""
    shutil.copytree(ASSETS, tmp_path / "mödel")
    words = ("scale=custom", "model.path=mödel", "tracking.mlflow=true", "tracking.uri=sqlite:///dö.db", "steps=4")
    process = start(*words, "run_dir=rün")
    wait_for(lambda: last_step(tmp_path / "rün") >= 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    (elsewhere := tmp_path / "anderswö").mkdir()
    run = (tmp_path / "rün").rename(elsewhere / "rün 2")
    done = last_step(run)
    again = run_module("qerl_lab", "resume=rün 2", cwd=elsewhere)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"continuing after step {done}" in again.stdout
    assert last_step(run) == 4
    assert [mirror.info.status for mirror in runs(f"sqlite:///{tmp_path}/dö.db")] == ["FINISHED"]
    assert not list(elsewhere.glob("*.db"))
