"""What claims can measure on the runs of an arm (`MEASURES`): a number per seed, or one per seed and question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pandas as pd

from qerl_lab.report.runs import Arm, Run, first_tenth, last_tenth

Values: TypeAlias = pd.DataFrame  # a row per seed, a column per question or a single column
MeasureFunction = Callable[[Sequence[Run], Sequence[Run]], Values]  # (runs, runs of the control arm) -> values
SHARED = "runs ran beside others and slowed each other"
FALLEN = 0.5  # a run has collapsed below this share of its best tenth's right answers
LEAST_RISE = 0.05  # smallest rise in the share of right answers; half of a smaller one is within the noise of a step


class Unmeasured(ValueError):
    """Raised if the runs lack a measure; the text says why."""


@dataclass(frozen=True)
class Measure:
    """One measure: `of(runs, controls)` returns its values, in `unit`; `meaning` says in words what is measured.

    Two arms are compared by the difference of their means over seeds, or with `is_ratio` by the ratio of their
    geometric means. With `is_change` a value is itself a difference of two fractions, from -1 to 1, and is written with
    its sign. Values above `most(run)` are right-censored: the true value is at least as large.
    """

    unit: str
    meaning: str
    of: MeasureFunction
    is_ratio: bool = False
    is_change: bool = False
    most: Callable[[Run], float] | None = None


def _accuracies(runs: Sequence[Run], phase: str) -> Values:
    """Return held-out accuracy [seeds, questions]; `phase` is "before" or "after".

    Raises Unmeasured if a run was not evaluated.
    """
    if not all(run.accuracy for run in runs):
        raise Unmeasured("runs without held-out evaluation (eval.questions=0)")
    return pd.DataFrame({run.seed: run.accuracy[phase] for run in runs}).T


def count_right(runs: Sequence[Run]) -> tuple[pd.DataFrame, int]:
    """Return the number of right answers of an arm after training [seeds, questions], and the samples per question.

    Raises Unmeasured without evaluation, for one sample a question, and for answers that are partly right.
    """
    samples = int(runs[0].settings["eval.samples"])
    if samples < 2:
        raise Unmeasured("one sample a question has no pass@k (type eval.samples=2 or more)")
    right = _accuracies(runs, "after") * samples
    if (right - right.round()).abs().max(axis=None) > 0.01:
        raise Unmeasured("answers that are partly right: a question's mean does not tell whether one sample was right")
    return right.round(), samples


def any_shared_machine(*sides: Sequence[Run]) -> bool:
    """Tell whether any run shared its machine with another run, so that seconds and tokens/s cannot be compared."""
    return any(run.at_once > 1 for runs in sides for run in runs)


def _per_run(number: Callable[[Run], float], is_speed: bool = False) -> MeasureFunction:
    """Turn `number`, a function of one run, into a function of all runs that returns a single column, a row per seed.

    The new function raises Unmeasured if a number is missing or not finite, and with `is_speed` if a run shared its
    machine.
    """

    def measure_runs(runs: Sequence[Run], controls: Sequence[Run]) -> Values:
        if is_speed and any_shared_machine(runs, controls):
            raise Unmeasured(f"{SHARED} (start them one after another; in a sweep type jobs=1 jobs_per_gpu=1)")
        try:
            values = pd.DataFrame({"run": {run.seed: float(number(run)) for run in runs}})
        except KeyError as error:  # of an older run, or not in `runs.KEPT`
            raise Unmeasured(f"reports have no {error} of a run") from None
        if not np.isfinite(values.to_numpy()).all():
            raise Unmeasured("a run's record has no such number, or one that is not finite")
        return values

    return measure_runs


def answer_shares(run: Run) -> pd.Series:
    """Return the share of right answers among a step's completions, by training step.

    Raises Unmeasured if the task's reward for a right answer is 0.
    """
    weight = float(run.settings["task.answer_reward"])
    if weight == 0:
        raise Unmeasured("runs that earn nothing for answers (task.answer_reward=0)")
    return run.steps.loc[1:, "reward/answer"].astype("float64") / weight


def _trailing_means(shares: pd.Series) -> pd.Series:
    """Return for each step the mean over the tenth of all steps that ends there; nan before the first full window."""
    return shares.rolling(max(1, len(shares) // 10)).mean()


def has_collapsed(run: Run) -> bool:
    """Tell whether a run's share of right answers has collapsed by the end.

    This means that the mean share over the last tenth of the steps is below `FALLEN` times the highest mean over a
    tenth of the steps in a row. Raises Unmeasured if the task's reward for a right answer is 0.
    """
    shares = answer_shares(run)
    return bool(last_tenth(shares).mean() < FALLEN * _trailing_means(shares).max())


def _half_rise_steps(runs: Sequence[Run], controls: Sequence[Run]) -> Values:
    """Return, by seed, the first step at which right answers reach the middle of the control's rise, else steps + 1.

    Right answers are averaged over a trailing tenth of the steps. The control's rise goes from the mean over the first
    tenth of its steps to the mean over the last tenth. If there are several control arms, such as learning rates, the
    arm with most right answers gives the rise. Raises Unmeasured if the rise is below `LEAST_RISE`.
    """
    by_arm: dict[Arm, list[pd.Series]] = {}
    for run in controls:
        by_arm.setdefault(run.arm, []).append(answer_shares(run))
    curves = max(by_arm.values(), key=lambda curves: np.mean([curve.mean() for curve in curves]))
    first, last = (float(np.mean([part(curve).mean() for curve in curves])) for part in (first_tenth, last_tenth))
    if last - first < LEAST_RISE:
        raise Unmeasured(f"the control's right answers went from {first:.3f} to {last:.3f}: no rise to be half of")

    def steps_to_half(run: Run) -> float:
        """Return the first step at which a run reaches the middle of the rise; steps + 1 if none does."""
        trailing = _trailing_means(answer_shares(run))
        reached = trailing.index[trailing >= (first + last) / 2]
        return float(reached[0] if len(reached) else trailing.index.max() + 1)

    return _per_run(steps_to_half)(runs, controls)


MEASURES: dict[str, Measure] = {
    "entropy_first": Measure(
        "nats", "policy entropy, mean over the first tenth of the steps",
        _per_run(lambda run: run.summary["entropy_first"]),
    ),
    "answers_mean": Measure(
        "fraction", "right answers among a step's completions, mean over all steps (the area under the curve)",
        _per_run(lambda run: answer_shares(run).mean()),
    ),
    "answers_last": Measure(
        "fraction", "right answers among a step's completions, mean over the last tenth of the steps",
        _per_run(lambda run: last_tenth(answer_shares(run)).mean()),
    ),
    "answers_gain": Measure(
        "fraction", "right answers among a step's completions, last tenth of the steps less the run's own first tenth",
        _per_run(lambda run: last_tenth(answer_shares(run)).mean() - first_tenth(answer_shares(run)).mean()),
        is_change=True,
    ),
    "steps_to_half": Measure(
        "steps", "steps until right answers, averaged over a tenth of the steps, have made half of the rise that the "
        "control makes; of a run that never gets there only known to be more than it had", _half_rise_steps,
        is_ratio=True, most=lambda run: float(len(answer_shares(run))),
    ),
    "rollout_throughput": Measure(
        "tokens/s", "completion tokens / seconds of rollouts",
        _per_run(lambda run: run.summary["rollout_tokens_per_second"], is_speed=True), is_ratio=True,
    ),
    "step_throughput": Measure(
        "tokens/s", "completion tokens / seconds of whole steps",
        _per_run(lambda run: run.summary["tokens_per_second"], is_speed=True), is_ratio=True,
    ),
    "accuracy_before": Measure(
        "fraction", "held-out accuracy before training", lambda runs, _: _accuracies(runs, "before")
    ),
    "accuracy_after": Measure(
        "fraction", "held-out accuracy after training", lambda runs, _: _accuracies(runs, "after")
    ),
    "pass_after": Measure(
        "fraction", "held-out questions with a right answer in eval.samples, at the end",
        lambda runs, _: count_right(runs)[0].clip(upper=1),
    ),
}  # fmt: skip
