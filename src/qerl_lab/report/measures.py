"""The measures of a run: one number per seed, or one per seed and question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pandas as pd

from qerl_lab.report.arms import Arm
from qerl_lab.report.runs import Record

Values: TypeAlias = pd.DataFrame  # a row per seed, a column per question or a single column
MeasureFunction = Callable[[Sequence[Record], Sequence[Record]], Values]  # from records and their controls


class Unmeasured(ValueError):
    """Raised if the records lack a measure; the text says why."""


@dataclass(frozen=True)
class Measure:
    """One measure.

    A `ratio` is compared by the ratio of geometric means over seeds, other measures by the difference of means.

    `most(record)` is the largest value that a run can show; values above it are right-censored: the true value is at
    least as large.
    """

    unit: str
    meaning: str
    of: MeasureFunction
    ratio: bool = False
    most: Callable[[Record], float] | None = None


def _accuracy_measure(phase: str) -> MeasureFunction:
    """Make a measure of held-out accuracy before or after training (`phase`), by seed and question."""

    def measure_accuracy(records: Sequence[Record], controls: Sequence[Record]) -> Values:
        if not all(record.accuracy for record in records):
            raise Unmeasured("runs without held-out evaluation (eval.questions=0)")
        return pd.DataFrame({record.run.seed: record.accuracy[phase] for record in records}).T

    return measure_accuracy


def count_right(records: Sequence[Record]) -> tuple[pd.DataFrame, pd.Series]:
    """Return the number of right answers after training [seeds, questions], and the samples per question by seed.

    Derived from each question's mean over samples. Raises Unmeasured for a single sample a question, and for tasks that
    grade answers as partly right, where a mean above 0 does not prove a right answer.
    """
    samples = pd.Series({record.run.seed: _numeric_setting(record, "eval.samples") for record in records})
    if (samples < 2).any():
        raise Unmeasured("one sample a question has no pass@k (type eval.samples=2 or more)")
    right = _accuracy_measure("after")(records, []).mul(samples, axis=0)
    if (right - right.round()).abs().max(axis=None) > 0.01:
        raise Unmeasured("answers that are partly right: a question's mean does not tell whether one sample was right")
    return right.round(), samples


def _any_right(records: Sequence[Record], controls: Sequence[Record]) -> Values:
    """Return 1 for each question with a right answer among its k samples (pass@k), else 0."""
    right, _ = count_right(records)
    return (right > 0).astype(float).where(right.notna())


def _numeric_setting(record: Record, key: str) -> float:
    """Return a setting of a run as a number. Raises Unmeasured if the run's version of the lab lacks the key."""
    if key not in record.run.settings:
        raise Unmeasured(f"runs of another version of the lab, without {key}")
    return float(record.run.value(key))


def _run_measure(number: Callable[[Record], float]) -> MeasureFunction:
    """Make a measure of one number per run, which the function `number` returns."""

    def measure_runs(records: Sequence[Record], controls: Sequence[Record]) -> Values:
        values = pd.DataFrame({"run": {record.run.seed: float(number(record)) for record in records}})
        if not np.isfinite(values.to_numpy()).all():
            raise Unmeasured("a run's record has no such number, or one that is not finite")
        return values

    return measure_runs


def shared_machines(*sides: Sequence[Record]) -> bool:
    """Tell whether any run overlapped with others, so that its seconds cannot be compared."""
    return any(record.at_once > 1 for records in sides for record in records)


SHARED = "runs ran beside others, whose seconds are theirs too"


def _speed_measure(name: str) -> MeasureFunction:
    """Make a measure of the speed `summary[name]`; it raises Unmeasured for runs that shared a machine."""

    def measure_speed(records: Sequence[Record], controls: Sequence[Record]) -> Values:
        if shared_machines(records, controls):
            raise Unmeasured(f"{SHARED} (start them one after another; in a sweep type jobs=1 jobs_per_gpu=1)")
        return _run_measure(lambda record: record.summary[name])(records, controls)

    return measure_speed


def answer_shares(record: Record) -> pd.Series:
    """Return the share of right answers at each training step (index 1 to steps): `reward/answer` over its weight."""
    weight = _numeric_setting(record, "task.answer_reward")
    if weight == 0:
        raise Unmeasured("runs that earn nothing for answers (task.answer_reward=0)")
    return record.steps.loc[1:, "reward/answer"].astype("float64") / weight


def _length_of_tenth(shares: pd.Series) -> int:
    return max(1, len(shares) // 10)


def _first_tenth_mean(shares: pd.Series) -> float:
    return float(shares.head(_length_of_tenth(shares)).mean())


def _last_tenth_mean(shares: pd.Series) -> float:
    return float(shares.tail(_length_of_tenth(shares)).mean())


FALLEN = 0.5  # a run has collapsed below this share of its best tenth's right answers


def has_collapsed(record: Record) -> bool:
    """Tell whether right answers in the last tenth of the steps are below `FALLEN` of the run's best tenth.

    Raises Unmeasured if the task does not reward answers.
    """
    shares = answer_shares(record)
    return bool(_last_tenth_mean(shares) < FALLEN * shares.rolling(_length_of_tenth(shares)).mean().max())


LEAST_RISE = 0.05  # in the share of right answers; half of anything smaller is within the noise of a step


def _half_rise_steps(records: Sequence[Record], controls: Sequence[Record]) -> Values:
    """Return the first step at which right answers (trailing mean) reach half of the control's rise, else steps + 1.

    The trailing mean is over a tenth of the steps. Only full windows count, since one lucky batch would end a shorter
    one. The rise is from the first to the last tenth, averaged over all control runs; for a control at several learning
    rates, over those at the best one by right answers. Raises Unmeasured if the control does not rise.
    """
    by_arm: dict[Arm, list[pd.Series]] = {}
    for record in controls:
        by_arm.setdefault(record.run.arm, []).append(answer_shares(record))
    curves = max(by_arm.values(), key=lambda curves: np.mean([curve.mean() for curve in curves]))
    first, last = (float(np.mean([part(curve) for curve in curves])) for part in (_first_tenth_mean, _last_tenth_mean))
    if last - first < LEAST_RISE:
        raise Unmeasured(f"the control's right answers went from {first:.3f} to {last:.3f}: no rise to be half of")

    def steps_to_half(record: Record) -> float:
        shares = answer_shares(record)
        trailing = shares.rolling(_length_of_tenth(shares)).mean()
        reached = trailing.index[trailing >= (first + last) / 2]
        return float(reached[0] if len(reached) else trailing.index.max() + 1)

    return _run_measure(steps_to_half)(records, controls)


MEASURES: dict[str, Measure] = {
    "entropy_first": Measure(
        "nats", "policy entropy, mean over the first tenth of the steps, in which AQN adds no noise",
        _run_measure(lambda record: record.summary["entropy_first"]),
    ),
    "answers_mean": Measure(
        "fraction", "right answers among a step's completions, mean over all steps (the area under the curve)",
        _run_measure(lambda record: answer_shares(record).mean()),
    ),
    "answers_last": Measure(
        "fraction", "right answers among a step's completions, mean over the last tenth of the steps",
        _run_measure(lambda record: _last_tenth_mean(answer_shares(record))),
    ),
    "answers_gain": Measure(
        "fraction", "right answers among a step's completions, last tenth of the steps less the run's own first tenth",
        _run_measure(lambda record: _last_tenth_mean(answer_shares(record)) - _first_tenth_mean(answer_shares(record))),
    ),
    "steps_to_half": Measure(
        "steps", "steps until right answers, averaged over a tenth of the steps, have made half of the rise that the "
        "control makes; of a run that never gets there only known to be more than it had", _half_rise_steps, ratio=True,
        most=lambda record: float(len(answer_shares(record))),
    ),
    "rollout_throughput": Measure(
        "tokens/s", "completion tokens / seconds of rollouts", _speed_measure("rollout_tokens_per_second"), ratio=True
    ),
    "step_throughput": Measure(
        "tokens/s", "completion tokens / seconds of whole steps", _speed_measure("tokens_per_second"), ratio=True
    ),
    "accuracy_before": Measure("fraction", "held-out accuracy before training", _accuracy_measure("before")),
    "accuracy_after": Measure("fraction", "held-out accuracy after training", _accuracy_measure("after")),
    "pass_after": Measure("fraction", "held-out questions with a right answer in eval.samples, at the end", _any_right),
}  # fmt: skip
