"""Tables of arms, laid out like the paper's: our numbers, and the paper's beside them."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qerl_lab.report import reference, stats
from qerl_lab.report.comparison import Comparison, matrix
from qerl_lab.report.measures import FALLEN, MEASURES, SHARED, Unmeasured, has_collapsed, shared_machines
from qerl_lab.report.runs import Run, first_tenth
from qerl_lab.report.speed_tables import printed_rollouts, printed_steps
from qerl_lab.report.table import (
    NONE,
    Rows,
    Table,
    format_number,
    geometric_cell,
    in_words,
    seeds_cell,
    without_empty_columns,
)

IN_TABLE_1 = "as in Table 1"  # head of a column
SPEEDS, PHASES = ("rollout_tokens_per_second", "tokens_per_second"), ("rollout", "train", "sync")
ENTROPIES = {  # further columns of the entropy table: head -> metric
    "forking tokens, first tenth": "policy/entropy_forking_nats", "other tokens": "policy/entropy_rest_nats",
    "answers, first tenth": "rollout/answer_entropy_nats",
}  # fmt: skip
OF_PAPER = ["Figure 1, 7B: rollouts / BF16", "Table 3, 7B: end to end / BF16"]


def tables(comparison: Comparison, baseline: str | None) -> list[Table]:
    """Build the tables of report.html that compare arms: accuracy, entropy, collapse, speed.

    `baseline` is the label of the arm that speeds are divided by, or None for no ratios.
    """
    return [
        _accuracy_table(comparison),
        _entropy_table(comparison),
        _retention_table(comparison),
        _speed_table(comparison, baseline),
    ]


def accuracy_rows(comparison: Comparison, gains: bool = True) -> Rows:
    """Tabulate held-out accuracy as text: a head, then a row of cells per arm; `gains` adds gain and pass@n.

    If an arm is also in the paper's Table 1, three further columns show its row there and the accuracies at 3B and 7B.
    """
    beside = reference.rows_of_table_1(comparison.arms, {"task.name": "gsm8k", "algorithm.name": "grpo"})
    head = ["arm", "finished", "before", "after", *(["gain", "pass@n after"] if gains else [])]
    rows = [[*head, *([IN_TABLE_1, "3B there", "7B there"] if beside else [])]]
    for label, runs in comparison.arms.items():
        cells = [label, f"{len(runs)} of {comparison.started[label]}"]
        cells += [seeds_cell(matrix(runs, at), stats.SHARE) for at in ("before", "after")]
        if gains:
            cells.append(seeds_cell(matrix(runs, "gain"), stats.CHANGE, stats.format_change))
            try:
                cells.append(seeds_cell(MEASURES["pass_after"].of(runs, runs), stats.SHARE))
            except Unmeasured:  # one sample a question, or no evaluation
                cells.append(NONE)
        if label in beside:
            method, weight_format = beside[label]
            cells.append(f"{method}, {weight_format}")
            for size in ("3B", "7B"):
                row = reference.select_row(
                    table="Table 1", metric="accuracy", method=method, weight_format=weight_format,
                    model=f"Qwen2.5-{size}-Instruct",
                )  # fmt: skip
                cells.append(f"{row['number'] / 100:.3f}")
        rows.append([*cells, *[NONE] * (len(rows[0]) - len(cells))])
    return rows


def _accuracy_table(comparison: Comparison) -> Table:
    """Build the table of held-out accuracy: `accuracy_rows` without empty columns, with explanations."""
    rows, empty = without_empty_columns(accuracy_rows(comparison), 2)
    title, of_paper = "Held-out accuracy", ""
    if IN_TABLE_1 in rows[0]:
        title += ", as in the paper's Table 1"
        of_paper = "Paper: one run each, Qwen2.5 at 3B and 7B on GSM8K. "
    why = "no held-out questions were evaluated" if "after" in empty else "eval.samples=1, or no question"
    return Table(
        title,
        "Cells: mean [95% interval] (seeds). Intervals cover seeds and questions, and are clipped to 0 and 1. "
        f"{of_paper}pass@n: questions with a right answer among n = eval.samples.",
        rows,
        f"Left out: {in_words(empty)}, since {why}." if empty else "",
    )


def _retention_table(comparison: Comparison) -> Table:
    """Tabulate by arm the ratio of final to initial entropy, and the number of collapsed runs.

    Final and initial are means over the last and the first tenth of the steps.
    """
    rows = [["arm", "entropy, last tenth / first", "runs that collapsed"]]
    for arm, runs in comparison.arms.items():
        ratios = _by_seed(runs, "entropy_last") / _by_seed(runs, "entropy_first")
        retained = geometric_cell(ratios) if np.isfinite(ratios).all() and (ratios > 0).all() else NONE
        try:
            fell = np.array([has_collapsed(run) for run in runs], float)
            _, low, high = stats.share_interval(fell, 1)
            collapsed = f"{int(fell.sum())} of {len(fell)} [{low:.2f}, {high:.2f}]"
        except Unmeasured:
            collapsed = NONE
        rows.append([arm, retained, collapsed])
    return Table(
        "Retained entropy and collapse",
        "Entropy of the trainer's policy in the last tenth of the steps / in the first, geometric mean over seeds "
        "[95% interval] (seeds). A run has collapsed if its right answers in the last tenth of the steps are below "
        f"{FALLEN:.0%} of those in its best tenth; the share has a Wilson interval.",
        rows,
    )


def _by_seed(runs: Sequence[Run], name: str) -> pd.Series:
    """Return the headline number `summary[name]` of each run, indexed by seed."""
    return pd.Series({run.seed: float(run.summary[name]) for run in runs})


def _entropy_table(comparison: Comparison) -> Table:
    """Tabulate each arm's policy entropy over the first and the last tenth of the steps, in nats per token.

    Further columns are the metrics `ENTROPIES` over the first tenth, and the paper's entropy (Figure 5) for arms that
    are in its Table 1.
    """
    beside = reference.rows_of_table_1(comparison.arms, {"task.name": "gsm8k", "aqn.schedule": "off"})
    of_paper = ["Figure 5, 7B"] if beside else []
    rows = [["arm", "first tenth of the steps", "last tenth", *ENTROPIES, *of_paper]]
    for arm, runs in comparison.arms.items():
        entropies = [_by_seed(runs, f"entropy_{when}").to_frame() for when in ("first", "last")]
        row = [arm, *(seeds_cell(values, stats.NATS) for values in entropies)]
        for metric in ENTROPIES.values():
            if all(metric in run.steps for run in runs):
                means = {run.seed: first_tenth(run.steps[metric].dropna()).mean() for run in runs}
                row.append(seeds_cell(pd.Series(means).to_frame(), stats.NATS))
            else:
                row.append(NONE)
        if arm in beside:
            line = {"BF16": "BF16/Float16"}.get(beside[arm][1], beside[arm][1])
            mean = reference.select_row(table="Figure 5", weight_format=line, setting=reference.EIGHT_STEPS)["number"]
            row.append(f"{mean:.3f}")
        rows.append([*row, *[NONE] * (len(rows[0]) - len(row))])
    rows, empty = without_empty_columns(rows)
    title, about = "Entropy of the policy", "Nats per token at rollout.temperature, without noise in the trainer."
    if not {*ENTROPIES} & {*empty}:
        about += " Forking tokens: the fifth with the highest entropy."
        about += " Answers: nats a question, over its group's answers."
    if beside:
        title += ", as in the paper's Figure 5"
        about += " Paper: mean of its curve over steps 0 to 8, read from the figure (+-0.004)."
    return Table(title, about, rows)


def _speed_table(comparison: Comparison, baseline: str | None) -> Table:
    """Tabulate tokens/s, shares of time by phase, peak memory and seconds a run of each arm.

    Beside them stand the ratios of tokens/s to the arm `baseline`, seed by seed, and the paper's ratios to BF16
    (Figure 1, Table 3).
    """
    beside = reference.rows_of_table_1(comparison.arms, {})
    rows = [["arm", "rollouts, tokens/s", "end to end, tokens/s", f"rollouts / {baseline}", f"end to end / {baseline}",
             *OF_PAPER, "rollout, train, sync", "peak GiB", "seconds a run"]]  # fmt: skip
    for arm, runs in comparison.arms.items():
        ratios, printed = [NONE, NONE], [NONE, NONE]
        if baseline not in (None, arm) and not shared_machines(runs, control := comparison.arms[baseline]):
            of_seeds = [(_by_seed(runs, name) / _by_seed(control, name)).dropna() for name in SPEEDS]
            ratios = [geometric_cell(values_S, "{:.2f}x".format, "{:.2f}".format) for values_S in of_seeds]
        if ratios != [NONE, NONE] and arm in beside:
            of_arm = f"model == 'qwen2.5-7b' and format == '{beside[arm][1].lower()}'"
            rollouts = printed_rollouts().query(f"{of_arm} and batch == 8")["of_bf16"].map("{:.2f}x".format)
            steps = printed_steps().query(of_arm)["table_3"].dropna()
            printed = [", ".join(rollouts) or NONE, ", ".join(steps) or NONE]
        peaks = [run.summary.get("memory_gpu_peak_gib", run.summary["memory_rss_gib"]) for run in runs]
        speeds, shares, seconds = [NONE, NONE], NONE, NONE
        if not shared_machines(runs):
            speeds = [geometric_cell(_by_seed(runs, name)) for name in SPEEDS]
            shares = ", ".join(f"{_by_seed(runs, f'share_{name}').mean():.0%}" for name in PHASES)
            seconds = format_number(_by_seed(runs, "seconds").mean())
        rows.append([arm, *speeds, *ratios, *printed, shares, f"{max(peaks):.2f}", seconds])
    rows, empty = without_empty_columns(rows)
    shared = [arm for arm, runs in comparison.arms.items() if shared_machines(runs)]
    which = "every arm" if len(shared) == len(comparison.arms) else in_words(shared)
    title, of_paper = "Throughput and memory", ""
    if OF_PAPER[0] not in empty:
        title += ", as in the paper's Figure 1 and Table 3"
        of_paper = " Paper: one H100, batch 8 (Figure 1); batch 2, 4, 8 (Table 3)."
    return Table(
        title,
        "Completion tokens per second, geometric mean over seeds. Memory: largest peak of any seed, on the GPU if "
        f"there is one, else resident.{of_paper}",
        rows,
        f"Left out: seconds and tokens/s of {which}, since {SHARED}." if shared else "",
    )
