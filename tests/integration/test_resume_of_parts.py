"""Kill -9 within what only some runs do: a sigma that follows its KL, evaluations during training, refills."""

import signal

import pytest

from killed_runs import check, ended, finish, run_until, start, uninterrupted
from repeated import last_step, lines_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]
REFILLS = {
    "algorithm__dynamic_sampling": True, "algorithm__max_resamples": 3, "rollout__max_completion_tokens": 40,
    "aqn__schedule": "off",
}  # fmt: skip


def test_kill_9_of_a_run_whose_sigma_follows_its_kl(killable) -> None:
    changes = {
        "aqn__schedule": "adaptive", "aqn__sigma_start": 0.05, "aqn__adaptive__factor": 1.5, "steps": 3,
        "eval__questions": 0, "tracking__mlflow": False,
    }  # fmt: skip
    whole, run_dir = killable(**changes), killable(**changes)
    finish(whole)
    for moment in (
        ("qerl_lab.aqn.solver", "adapt_sigma", 1, True),  # of step 1, of which nothing is saved
        ("qerl_lab.record.checkpoint", "save", 1, True),
        ("qerl_lab.aqn.solver", "adapt_sigma", 1, False),  # of step 2
        ("qerl_lab.record.checkpoint", "sha256", 3, False),
    ):
        assert ended(start(run_until, run_dir, *moment)) == -signal.SIGKILL, (run_dir / "output.txt").read_text()
    finish(run_dir)
    assert lines_of(run_dir) == lines_of(whole)
    assert len({metrics["noise/sigma"] for _, metrics in lines_of(whole)}) == 3
    adapter, expected = (path / "adapter" / "adapter_model.safetensors" for path in (run_dir, whole))
    assert adapter.read_bytes() == expected.read_bytes()


def test_kill_9_around_an_evaluation_during_training(killable) -> None:
    """Before it, with its rows and without its line, with both and no checkpoint of its step; all three go on alike."""
    every = {"steps": 4, "eval__every": 2, "eval__subset_questions": 4, "checkpoint__every": 2}
    every |= {"tracking__mlflow": False}
    whole, killed = killable(**every), killable(**every)
    finish(whole)
    for moment in (
        ("qerl_lab.train.run", "evaluate", 3, False),  # before training, step 0, step 2
        ("qerl_lab.record.directory", "RunDirectory.write_evaluations", 1, True),
        ("qerl_lab.train.trainer", "LabTrainer._save_checkpoint", 1, False),
    ):
        code = ended(start(run_until, killed, *moment))
        assert code == -signal.SIGKILL, (moment, (killed / "output.txt").read_text())
    finish(killed)
    assert lines_of(killed) == lines_of(whole)
    assert [step for step, metrics in lines_of(whole) if "eval/subset_accuracy" in metrics] == [0, 2, 4]
    for name in ("eval.parquet", "adapter/adapter_model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_kill_9_amid_refills(killable) -> None:
    """As a step asks for more questions, and when they are graded; then in another step."""
    whole = uninterrupted(killable(**REFILLS))
    resamples = [int(metrics["rollout/resamples"]) for _, metrics in whole.lines[1:-1]]
    first, second = [step for step, times in enumerate(resamples) if times][:2]
    assert any(metrics["rollout/groups_dropped"] for _, metrics in whole.lines[1:-1])

    run_dir = killable(**REFILLS)
    between = sum(1 + times for times in resamples[first:second])  # rollouts from the one step to the other
    for module, function, call, after in (
        ("qerl_lab.train.step", "sampling_settings", sum(1 + times for times in resamples[:first]) + 2, False),
        ("qerl_lab.train.step", "grade", 2, True),
        ("qerl_lab.train.step", "sampling_settings", between + 2, True),
    ):
        before = last_step(run_dir)
        assert ended(start(run_until, run_dir, module, function, call, after)) == -signal.SIGKILL
        assert last_step(run_dir) in (before, first, second)
    assert last_step(run_dir) == second
    finish(run_dir)
    check(run_dir, whole)
