"""Interruptions of a real run: signals, kill -9 at the worst moments, damaged checkpoints.

Each run ends with the record of an uninterrupted run: every metric but times, speeds and memory, bit for bit, no
step missing or double, in metrics.jsonl and in MLflow, and the same adapter. The signals are sent to the command
itself; most other children are forked (tests/helpers/killed_runs.py).
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from forked import ended
from killed_runs import STEPS, Reference, check, finish, kill, start
from processes import run_module
from qerl_lab.cli import launch
from qerl_lab.config.paths import with_absolute_paths
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from repeated import files_of, last_step, lines_of
from waiting import wait_for

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_noise_acts_in_the_reference_run_and_so_does_every_other_setting(reference: Reference) -> None:
    """Check the reference run itself, with which the other tests compare."""
    steps = dict(reference.lines[1:-1])
    sigma = [steps[step]["noise/sigma"] for step in steps]
    assert 0 == sigma[0] == sigma[1] < sigma[4] == sigma[5] < sigma[2] == sigma[3]
    assert steps[3]["noise/kl_solved"] == pytest.approx(0.02, rel=0.05)
    assert steps[6]["noise/kl_solved"] == pytest.approx(0.002, rel=0.05)
    assert steps[5]["noise/std_observed"] == pytest.approx(sigma[4], rel=0.1)
    assert steps[5]["noise/std_observed"] != steps[6]["noise/std_observed"]
    assert steps[6]["policy/kl_reference"] > 0
    assert any(metrics["policy/grad_norm"] > 0 for metrics in steps.values())
    assert len({metrics["policy/entropy_nats"] for metrics in steps.values()}) == STEPS
    assert len({metrics["policy/entropy_coef"] for metrics in steps.values()}) > 2, "the bonus never adapts"


def stopped(words: list[str], run_dir: Path, step: int, number: signal.Signals) -> tuple[str, str, int]:
    """Send a signal to a command once the step is logged; return its output, errors and exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *words[1:]], cwd=run_dir.parent, **pipes)
    wait_for(lambda: last_step(run_dir) >= step, pause=0.001, alive=lambda: process.poll() is None)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert not child.is_running(), "the run outlives the command"
    return output, errors, process.returncode


@pytest.mark.slow
def test_after_a_signal_a_run_ends_its_step_saves_and_says_how_to_continue(killable, reference: Reference) -> None:
    """The run gets SIGINT, and the command that it prints gets SIGTERM. No checkpoint is due at either time."""
    run_dir, words, done = killable(checkpoint__every=0), ["python", "-m", "qerl_lab"], 0
    words.append(f"resume={run_dir}")
    for number in (signal.SIGINT, signal.SIGTERM):
        output, errors, code = stopped(words, run_dir, done + 1, number)
        assert code == 130, errors
        assert "Traceback" not in errors

        (said,) = re.findall(r"interrupted; (\d) of 6 steps are saved. Continue with\n +(.+)", output)
        before, done = done, last_step(run_dir)
        assert said[0] == str(done)
        assert before + 1 <= done < STEPS
        assert max((run_dir / "checkpoints").iterdir()).name == f"step-{done:06d}"
        assert lines_of(run_dir) == reference.lines[: done + 1]
        assert not (run_dir / "DONE").exists()
        assert not (run_dir / "FAILED").exists()
        words = shlex.split(said[1])
    finish(run_dir)
    check(run_dir, reference)


QUESTIONS = {
    "steps": 2, "checkpoint__every": 0, "rollout__max_completion_tokens": 160, "rollout__batch_size": 512,
    "eval__questions": 128, "eval__samples": 4, "eval__every": 1, "eval__subset_questions": 128,
    "eval__subset_samples": 4,
}  # fmt: skip


def stopped_among_questions(run_dir: Path, phase: str, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a command once its terminal shows the evaluation; return its exit code and output."""
    master, terminal = os.openpty()
    line = [sys.executable, "-m", "qerl_lab", f"resume={run_dir}"]
    process = subprocess.Popen(line, cwd=run_dir.parent, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    said = ""
    while f"held-out questions {phase}: " not in said:
        said += os.read(master, 65536).decode(errors="replace")
    os.killpg(process.pid, number)  # as a terminal and a scheduler do
    with suppress(OSError):  # raised if nobody else has the terminal open
        while more := os.read(master, 65536):
            said += more.decode(errors="replace")
    os.close(master)
    return process.wait(timeout=60), said


@pytest.mark.slow
def test_a_signal_during_an_evaluation_ends_it_and_resume_repeats_it(new_run) -> None:
    """All 512 completions are one batch. A run that finished the batch would have the answers in its record."""
    whole, run_dir = new_run(**QUESTIONS), new_run(**QUESTIONS)
    finish(whole)
    reference = lines_of(whole)
    assert [step for step, _ in reference] == [0, 0, 1, 1, 2, 2, 2]
    for phase, number, asked, lines, saved in (
        ("before training", signal.SIGINT, set(), 0, 0),
        ("after step 1", signal.SIGTERM, {"before", "step 0"}, 3, 1),
        ("after training", signal.SIGINT, {"before", "step 0", "step 1", "step 2"}, 6, 2),
    ):
        code, said = stopped_among_questions(run_dir, phase, number)
        assert code == 130, said
        assert said.count(launch.STOPPING) == 1
        assert launch.ABORTING not in said
        assert "Traceback" not in said
        assert f"interrupted; {saved} of 2 steps are saved. Continue with" in said
        assert RunDirectory(run_dir).evaluations().keys() == asked
        assert lines_of(run_dir) == reference[:lines]
        assert RunDirectory(run_dir).status == "interrupted"
    finish(run_dir)
    assert lines_of(run_dir) == reference
    assert files_of(run_dir) == files_of(whole)


def test_kill_9_at_the_worst_moments(killable, reference) -> None:
    """One run is killed at each of these calls in turn and continued each time. It keeps one checkpoint."""
    run_dir = killable(checkpoint__keep=0)
    kill(
        run_dir,
        ("qerl_lab.record.directory", "RunDirectory.note_mirror", 1),  # before MLflow is asked for anything
        (
            "qerl_lab.record.directory",
            "RunDirectory.write_evaluations",
            1,
            True,
        ),  # the evaluation is done and not yet logged
        ("qerl_lab.tracking.tracker", "Tracker.log", 1, True),  # the evaluation is logged
        ("qerl_lab.tracking.tracker", "Tracker.log", 1, True),  # step 1 is logged, and has no checkpoint
        ("qerl_lab.record.checkpoint", "sha256", 3),  # a checkpoint without manifest
        ("qerl_lab.record.checkpoint", "_flush_to_disk", 2),  # a complete one without its final name
        ("qerl_lab.record.checkpoint", "shutil.rmtree", 2),  # the next one, before the last one is deleted
        ("qerl_lab.aqn.solver", "solve", 1),  # the texts for a stage's sigma are sampled
        ("qerl_lab.aqn.solver", "solve", 1, True),  # the sigma is found, and nothing holds it
        ("qerl_lab.record.checkpoint", "save", 3, True),  # exactly between two steps
        ("qerl_lab.record.directory", "RunDirectory.write_evaluations", 1),  # the last evaluation is not kept
        (
            "qerl_lab.record.directory",
            "RunDirectory.write_evaluations",
            1,
            True,
        ),  # its rows are written, its line is not
        ("qerl_lab.report.plots", "save_curves", 1),  # its line is written
        ("qerl_lab.tracking.tracker", "Tracker.finish", 1),
        ("qerl_lab.tracking.tracker", "Tracker.finish", 1, True),  # MLflow says finished, and there is no DONE
    )
    finish(run_dir)
    check(run_dir, reference)
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_of_all_weights_that_is_killed_ends_in_the_same_weights(killable) -> None:
    """Trained norms have noise. The kills come between two steps, in a checkpoint and before an evaluation."""
    full = {"lora__rank": 0, "format__name": "bf16", "algorithm__beta": 0.0, "optim__learning_rate": 1e-3}
    whole, killed = killable(**full), killable(**full)
    finish(whole)
    kill(
        killed,
        ("qerl_lab.record.checkpoint", "save", 2, True),
        ("qerl_lab.record.checkpoint", "sha256", 3),
        ("qerl_lab.train.run", "evaluate_heldout", 2),
    )
    finish(killed)
    assert len(lines_of(whole)) == STEPS + 2
    assert lines_of(killed) == lines_of(whole)
    for name in ("model/model.safetensors", "eval.parquet", "samples.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    last = f"checkpoints/step-{STEPS:06d}"
    for name in ("model.safetensors", "optimizer.pt"):
        assert (killed / last / name).read_bytes() == (whole / last / name).read_bytes(), name
    assert not (killed / "adapter").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_around_an_evaluation_in_training_ends_the_same(killable) -> None:
    """The kills come before the evaluation, after its rows, and after its line but before the step's checkpoint."""
    every = {"steps": 4, "eval__every": 2, "eval__subset_questions": 4, "checkpoint__every": 2}
    whole, killed = (killable(**every, tracking__mlflow=False) for _ in range(2))
    finish(whole)
    kill(
        killed,
        ("qerl_lab.evaluate.accuracy", "evaluate", 3),  # before training, step 0, step 2
        ("qerl_lab.record.directory", "RunDirectory.write_evaluations", 1, True),
        ("qerl_lab.train.trainer", "LabTrainer._save_checkpoint", 1),
    )
    finish(killed)
    assert lines_of(killed) == lines_of(whole)
    assert [step for step, metrics in lines_of(whole) if "eval/subset_accuracy" in metrics] == [0, 2, 4]
    for name in ("eval.parquet", "adapter/adapter_model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(bytes(data))


@pytest.mark.slow
def test_damaged_checkpoints_are_skipped_with_a_warning(killable, reference) -> None:
    """First the newest checkpoint is damaged, then all: the run goes back one step, then to its start."""
    run_dir = killable()
    folder = run_dir / "checkpoints"

    def killed_at(step: int) -> list[Path]:
        """Kill the run when it has the checkpoint of this step, and return its checkpoints, the newest first."""
        process = start(run_dir)
        wait_for((folder / f"step-{step:06d}").exists, pause=0.001, alive=process.is_alive)
        process.kill()
        ended(process)
        return sorted(folder.glob("step-*"), reverse=True)

    first, *_ = killed_at(3)
    truncate(first / "optimizer.pt")
    second = killed_at(5)
    flip(second[0] / "adapter_model.safetensors")
    for older in second[1:]:
        (older / "trainer_state.json").unlink(missing_ok=True)
    finish(run_dir)
    output = (run_dir / "output.txt").read_text()
    assert re.search(rf"warning: checkpoint {first} is damaged \(.+\); using the previous one", output)
    for path in second:  # the warning on the oldest says that there is no earlier one
        assert f"warning: checkpoint {path} is damaged (" in output
    assert output.count("; there is no earlier one, so training starts again.") == 1
    assert re.findall(r"continuing after step \d", output) == [f"continuing after step {int(first.name[-1]) - 1}"]
    check(run_dir, reference)


@pytest.mark.slow
def test_a_run_does_not_continue_with_another_model_at_its_path(tiny, tmp_path: Path) -> None:
    """Both the command and the run's process refuse. A launcher may start the process later, on another machine."""
    model, directory = shutil.copytree(ASSETS, tmp_path / "model"), RunDirectory(tmp_path / "run")
    directory.claim(with_absolute_paths(tiny(model__path=str(model))), TypedCommand("the command"))
    flip(model / "model.safetensors")
    for words in (("qerl_lab", f"resume={directory.path}"), ("qerl_lab.train", str(directory.path), str(os.getpid()))):
        done = run_module(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        refusal = done.stderr + (directory.reason if directory.status == "failed" else "")
        assert re.search(
            rf"model\.path={model} was the model of model\.hash=\w{{12}} when .+ is now the model of", refusal
        )
        assert not list(directory.path.glob("checkpoints/*"))
    flip(model / "model.safetensors")
    done = run_module("qerl_lab", f"resume={directory.path}", cwd=tmp_path)
    assert (done.returncode, directory.status) == (0, "done")
