"""Engines that fail in whole runs: once, and the record is that of a run whose engine never did; twice, and it resumes.

The runs drop out and refill, so that random numbers and the place in the data matter.
"""

import math

import pytest

from failing_engines import Runs
from qerl_lab.record import checkpoint
from qerl_lab.rollout.engine import EngineFailed
from qerl_lab.system.exits import INTERRUPTED, OK
from qerl_lab.train.step import sampling
from qerl_lab.train.stop import Diverged, Stop
from repeated import RESTARTS, files_of, lines_of

SETTINGS = {
    "steps": 3, "checkpoint__every": 0, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 24,
    "optim__learning_rate": 0.02, "lora__dropout": 0.2, "eval__questions": 4, "eval__samples": 1,
    "aqn__schedule": "linear", "aqn__reading": "equation", "aqn__sigma_start": 0.3, "aqn__sigma_end": 0.1,
    "aqn__stages": 2, "algorithm__dynamic_sampling": True, "algorithm__max_resamples": 2, "seed": 1,
}  # fmt: skip


def restarts(runs: Runs) -> list[float]:
    return [line["metrics"][RESTARTS] for line in runs.directory.metrics() if RESTARTS in line["metrics"]]


@pytest.fixture(scope="module")
def whole(new_runs) -> Runs:
    """A finished run whose engine never failed."""
    runs = new_runs()
    assert runs.run() == OK
    assert restarts(runs) == [0, 0, 0]
    assert runs.plan.calls["build"] == runs.plan.calls["close"] == 1
    assert runs.plan.calls["generate"] > 5, "nothing was refilled"
    return runs


def first_call(whole: Runs, step: int) -> int:
    """Which call of `generate` samples first in a step; the evaluation before is 1."""
    seeds = [how.seed for _, how in whole.plan.asked]
    return 1 + seeds.index(sampling(whole.cfg, step, 0, 0).seed)


def check_same(runs: Runs, whole: Runs) -> None:
    one, other = runs.directory.path, whole.directory.path
    assert lines_of(one, [RESTARTS]) == lines_of(other, [RESTARTS])
    assert files_of(one) == files_of(other)
    assert runs.directory.status == "done"


# --- once


def test_a_step_is_sampled_again_from_a_new_engine(new_runs, whole, capfd) -> None:
    """Of an evaluation and of each step the first try fails, in a way of its own."""
    causes = {
        "timeout": "no answer in 0.2 s", "die": "the worker died",
        "group": "the engine gave completions for 1 of 2 prompts",
        "logprobs": "the engine gave 0 log-probs for a completion of ",
    }  # fmt: skip
    runs, calls = new_runs(), [1, *(first_call(whole, step) + step for step in (1, 2, 3))]  # each failed once before
    assert runs.run(",".join(f"{kind}@{call}" for kind, call in zip(causes, calls, strict=True))) == OK
    check_same(runs, whole)
    assert restarts(runs) == [1, 1, 1]
    assert runs.plan.calls["build"] == runs.plan.calls["close"] == 5
    assert all(runs.plan.asked[call - 1] == runs.plan.asked[call] for call in calls)
    said = [line for line in capfd.readouterr().err.splitlines() if "warning: the engine" in line]
    assert len(said) == 4
    for line, cause in zip(said, causes.values(), strict=True):
        assert line.startswith(f"warning: the engine failed ({cause}")


def test_a_refill_a_sync_and_an_engine_that_does_not_close_end_no_run(new_runs, whole, capfd) -> None:
    """A failure in each step: of its sync, of its refill, of its first try. Sync 1 is that of the evaluation."""
    runs, refill = new_runs(), first_call(whole, 2) + 1
    assert refill < first_call(whole, 3), "step 2 refills nothing"
    again = 2  # step 2 is asked from its start again
    assert runs.run(f"sync@2,die@{refill},close@1,die@{first_call(whole, 3) + again}") == OK
    check_same(runs, whole)
    assert restarts(runs) == [1, 1, 1]
    said = capfd.readouterr().err
    assert "warning: the engine failed (the adapter did not arrive). Building it again" in said
    assert "warning: the engine could not be closed (RuntimeError: the door is stuck)." in said


def test_the_seconds_of_a_rollout_are_those_of_both_tries(new_runs) -> None:
    runs = new_runs(steps=1, eval__questions=0, algorithm__dynamic_sampling=False, rollout__max_completion_tokens=1)
    assert runs.run("timeout@1") == OK
    (line,) = runs.directory.metrics()
    assert line["metrics"]["seconds/rollout"] > 0.2
    assert line["metrics"]["seconds/train"] > 0


# --- twice


@pytest.mark.parametrize(
    ("words", "cause"),
    [  # {0} is the first try of step 2, its refill is {1}, or {2} after a first try that failed
        ("die@{1},die@{2}", "the worker died (of an engine that was built because of this: the worker died)"),
        ("sync@3,die@{0}", "died (of an engine that was built because of this: the adapter did not arrive)"),
        ("die@{0},build@2", "died (and no engine could be built again: RuntimeError: no memory is left)"),
    ],
)
def test_a_second_failure_saves_the_state_before_the_step(new_runs, whole, words: str, cause: str) -> None:
    runs, call = new_runs(), first_call(whole, 2)
    if "{2}" in words:
        assert first_call(whole, 3) - call > 1, "step 2 refills nothing"
    with pytest.raises(EngineFailed) as raised:
        runs.run(words.format(call, call + 1, call + 2))
    assert cause in str(raised.value)
    remedy = f"1 of 3 steps are saved. Type python -m qerl_lab resume={runs.cfg.run_dir} to go on."
    assert str(raised.value).endswith(remedy)
    saved = checkpoint.newest(runs.directory.checkpoints)
    drawn = whole.directory.metrics()[1]["metrics"]["rollout/prompts_drawn"]
    assert (saved.step, saved.prompts_seen) == (1, drawn)
    assert runs.run() == OK
    check_same(runs, whole)


@pytest.mark.parametrize(("step", "saved"), [("before", 0), (1, 0), ("after", 3)])
def test_where_no_step_is_to_be_saved_none_is(new_runs, whole, step: str | int, saved: int) -> None:
    call = {"before": 1, 1: 2, "after": len(whole.plan.asked)}[step]
    runs = new_runs()
    with pytest.raises(EngineFailed, match=rf"{saved} of 3 steps are saved\. Type"):
        runs.run(f"die@{call},die@{call + 1}")
    assert [path.name for path in runs.directory.checkpoints.glob("*")] == [f"step-{saved:06d}"] * bool(saved)
    assert runs.run() == OK
    check_same(runs, whole)


def test_a_checkpoint_that_is_there_is_not_written_again(new_runs, whole, monkeypatch) -> None:
    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda folder, state, *rest: saved.append(state["step"]) or save(
        folder, state, *rest
    ))  # fmt: skip
    runs, call = new_runs(checkpoint__every=1), first_call(whole, 2)
    with pytest.raises(EngineFailed, match="1 of 3 steps are saved"):
        runs.run(f"die@{call},die@{call + 1}")
    assert saved == [1]


# --- what is none of its failures


@pytest.mark.parametrize(("kind", "error"), [("bug", ValueError), ("nan", Diverged)])
def test_what_would_only_happen_again_is_not_tried_again(new_runs, whole, kind: str, error: type[Exception]) -> None:
    runs = new_runs()
    with pytest.raises(error):
        runs.run(f"{kind}@{first_call(whole, 2)}")
    assert runs.plan.calls["build"] == 1
    assert not checkpoint.newest(runs.directory.checkpoints)


@pytest.mark.parametrize(
    ("questions", "call", "saved"),
    [(4, 1, []), (4, 2, []), (0, 2, ["step-000001"])],
    ids=["before", "step 1", "step 2"],
)
def test_who_is_asked_to_stop_builds_no_engine_again(new_runs, questions: int, call: int, saved: list[str]) -> None:
    """A signal may reach the engine too, and end it first."""
    runs = new_runs(algorithm__dynamic_sampling=False, eval__questions=questions)

    class Signalled(Stop):
        @property
        def requested(self) -> bool:
            return runs.plan.calls["generate"] == call

    assert runs.run(f"timeout@{call}", Signalled()) == INTERRUPTED
    assert runs.plan.calls["build"] == 1
    assert [path.name for path in runs.directory.checkpoints.glob("*")] == saved


def test_no_engine_is_sent_a_prompt_that_is_too_long(new_runs, whole, capfd) -> None:
    lengths = sorted(len(ids) for prompts, _ in whole.plan.asked for ids in prompts)
    limit = lengths[len(lengths) // 2]
    assert lengths[-1] > limit
    runs = new_runs(rollout__max_prompt_tokens=limit)
    assert runs.run() == OK
    sent = [[len(ids) for ids in prompts] for prompts, _ in runs.plan.asked]
    assert math.prod(length <= limit for prompts in sent for length in prompts)
    assert len(sent[0]) == len(sent[-1]) == 4, "others are asked in their place"
    result, said = runs.directory.result(), capfd.readouterr().out
    for count, which in (
        (result["training_questions_left_out"], "more questions"),
        (result["heldout_questions_left_out"], "held-out questions"),
    ):
        assert count > 0
        assert f"note: {count:,} {which} are longer than rollout.max_prompt_tokens={limit}, and left out" in said
