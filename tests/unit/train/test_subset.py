"""Evaluations during training: their steps and questions, and that the training stays the same."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.engine import EngineFailed
from qerl_lab.system.exits import INTERRUPTED, OK
from qerl_lab.train import run as run_module
from qerl_lab.train.stop import Stop
from repeated import lines_of

SUBSET, ASKED = "eval/subset_", 4
# Dropout draws in every forward of the training, and noise at every step: a random number too many would show.
SETTINGS = {
    "steps": 4, "lora__dropout": 0.2, "optim__learning_rate": 0.02, "aqn__schedule": "linear", "aqn__stages": 2,
    "aqn__sigma_start": 0.2, "aqn__reading": "equation", "checkpoint__every": 0, "eval__questions": 6,
    "rollout__prompts_per_step": 2, "rollout__batch_size": 4, "rollout__max_completion_tokens": 10,
    "eval__subset_questions": ASKED, "eval__subset_samples": 2, "eval__samples_before": 1, "eval__samples": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def watched(new_runs) -> Path:
    """A run that evaluates every second step."""
    runs = new_runs(eval__every=2)
    assert runs.run() == OK
    return runs.directory.path


def record(folder: Path, subset: bool) -> list[tuple[int, dict[str, Any]]]:
    """Return the lines of evaluations during training if `subset`, else all other lines."""
    return [line for line in lines_of(folder) if any(name.startswith(SUBSET) for name in line[1]) == subset]


def same(one: Path, other: Path) -> None:
    """Assert that all metrics of training and of the evaluations around it, and the adapter, are equal bit for bit."""
    assert record(one, subset=False) == record(other, subset=False)
    files = [folder / "adapter" / "adapter_model.safetensors" for folder in (one, other)]
    assert {file.stat().st_mode for file in files} == {(one / "metrics.jsonl").stat().st_mode}
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_training_is_the_same_bit_for_bit_with_and_without(watched: Path, new_runs) -> None:
    plain = new_runs()
    assert plain.run() == OK
    same(watched, plain.directory.path)
    assert record(plain.directory.path, subset=True) == []


def test_the_same_first_questions_are_asked_every_time(watched: Path) -> None:
    phases = RunDirectory(watched).evaluations()
    assert list(phases) == ["before", "step 0", "step 2", "step 4", "after"]
    lines = record(watched, subset=True)
    assert [step for step, _ in lines] == [0, 2, 4]
    for (step, metrics), phase in zip(lines, list(phases)[1:4], strict=True):
        rows = phases[phase]
        assert phase == f"step {step}"
        assert rows["id"].tolist() == phases["before"]["id"].tolist()[:ASKED]
        assert set(metrics) == {
            f"{SUBSET}{name}"
            for name in ("accuracy", "format", "completion_tokens", "truncated_fraction", "entropy_nats")
        }
        assert metrics[f"{SUBSET}accuracy"] == rows["accuracy"].mean()
    assert phases["step 2"]["sample"].tolist() != phases["step 4"]["sample"].tolist(), "the policy learned"


def test_a_signal_within_an_evaluation_saves_the_step_and_a_resume_changes_no_number(
    watched: Path, new_runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, evaluate, asked = Stop(), run_module.accuracy.evaluate, list[tuple[int, int]]()  # questions, samples of each

    def interrupted(engine: Any, policy: Any, task: Any, cfg: Any, part: range, samples: int, on_done: Any) -> Any:
        asked.append((len(part), samples))
        stop.signalled = len(asked) == 3  # before training, at step 0, at step 2
        return evaluate(engine, policy, task, cfg, part, samples, on_done)

    monkeypatch.setattr(run_module.accuracy, "evaluate", interrupted)
    runs = new_runs(eval__every=2)
    folder = runs.directory.path
    assert runs.run(stop=stop) == INTERRUPTED
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert "step 2" not in RunDirectory(folder).evaluations()
    ((_, ended),) = RunDirectory(folder).sessions()
    assert ended is not None, "its seconds count"
    assert runs.run() == OK
    assert asked == [(6, 1), (ASKED, 2), (ASKED, 2), (ASKED, 2), (ASKED, 2), (6, 3)]  # step 2 is asked again
    same(folder, watched)
    assert record(folder, subset=True) == record(watched, subset=True)
    mine, theirs = (RunDirectory(path).evaluations() for path in (folder, watched))
    assert list(mine) == list(theirs)
    for phase, rows in mine.items():
        pd.testing.assert_frame_equal(rows, theirs[phase])


def test_an_engine_that_fails_within_an_evaluation_loses_no_step(watched: Path, new_runs) -> None:
    runs = new_runs(eval__every=2)
    with pytest.raises(EngineFailed, match=r"no answer in 0\.2 s\. 2 of 4 steps are saved\."):
        runs.run("timeout@5")  # after before, step 0, and the steps 1 and 2: the evaluation of step 2
    assert [path.name for path in runs.directory.checkpoints.iterdir()] == ["step-000002"]
    assert runs.run() == OK
    same(runs.directory.path, watched)
    assert record(runs.directory.path, subset=True) == record(watched, subset=True)


def test_without_the_evaluations_around_it_a_run_still_has_those_within(new_runs) -> None:
    runs = new_runs(steps=1, eval__every=1, eval__questions=0)
    assert runs.run() == OK
    assert list(runs.directory.evaluations()) == ["step 0", "step 1"]
