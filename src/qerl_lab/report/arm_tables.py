"""Tables of arms in the layout of the paper's tables: our number, the paper's, and the difference to the baseline."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_lab.report import reference, stats, verdict_tables
from qerl_lab.report.comparison import BASELINE, Comparison, matrix
from qerl_lab.report.diagnostics import retention
from qerl_lab.report.measures import MEASURES, SHARED, Unmeasured, shared_machines
from qerl_lab.report.printed_arms import growth, in_figure_5, table_1_rows
from qerl_lab.report.runs import Record
from qerl_lab.report.table import NONE, Rows, Table, in_words, number, without_empty_columns
from qerl_lab.report.verdict_tables import cell, seeds_cell

SEVEN = "Qwen2.5-7B-Instruct"


def tables(comparison: Comparison, baseline: str | None) -> list[Table]:
    """Build every table of a report; an empty list if no run counts."""
    if not comparison.arms:
        return []
    against = []
    if len(comparison.arms) > 1:
        against = [_differences(comparison, baseline) if baseline else Table("Differences", "", [["arm"]], NO_BASELINE)]
    entropies, speeds = _entropies(comparison, baseline), _throughput(comparison, baseline)
    grown = growth(comparison, lambda differences: _difference(differences, ratio=False))
    return [_accuracies(comparison), *against, *grown, entropies, retention(comparison), speeds]


def _accuracies(comparison: Comparison) -> Table:
    head, *rows = verdict_tables.table_1(comparison)
    beside = verdict_tables.IN_TABLE_1 in head
    arms = list(comparison.arms.values())
    more = [
        ["gain", "pass@n after"],
        *([seeds_cell(matrix(records, "gain"), (-1, 1)), _pass_cell(records)] for records in arms),
    ]
    rows, empty = without_empty_columns(
        [[*row[:4], *cells, *row[4:]] for row, cells in zip([head, *rows], more, strict=True)], 2
    )
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
    try:
        return seeds_cell(MEASURES["pass_after"].of(records, records), stats.SHARE)
    except Unmeasured:  # one sample a question, or no evaluation
        return NONE


@dataclass(frozen=True)
class _Measure:
    """A column of differences: `sign` is 1 or -1 for the better direction, 0 for none; `ratio` compares logarithms."""

    label: str
    name: str
    sign: int = 0
    ratio: bool = False


NO_BASELINE = f"Left out: no arm is {BASELINE}; type baseline=ARM to compare with another."
DIFFERENCES = (
    _Measure("reward, last tenth", "reward_last", 1),
    _Measure("entropy, first tenth", "entropy_first"),
    _Measure("entropy, last tenth", "entropy_last"),
    _Measure("rollouts, tokens/s", "rollout_tokens_per_second", 1, True),
    _Measure("end to end, tokens/s", "tokens_per_second", 1, True),
)


def _differences(comparison: Comparison, baseline: str) -> Table:
    rows, gaps = Rows(), list[Gap]()
    for arm, records in comparison.arms.items():
        if arm != baseline:
            for measure, cells, why in _against_control(records, comparison.arms[baseline]):
                rows += [[arm, measure, *cells]] if cells else []
                gaps += [] if cells else [(arm, measure, why)]
    return Table(
        f"Differences to {baseline}",
        "Paired by seed, accuracies also by question: mean [95% interval] (shared seeds). Speeds are ratios, given "
        "only if every run ran alone. Effect size: mean / standard deviation of the seeds' differences (for ratios, of "
        "their logarithms). P(better): share of seed pairs in which the arm is better. Unlike the verdicts, nothing is "
        "corrected for multiple comparisons. Arms may differ in several settings: see the last table.",
        [["arm", "measure", "difference", "effect size", "P(better)"], *rows],
        _left_out(gaps, len(comparison.arms) - 1),
    )


Gap = tuple[str, str, str]  # arm, measure, and why there is no difference


def _against_control(records: Sequence[Record], control: Sequence[Record]) -> Iterator[tuple[str, list[str], str]]:
    """Yield each measure with its cells, or with no cells and the reason."""
    if not _share_a_seed(records, control):
        yield "every measure", [], "the two share no seed"
        return
    for phase, label in (("after", "accuracy after"), ("gain", "gain in accuracy")):
        cells = _difference_cells(matrix(records, phase), matrix(control, phase), 1, False)
        yield label, cells, "no shared held-out question"
    for one in DIFFERENCES:
        if one.ratio and shared_machines(records, control):
            yield one.label, [], SHARED
        else:
            sides = [_values(side, one.name) for side in (records, control)]
            yield one.label, _difference_cells(sides[0], sides[1], one.sign, one.ratio), "no shared value"


def _left_out(gaps: Sequence[Gap], others: int) -> str:
    """Say which measures have no difference and why, grouping arms and measures that share a reason."""
    arms_of: dict[tuple[str, str], list[str]] = {}
    for arm, measure, why in gaps:
        arms_of.setdefault((measure, why), []).append(arm)
    measures_of: dict[tuple[str, str], list[str]] = {}
    for (measure, why), arms in arms_of.items():
        measures_of.setdefault(("every arm" if len(arms) == others else in_words(arms), why), []).append(measure)
    parts = [f"{in_words(measures)} of {arms}, since {why}" for (arms, why), measures in measures_of.items()]
    return f"Left out: {'. '.join(parts)}." if parts else ""


def _values(records: Sequence[Record], name: str) -> pd.DataFrame:
    """Return one number of the summary as a column [seeds, 1]."""
    return pd.DataFrame({"run": {record.run.seed: float(record.summary[name]) for record in records}})


def _difference_cells(treated: pd.DataFrame, control: pd.DataFrame, sign: int, ratio: bool) -> list[str]:
    """Return difference, effect size and P(better) of values [seeds, questions] as cells; none if nothing is shared."""
    one, other = (np.log(values) if ratio else values for values in (treated, control))
    difference = (one - other).dropna(how="all").dropna(axis=1)
    if difference.empty:
        return []
    size = stats.effect_size(difference.mean(axis=1).to_numpy())
    means = [sign * side.loc[difference.index, difference.columns].mean(axis=1) for side in (one, other)]
    better = f"{stats.probability_of_improvement(*means):.2f}" if sign else NONE
    return [_difference(difference, ratio), NONE if math.isnan(size) else f"{size:+.2f}", better]


def _cell_or_dash(paired: Sequence[str]) -> str:
    return paired[0] if paired else NONE


def _difference(values: pd.DataFrame, ratio: bool) -> str:
    def shown(value: float) -> str:
        return f"{math.exp(value):.2f}" if ratio else f"{value:+.3f}"

    seeds, mean = len(values), float(values.to_numpy().mean())
    interval = f" {stats.format_interval(*stats.over_seeds(values.to_numpy())[1:], shown)}" if seeds > 1 else ""
    return f"{shown(mean)}{'x' * ratio}{interval} ({seeds})"


def _entropies(comparison: Comparison, baseline: str | None) -> Table:
    beside = in_figure_5(comparison)
    theirs = ["Figure 5, 7B"] if beside else []
    against = [f"first tenth - {baseline}"] if baseline else []
    rows = [["arm", "first tenth of the steps", "last tenth", *against, *theirs]]
    for arm, records in comparison.arms.items():
        first = _values(records, "entropy_first")
        cells = [seeds_cell(first, stats.NATS), seeds_cell(_values(records, "entropy_last"), stats.NATS)]
        if baseline:
            control = _values(comparison.arms[baseline], "entropy_first")
            cells.append(NONE if arm == baseline else _cell_or_dash(_difference_cells(first, control, 0, False)))
        rows.append([arm, *cells, *([_printed_entropy(beside.get(arm))] if beside else [])])
    return Table(
        "Entropy of the policy" + ", as in the paper's Figure 5" * bool(beside),
        "Nats per token at rollout.temperature, without noise in the trainer."
        + " Paper: mean of its curve over steps 0 to 8, read from the figure (+-0.004)." * bool(beside),
        rows,
    )


def _printed_entropy(name: str | None) -> str:
    """Return the mean entropy that Figure 5 of the paper has for a weight format; a dash for None."""
    if name is None:
        return NONE
    where = {"table": "Figure 5", "model": SEVEN, "weight_format": name, "setting": "mean over steps 0-8"}
    return f"{reference.value(**where, metric='mean policy entropy (nats/token)'):.3f}"


SPEEDS, PHASES = ("rollout_tokens_per_second", "tokens_per_second"), ("rollout", "train", "sync")
OF_PAPER = ["Figure 1, 7B: rollouts / BF16", "Table 3, 7B: end to end / BF16"]


def _throughput(comparison: Comparison, baseline: str | None) -> Table:
    beside, why = table_1_rows(comparison), _why_no_ratio(comparison, baseline)
    ratios = [] if why else [*(f"{what} / {baseline}" for what in ("rollouts", "end to end")), *OF_PAPER]
    rows = [["arm", "rollouts, tokens/s", "end to end, tokens/s", *ratios, "rollout, train, sync", "peak GiB",
             "seconds a run"]]  # fmt: skip
    shared = {arm: records for arm, records in comparison.arms.items() if shared_machines(records)}
    for arm, records in comparison.arms.items():
        cells = [NONE if arm in shared else _speed(_values(records, name)) for name in SPEEDS]
        if baseline and not why:
            cells += [*_ratios(records, comparison.arms[baseline]), *_printed_speeds(beside.get(arm))]
        seconds = number(np.mean([record.summary["seconds"] for record in records]))
        phases = (np.mean([record.summary[f"share_{name}"] for record in records]) for name in PHASES)
        timed = [NONE, NONE] if arm in shared else [", ".join(f"{share:.0%}" for share in phases), seconds]
        peaks = [record.summary.get("memory_gpu_peak_gib", record.summary["memory_rss_gib"]) for record in records]
        rows.append([arm, *cells, timed[0], f"{max(peaks):.2f}", timed[1]])
    rows, empty = without_empty_columns(rows)
    left_out = f"Left out: speed ratios between arms, ours and the paper's, since {why}." if why else ""
    if shared:
        which = "every arm" if len(shared) == len(comparison.arms) else in_words(list(shared))
        left_out = f"Left out: seconds and tokens/s of {which}, since {SHARED}."
    return Table(
        "Throughput and memory" + ", as in the paper's Figure 1 and Table 3" * (not why and OF_PAPER[0] not in empty),
        "Completion tokens per second, geometric mean over seeds. Memory: largest peak of any seed, on the GPU if "
        "there is one, else resident." + " Paper: one H100, batch 8 (Figure 1); batch 2, 4, 8 (Table 3)." * (not why),
        rows,
        left_out or ("Left out: the paper's speeds, since it timed none of these arms." if empty else ""),
    )


def _speed(values: pd.DataFrame) -> str:
    """Format a speed with its interval. Averages logarithms, as verdicts do, so that the interval stays above 0."""
    if len(values) < 2:
        return seeds_cell(values)
    mean, low, high = np.exp(stats.over_seeds(np.log(values.to_numpy())))
    return cell((mean, low, high), len(values))


def _why_no_ratio(comparison: Comparison, baseline: str | None) -> str:
    """Say why no speed is compared with another; empty if at least one is."""
    if len(comparison.arms) < 2:
        return "there is only one arm"
    if baseline is None:
        return "no arm is the baseline: choose one with baseline=ARM"
    control = comparison.arms[baseline]
    others = [
        records for arm, records in comparison.arms.items() if arm != baseline and _share_a_seed(records, control)
    ]
    if not others:
        return f"no arm shares a seed with {baseline}"
    return SHARED if all(shared_machines(records, control) for records in others) else ""


def _share_a_seed(records: Sequence[Record], control: Sequence[Record]) -> bool:
    return bool({one.run.seed for one in records} & {one.run.seed for one in control})


def _ratios(records: Sequence[Record], control: Sequence[Record]) -> list[str]:
    """Return both speeds divided by the control's; dashes for the control and for runs that shared a machine."""
    if records is control or shared_machines(records, control):
        return [NONE, NONE]
    return [
        _cell_or_dash(_difference_cells(_values(records, name), _values(control, name), 1, True)) for name in SPEEDS
    ]


def _printed_speeds(row: tuple[str, str] | None) -> list[str]:
    method, weight_format = row or ("", "")
    method = method.partition(" ")[0]  # QeRL with noise and without
    if (method, weight_format) not in {("QLoRA", "NF4"), ("QeRL", "NVFP4")}:
        return [NONE, NONE]
    where = {"model": SEVEN, "method": method, "weight_format": weight_format}
    bf16 = {"model": SEVEN, "method": "LoRA", "weight_format": "BF16"}
    rollouts = [reference.value(table="Figure 1", metric="rollout throughput", **row) for row in (where, bf16)]
    speedup = "end-to-end training speedup vs BF16 LoRA"
    whole = (reference.value(table="Table 3", metric=speedup, setting=f"batch size {n};", **where) for n in (2, 4, 8))
    return [f"{rollouts[0] / rollouts[1]:.2f}x", ", ".join(f"{value:.1f}x" for value in whole)]
