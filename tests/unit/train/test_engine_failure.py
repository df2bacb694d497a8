"""An engine fails within a run: the state before the step is saved, and the resumed run equals an unbroken one.

The runs drop out and refill, so that random numbers and the place in the data matter.
"""

from itertools import accumulate

import pytest

from failing_engines import Runs, StopWhen
from qerl_lab.record import checkpoint
from qerl_lab.rollout.engine import EngineFailed
from qerl_lab.system.exits import INTERRUPTED, OK
from qerl_lab.train.step import sampling_settings
from qerl_lab.train.stop import Diverged
from repeated import files_of, lines_of

SETTINGS = {
    "steps": 3, "checkpoint__every": 0, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 24,
    "optim__learning_rate": 0.02, "lora__dropout": 0.2, "eval__questions": 4, "eval__samples": 1,
    "aqn__schedule": "linear", "aqn__reading": "equation", "aqn__sigma_start": 0.3, "aqn__sigma_end": 0.1,
    "aqn__stages": 2, "algorithm__dynamic_sampling": True, "algorithm__max_resamples": 2, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(new_runs) -> Runs:
    """A finished run whose engine never failed."""
    runs = new_runs()
    assert runs.run() == OK
    assert runs.plan.calls["build"] == runs.plan.calls["close"] == 1
    assert runs.plan.calls["generate"] > 5, "nothing was refilled"
    return runs


def first_call(whole: Runs, step: int) -> int:
    """Return the number of the first call of `generate` in a step. The evaluation before training is call 1."""
    seeds = [how.seed for _, how in whole.plan.asked]
    return 1 + seeds.index(sampling_settings(whole.cfg, step, 0, 0).seed)


DIED = "the worker died"


@pytest.mark.parametrize(
    "failures",  # one after another, of one run that is resumed each time; with the steps that are saved then
    [
        [("die@2", DIED, 0), ("die@{0}", DIED, 1), ("sync@1", "the adapter did not arrive", 1),
         ("group@1", "the engine gave ", 1), ("die@{2}", DIED, 2)],
        [("die@1", DIED, 0), ("timeout@{1}", "no answer in 0.2 s", 1),
         ("logprobs@2", "the engine gave 0 log-probs for a completion of ", 1), ("die@{3}", DIED, 3)],
    ],
    ids=["before a step", "within a step, and in the evaluations"],
)  # fmt: skip
def test_a_failure_saves_the_state_before_the_step_and_says_how_to_go_on(new_runs, whole, failures: list) -> None:
    runs, step_2, step_3 = new_runs(), first_call(whole, 2), first_call(whole, 3)
    # First try of step 2, its refill; after step 1 the first try of step 3, and the last call of all.
    calls = step_2, step_2 + 1, 1 + step_3 - step_2, 1 + len(whole.plan.asked) - step_2
    assert step_3 - step_2 > 1, "step 2 refills nothing"
    metrics = [line["metrics"] for line in whole.directory.metrics()]
    drawn = [0, *accumulate(row["rollout/prompts_drawn"] for row in metrics if "reward/mean" in row)]
    for words, cause, saved in failures:
        with pytest.raises(EngineFailed) as raised:
            runs.run(words.format(*calls))
        remedy = f"{saved} of 3 steps are saved. Type python -m qerl_lab resume={runs.cfg.run_dir} to go on."
        assert str(raised.value).startswith(cause)
        assert str(raised.value).endswith(remedy)
        newest = checkpoint.newest(runs.directory.checkpoints)
        assert (newest.step if newest else 0) == saved
        assert (newest.prompts_seen if newest else 0) == drawn[saved]
        assert runs.plan.calls["close"] == 1
    assert runs.run() == OK
    one, other = runs.directory.path, whole.directory.path
    assert lines_of(one) == lines_of(other)
    assert files_of(one) == files_of(other)
    assert runs.directory.status == "done"


SEARCH = {"aqn__unit": "kl", "aqn__solver__prompts": 2, "aqn__solver__draws": 1}


@pytest.mark.parametrize("changes", [{}, {"eval__questions": 0} | SEARCH], ids=["evaluation", "search for sigma"])
def test_an_incomplete_rollout_is_a_failure_outside_a_step_too(new_runs, changes: dict) -> None:
    runs = new_runs(steps=1, **changes)
    said = r"the engine gave \d completions for \d prompts; asked: 1 for each of \d\. 0 of 1 steps are saved\. Type"
    with pytest.raises(EngineFailed, match=said):
        runs.run("group@1")


def test_a_checkpoint_that_is_there_is_not_written_again(new_runs, whole, monkeypatch) -> None:
    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda folder, state, *rest: saved.append(state["step"]) or save(
        folder, state, *rest
    ))  # fmt: skip
    with pytest.raises(EngineFailed, match="1 of 3 steps are saved"):
        new_runs(checkpoint__every=1).run(f"die@{first_call(whole, 2)}")
    assert saved == [1]


def test_behind_a_damaged_checkpoint_the_finished_steps_are_saved_too(new_runs, whole) -> None:
    """The run continues from step 1 and trains step 2 again. The message does not count the damaged step 2."""
    runs, step_2, step_3 = new_runs(checkpoint__every=1), first_call(whole, 2), first_call(whole, 3)
    with pytest.raises(EngineFailed, match="2 of 3 steps are saved"):
        runs.run(f"die@{step_3}")
    (runs.directory.checkpoints / "step-000002" / "optimizer.pt").unlink()
    with pytest.raises(EngineFailed, match="1 of 3 steps are saved"):
        runs.run("die@1")
    with pytest.raises(EngineFailed, match="2 of 3 steps are saved"):
        runs.run(f"die@{1 + step_3 - step_2}")
    assert checkpoint.newest(runs.directory.checkpoints).step == 2
    assert runs.run() == OK
    assert lines_of(runs.directory.path) == lines_of(whole.directory.path)
    assert files_of(runs.directory.path) == files_of(whole.directory.path)


def test_an_engine_that_does_not_close_hides_no_error(new_runs, whole, capfd) -> None:
    with pytest.raises(EngineFailed, match="the worker died"):
        new_runs().run("die@2,close@1")
    assert "warning: the engine could not be closed (RuntimeError: the door is stuck)." in capfd.readouterr().err


def test_a_diverged_run_saves_nothing(new_runs, whole) -> None:
    runs = new_runs()
    with pytest.raises(Diverged):
        runs.run(f"nan@{first_call(whole, 2)}")
    assert not checkpoint.newest(runs.directory.checkpoints)


def test_an_engine_that_a_signal_kills_first_is_no_failure(new_runs) -> None:
    runs = new_runs(algorithm__dynamic_sampling=False, eval__questions=0)
    assert runs.run("timeout@2", StopWhen(holds=lambda: runs.plan.calls["generate"] == 2)) == INTERRUPTED
    assert [path.name for path in runs.directory.checkpoints.glob("*")] == ["step-000001"]
