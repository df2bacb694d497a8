"""Tables of arms, laid out like the paper's: our numbers, and the paper's beside them."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qerl_lab.report import reference, stats
from qerl_lab.report.comparison import Comparison, accuracy_rows
from qerl_lab.report.measures import FALLEN, MEASURES, SHARED, Unmeasured, has_collapsed
from qerl_lab.report.runs import SHARES, Run, first_tenth
from qerl_lab.report.table import (
    NONE,
    Table,
    format_number,
    geometric_cell,
    in_words,
    seeds_cell,
    without_empty_columns,
)

COLLAPSED = "runs that collapsed"  # head of a column
SPEEDS = ("rollout_tokens_per_second", "tokens_per_second")
ENTROPIES = {  # further columns of the entropy table: head -> metric
    "forking tokens, first tenth": "policy/entropy_forking_nats", "other tokens": "policy/entropy_rest_nats",
    "answers, first tenth": "rollout/answer_entropy_nats",
}  # fmt: skip


def tables(comparison: Comparison, baseline: str | None) -> list[Table]:
    """Build the tables of report.html that compare arms: accuracy, entropy and collapse, speed.

    `baseline` is the label of the arm that others are compared with, or None for no differences and ratios.
    """
    return [_accuracy_table(comparison, baseline), _entropy_table(comparison), _speed_table(comparison, baseline)]


def _accuracy_table(comparison: Comparison, baseline: str | None) -> Table:
    """Build the table of held-out accuracy: `accuracy_rows`, pass@n, and the accuracies of the paper's Table 1.

    An arm that is in Table 1 gets the name of its row in that table, and the accuracies at 3B and 7B.
    """
    row_of_arm = reference.rows_of_table_1(comparison.arms, {"task.name": "gsm8k", "algorithm.name": "grpo"})
    rows = accuracy_rows(comparison, baseline)
    rows[0].append("pass@n after")
    if row_of_arm:
        rows[0] += ["as in Table 1", "3B there", "7B there"]
    for row, (arm, runs) in zip(rows[1:], comparison.arms.items(), strict=True):
        try:
            row.append(seeds_cell(MEASURES["pass_after"].of(runs, runs), stats.SHARE))
        except Unmeasured:  # one sample a question, or no evaluation
            row.append(NONE)
        if arm in row_of_arm:
            method, weight_format = row_of_arm[arm]
            row.append(f"{method}, {weight_format}")
            for size in ("3B", "7B"):
                model = {"model": f"Qwen2.5-{size}-Instruct", "method": method, "weight_format": weight_format}
                printed = reference.select_row({"table": "Table 1", "metric": "accuracy"} | model)
                row.append(f"{printed['number'] / 100:.3f}")
        row += [NONE] * (len(rows[0]) - len(row))
    rows, empty = without_empty_columns(rows, 2)
    title, of_paper = "Held-out accuracy", ""
    if row_of_arm:
        title += ", as in the paper's Table 1"
        of_paper = "Paper: one run each, Qwen2.5 at 3B and 7B on GSM8K. "
    asked = sorted({len(run.accuracy["after"]) for runs in comparison.arms.values() for run in runs if run.accuracy})
    questions = ""
    if asked:
        most = f" to {asked[-1]:,}" if len(asked) > 1 else ""
        questions = f"Held-out questions of a run: {asked[0]:,}{most}. "
    why = "no held-out questions were evaluated"
    if "after" not in empty:
        why = "eval.samples=1, or the arms share no seed and question"
    return Table(
        title,
        f"{questions}Cells: mean [95% interval] (seeds). Intervals cover seeds and questions, and are clipped to "
        f"possible values. {of_paper}pass@n: questions with a right answer among n = eval.samples.",
        rows,
        f"Left out: {in_words(empty)}, since {why}." if empty else "",
    )


def _entropy_table(comparison: Comparison) -> Table:
    """Tabulate each arm's policy entropy over the first and the last tenth of the steps, in nats, and collapsed runs.

    Further columns are the ratio of the two, the metrics `ENTROPIES` over the first tenth, and the paper's entropy
    (Figure 5) for arms that are in its Table 1.
    """
    row_of_arm = reference.rows_of_table_1(comparison.arms, {"task.name": "gsm8k", "aqn.schedule": "off"})
    of_paper = ["Figure 5, 7B"] if row_of_arm else []
    rows = [["arm", "first tenth of the steps", "last tenth", "last / first", COLLAPSED, *ENTROPIES, *of_paper]]
    for arm, runs in comparison.arms.items():
        first, last = (_by_seed(runs, f"entropy_{when}") for when in ("first", "last"))
        ratios = last / first
        retained = geometric_cell(ratios) if np.isfinite(ratios).all() and (ratios > 0).all() else NONE
        row = [arm, *(seeds_cell(values.to_frame(), stats.NATS) for values in (first, last)), retained]
        try:
            fell = np.array([has_collapsed(run) for run in runs], float)
            _, low, high = stats.share_interval(fell, 1)
            row.append(f"{int(fell.sum())} of {len(fell)} [{low:.2f}, {high:.2f}]")
        except Unmeasured:
            row.append(NONE)
        for metric in ENTROPIES.values():
            if all(metric in run.steps for run in runs):
                means = {run.seed: first_tenth(run.steps[metric].dropna()).mean() for run in runs}
                row.append(seeds_cell(pd.Series(means).to_frame(), stats.NATS))
            else:
                row.append(NONE)
        if arm in row_of_arm:
            _, weight_format = row_of_arm[arm]
            line = "BF16/Float16" if weight_format == "BF16" else weight_format
            of_line = {"table": "Figure 5", "weight_format": line, "setting": reference.EIGHT_STEPS}
            row.append(f"{reference.select_row(of_line)['number']:.3f}")
        rows.append([*row, *[NONE] * (len(rows[0]) - len(row))])
    rows, empty = without_empty_columns(rows)
    title, about = "Entropy and collapse", "Nats per token at rollout.temperature, without noise in the trainer."
    about += " Last / first: geometric mean over seeds."
    if not {*ENTROPIES} & {*empty}:
        about += " Forking tokens: the fifth with the highest entropy."
        about += " Answers: nats a question, over its group's answers."
    if COLLAPSED not in empty:
        about += f" A run has collapsed if its right answers in the last tenth of the steps are below {FALLEN:.0%} of "
        about += "those in its best tenth; the share has a Wilson interval."
    if row_of_arm:
        title += ", as in the paper's Figure 5"
        about += " Paper: mean of its curve over steps 0 to 8, read from the figure (+-0.004)."
    return Table(title, about, rows)


def _speed_table(comparison: Comparison, baseline: str | None) -> Table:
    """Tabulate tokens/s, shares of time by phase, peak memory (GiB) and seconds a run of each arm.

    Adds ratios of tokens/s to the arm `baseline`, seed by seed. Arms that shared a machine have only memory.
    """
    rows = [["arm", "rollouts, tokens/s", "end to end, tokens/s", f"rollouts / {baseline}", f"end to end / {baseline}",
             "rollout, train, sync", "peak GiB", "seconds a run"]]  # fmt: skip
    alone = comparison.alone
    for arm, runs in comparison.arms.items():
        speeds, ratios, shares, seconds = [NONE, NONE], [NONE, NONE], NONE, NONE
        if arm in alone:
            speeds = [geometric_cell(_by_seed(runs, name)) for name in SPEEDS]
            shares = ", ".join(f"{_by_seed(runs, f'share_{name}').mean():.0%}" for name in SHARES)
            seconds = format_number(_by_seed(runs, "seconds").mean())
        if arm in alone and baseline in alone and arm != baseline:
            of_seeds = [(_by_seed(runs, name) / _by_seed(alone[baseline], name)).dropna() for name in SPEEDS]
            ratios = [geometric_cell(values_S, "{:.2f}x".format, "{:.2f}".format) for values_S in of_seeds]
        peaks = [run.summary.get("memory_gpu_peak_gib", run.summary["memory_rss_gib"]) for run in runs]
        rows.append([arm, *speeds, *ratios, shares, f"{max(peaks):.2f}", seconds])
    rows, _ = without_empty_columns(rows)
    shared = [arm for arm in comparison.arms if arm not in alone]
    which = "every arm" if len(shared) == len(comparison.arms) else in_words(shared)
    return Table(
        "Throughput and memory",
        "Completion tokens per second, geometric mean over seeds. Memory: largest peak of any seed, on the GPU if "
        "there is one, else resident.",
        rows,
        f"Left out: seconds and tokens/s of {which}, since {SHARED}." if shared else "",
    )


def _by_seed(runs: Sequence[Run], name: str) -> pd.Series:
    """Return the headline number `summary[name]` of each run, indexed by seed."""
    return pd.Series({run.seed: float(run.summary[name]) for run in runs})
