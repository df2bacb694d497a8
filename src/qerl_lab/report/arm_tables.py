"""Tables of arms in the layout of the paper's tables: our number, the paper's, and the difference to the baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_lab.report import reference, stats, verdict_tables
from qerl_lab.report.comparison import BASELINE, Comparison, matrix
from qerl_lab.report.diagnostics import retention
from qerl_lab.report.measures import MEASURES, SHARED, Unmeasured, shared_machines
from qerl_lab.report.printed_arms import in_figure_5, table_1_rows
from qerl_lab.report.runs import Record
from qerl_lab.report.speed_tables import printed_rollouts, printed_steps
from qerl_lab.report.table import NONE, Table, format_number, in_words, without_empty_columns
from qerl_lab.report.verdict_tables import cell, seeds_cell

NO_BASELINE = f"Left out: no arm is {BASELINE}; type baseline=ARM to compare with another."
NO_DIFFERENCES = Table("Differences", "", [["arm"]], NO_BASELINE)


@dataclass(frozen=True)
class Measured:
    """A measure of `_difference_table`: `sign` is 1 if more is better, 0 for neither; `ratio` compares logarithms."""

    label: str
    name: str
    sign: int = 0
    ratio: bool = False


DIFFERENCES = (
    Measured("accuracy after", "after", 1),
    Measured("gain in accuracy", "gain", 1),
    Measured("reward, last tenth", "reward_last", 1),
    Measured("entropy, first tenth", "entropy_first"),
    Measured("entropy, last tenth", "entropy_last"),
    Measured("rollouts, tokens/s", "rollout_tokens_per_second", 1, ratio=True),
    Measured("end to end, tokens/s", "tokens_per_second", 1, ratio=True),
)
SPEEDS, PHASES = ("rollout_tokens_per_second", "tokens_per_second"), ("rollout", "train", "sync")
OF_PAPER = ["Figure 1, 7B: rollouts / BF16", "Table 3, 7B: end to end / BF16"]


def tables(comparison: Comparison, baseline: str | None) -> list[Table]:
    """Build every table of arms of a report, beside the paper's numbers; an empty list if no run counts."""
    if not comparison.arms:
        return []
    against = []
    if len(comparison.arms) > 1:
        against = [_difference_table(comparison, baseline) if baseline else NO_DIFFERENCES]
    others = [_entropy_table(comparison, baseline), retention(comparison), _speed_table(comparison, baseline)]
    return [_accuracy_table(comparison), *against, *others]


def _accuracy_table(comparison: Comparison) -> Table:
    head, *rows = verdict_tables.table_1(comparison)
    beside = verdict_tables.IN_TABLE_1 in head
    more = [[seeds_cell(matrix(records, "gain"), (-1, 1)), _pass_cell(records)] for records in comparison.arms.values()]
    rows = [[*row[:4], *cells, *row[4:]] for row, cells in zip(rows, more, strict=True)]
    rows, empty = without_empty_columns([[*head[:4], "gain", "pass@n after", *head[4:]], *rows], 2)
    why = "no held-out questions were evaluated" if "after" in empty else "eval.samples=1, or no question"
    return Table(
        "Held-out accuracy" + ", as in the paper's Table 1" * beside,
        "Cells: mean [95% interval] (seeds). Intervals cover seeds and questions, and are clipped to 0 and 1. "
        + "Paper: one run each, Qwen2.5 at 3B and 7B on GSM8K. " * beside
        + "pass@n: questions with a right answer among n = eval.samples.",
        rows,
        f"Left out: {in_words(empty)}, since {why}." if empty else "",
    )


def _pass_cell(records: Sequence[Record]) -> str:
    """Format pass@n after training, with its interval over seeds; a dash if it was not measured."""
    try:
        return seeds_cell(MEASURES["pass_after"].of(records, records), stats.SHARE)
    except Unmeasured:  # one sample a question, or no evaluation
        return NONE


def _difference_table(comparison: Comparison, baseline: str) -> Table:
    rows = [
        [arm, measure.label, *cells]
        for arm, records in comparison.arms.items() if arm != baseline for measure in DIFFERENCES
        if (cells := _format_comparison_cells(records, comparison.arms[baseline], measure))
    ]  # fmt: skip
    return Table(
        f"Differences to {baseline}",
        "Paired by seed, accuracies also by question: mean [95% interval] (shared seeds). Speeds are ratios, given "
        "only if every run ran alone. Effect size: mean / standard deviation of the seeds' differences (for ratios, of "
        "their logarithms). P(better): share of seed pairs in which the arm is better. Unlike the verdicts, nothing is "
        "corrected for multiple comparisons. Arms may differ in several settings: see the last table.",
        [["arm", "measure", "difference", "effect size", "P(better)"], *rows],
        "" if rows else f"Left out: no arm shares a seed with {baseline}.",
    )


def _seed_values(records: Sequence[Record], name: str) -> pd.DataFrame:
    """Return a measure by seed: accuracies [seeds, questions], or one number of each run's summary [seeds, 1]."""
    if name in ("after", "gain"):
        return matrix(records, name)
    return pd.DataFrame({"run": {record.run.seed: float(record.summary[name]) for record in records}})


def _format_comparison_cells(records: Sequence[Record], control: Sequence[Record], measure: Measured) -> list[str]:
    """Format difference, effect size and P(better) of two arms; none without common values or on shared machines."""
    if measure.ratio and shared_machines(records, control):
        return []
    one, other = (_seed_values(side, measure.name) for side in (records, control))
    if measure.ratio:
        one, other = np.log(one), np.log(other)
    difference = (one - other).dropna(how="all").dropna(axis=1)
    if difference.empty:
        return []
    size = stats.effect_size(difference.mean(axis=1).to_numpy())
    means = [measure.sign * side.loc[difference.index, difference.columns].mean(axis=1) for side in (one, other)]
    better = f"{stats.probability_of_improvement(*means):.2f}" if measure.sign else NONE
    return [_format_difference(difference, measure.ratio), NONE if math.isnan(size) else f"{size:+.2f}", better]


def _format_difference(values: pd.DataFrame, ratio: bool) -> str:
    def format_value(value: float) -> str:
        return f"{math.exp(value):.2f}" if ratio else f"{value:+.3f}"

    seeds, mean = len(values), float(values.to_numpy().mean())
    interval = f" {stats.format_interval(*stats.over_seeds(values.to_numpy())[1:], format_value)}" if seeds > 1 else ""
    return f"{format_value(mean)}{'x' * ratio}{interval} ({seeds})"


def _format_difference_to_baseline(comparison: Comparison, arm: str, baseline: str | None, name: str) -> str:
    """Format the difference between an arm and the baseline in one measure; a dash for the baseline itself."""
    if baseline is None or arm == baseline:
        return NONE
    measure = next(measure for measure in DIFFERENCES if measure.name == name)
    return (_format_comparison_cells(comparison.arms[arm], comparison.arms[baseline], measure) or [NONE])[0]


def _entropy_table(comparison: Comparison, baseline: str | None) -> Table:
    beside = in_figure_5(comparison)
    against = [f"first tenth - {baseline}"] if baseline else []
    rows = [["arm", "first tenth of the steps", "last tenth", *against, *["Figure 5, 7B"] * bool(beside)]]
    for arm, records in comparison.arms.items():
        row = [arm, *(seeds_cell(_seed_values(records, f"entropy_{when}"), stats.NATS) for when in ("first", "last"))]
        row += [_format_difference_to_baseline(comparison, arm, baseline, "entropy_first")] if baseline else []
        rows.append([*row, *([_look_up_paper_entropy(beside.get(arm))] if beside else [])])
    return Table(
        "Entropy of the policy" + ", as in the paper's Figure 5" * bool(beside),
        "Nats per token at rollout.temperature, without noise in the trainer."
        + " Paper: mean of its curve over steps 0 to 8, read from the figure (+-0.004)." * bool(beside),
        rows,
    )


def _look_up_paper_entropy(weight_format: str | None) -> str:
    """Return the mean entropy of a weight format in the paper's Figure 5, as a cell; a dash for None."""
    if weight_format is None:
        return NONE
    return f"{reference.value(table='Figure 5', weight_format=weight_format, setting=reference.EIGHT_STEPS):.3f}"


def _speed_table(comparison: Comparison, baseline: str | None) -> Table:
    beside = table_1_rows(comparison)
    rows = [["arm", "rollouts, tokens/s", "end to end, tokens/s", f"rollouts / {baseline}", f"end to end / {baseline}",
             *OF_PAPER, "rollout, train, sync", "peak GiB", "seconds a run"]]  # fmt: skip
    for arm, records in comparison.arms.items():
        ratios = [_format_difference_to_baseline(comparison, arm, baseline, name) for name in SPEEDS]
        printed = [NONE, NONE] if ratios == [NONE, NONE] else _look_up_paper_speeds(beside.get(arm))
        peaks = [record.summary.get("memory_gpu_peak_gib", record.summary["memory_rss_gib"]) for record in records]
        speeds, shares, seconds = [NONE, NONE], NONE, NONE
        if not shared_machines(records):
            speeds = [_format_speed(_seed_values(records, name)) for name in SPEEDS]
            shares = ", ".join(f"{_seed_values(records, f'share_{name}')['run'].mean():.0%}" for name in PHASES)
            seconds = format_number(_seed_values(records, "seconds")["run"].mean())
        rows.append([arm, *speeds, *ratios, *printed, shares, f"{max(peaks):.2f}", seconds])
    rows, empty = without_empty_columns(rows)
    shared = [arm for arm, records in comparison.arms.items() if shared_machines(records)]
    which = "every arm" if len(shared) == len(comparison.arms) else in_words(shared)
    return Table(
        "Throughput and memory" + ", as in the paper's Figure 1 and Table 3" * (OF_PAPER[0] not in empty),
        "Completion tokens per second, geometric mean over seeds. Memory: largest peak of any seed, on the GPU if "
        "there is one, else resident."
        + " Paper: one H100, batch 8 (Figure 1); batch 2, 4, 8 (Table 3)."
        * (OF_PAPER[0] not in empty),
        rows,
        f"Left out: seconds and tokens/s of {which}, since {SHARED}." if shared else "",
    )


def _format_speed(values: pd.DataFrame) -> str:
    """Format the mean of speeds and its interval, from their logarithms, so that the interval stays above 0."""
    if len(values) < 2:
        return seeds_cell(values)
    mean, low, high = np.exp(stats.over_seeds(np.log(values.to_numpy())))
    return cell((mean, low, high), len(values))


def _look_up_paper_speeds(row: tuple[str, str] | None) -> list[str]:
    """Return the paper's speeds of rollouts and steps over BF16 for a row of its Table 1; dashes if not timed."""
    weight_format = row[1].lower() if row else ""
    of_arm = f"model == 'qwen2.5-7b' and format == '{weight_format}'"
    rollouts = printed_rollouts().query(f"{of_arm} and batch == 8")["of_bf16"].map("{:.2f}x".format)
    steps = printed_steps().query(of_arm)["table_3"].dropna()
    return [", ".join(cells) or NONE for cells in (rollouts, steps)]
