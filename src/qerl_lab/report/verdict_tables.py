"""Format verdicts as text, Markdown and JSON, and accuracies in the layout of the paper's Table 1."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pandas as pd
from scipy.stats import fisher_exact

from qerl_lab.report import reference, stats
from qerl_lab.report.arms import format_setting
from qerl_lab.report.claims import Claim, sweep_command
from qerl_lab.report.comparison import Comparison, list_left_out, matrix, notes
from qerl_lab.report.effects import Numbers
from qerl_lab.report.measures import FALLEN, MEASURES
from qerl_lab.report.printed_arms import in_table_1
from qerl_lab.report.table import format_number
from qerl_lab.report.verdicts import LEVEL, Row, effect_as_text, family_sizes
from qerl_lab.system.disk import strict_json
from qerl_lab.system.terminal import columns

SCHEMA = 3
Conditions = tuple[tuple[str, str], ...]
HOW_TO_READ = f"""\
Effects are treated less control (of steps and tokens/s treated over control), paired by seed and question, with
intervals of 95% over both. supported: the effect is there. too small to matter: it is there, and below the smallest
effect that matters. excluded: an effect of that size is excluded. reversed: the other sign is shown. undecided: none of
these. Each at a one-sided level of {LEVEL:g} for a whole family (Holm), with a variance no smaller than the median of
its family's; the intervals are of each contrast alone. Inside, outside: whether the interval holds the paper's own
value. The seeds that would decide are estimates from the measured spread: at the first number about half of such
repetitions are decided, at the second, where one is, most."""

TO_MAKE = "To make what was not measured (add what the runs had beside their sweep, such as scale=NAME):\n"


def cell(interval: stats.Interval, seeds: int) -> str:
    """Format an interval as `mean [95% CI] (n)`, or as `>= mean [low, no bound] (n)` with only one bound."""
    return f"{_format_interval(interval, format_number, format_number)} ({seeds})"


def _format_interval(interval: stats.Interval, spell: Callable[[float], str], spell_end: Callable[[float], str]) -> str:
    """Format `mean [low, high]`; `>= mean [low, no bound]` if the mean is only known to be so large."""
    mean, low, high = interval
    if math.isfinite(low) and math.isfinite(high):
        return f"{spell(mean)} {stats.format_interval(low, high, spell_end)}"
    bound = "" if math.isinf(low) and math.isinf(high) else ">= " if math.isinf(high) else "<= "
    ends = ("no bound" if math.isinf(end) else spell_end(end) for end in (low, high))
    return f"{bound}{spell(mean)} [{', '.join(ends)}]"


ANY = (-math.inf, math.inf)


def seeds_cell(values: pd.DataFrame, bounds: tuple[float, float] = ANY) -> str:
    """Format the mean of values[seeds, questions] with its interval; without one for one seed, a dash for none.

    `bounds` are the possible values.
    """
    interval = stats.mean_of_arm(values, bounds)
    if math.isnan(interval[0]):
        return "-"
    if math.isnan(interval[1]):
        return f"{format_number(interval[0])} (1)"
    return cell(interval, len(values.dropna(how="all")))


def effect_cell(row: Row) -> str:
    """Format an effect as `+0.013 [-0.003, +0.030]`, `1.23x [1.10, 1.37]`, `>= 1.9x [1.3, no bound]`, or a dash."""
    if row.numbers is None:
        return "-"
    spell_end = "{:.2f}".format if MEASURES[row.claim.measure].ratio else "{:+.3f}".format
    return _format_interval(row.numbers.effect, partial(effect_as_text, row.claim), spell_end)


def paper_cell(row: Row) -> str:
    """List the paper's effects in a contrast, each with its source and whether our interval contains it."""
    texts = []
    for where, value in row.printed:
        if row.numbers:
            _, low, high = row.numbers.effect
            where += ", inside" if low <= value <= high else ", outside"
        texts.append(f"{effect_as_text(row.claim, value)} ({where})")
    return ", ".join(texts) or "-"


def name_of(row: Row) -> str:
    """Return the name of a row's contrast, with the settings that distinguish it from others of its name."""
    context = ", ".join(format_setting(key, value) for key, value in row.context)
    return f"{row.contrast.name} ({context})" if context else row.contrast.name


def text(comparison: Comparison, rows: Sequence[Row]) -> str:
    """Format verdicts for the terminal: their table, what decided them, and what was left out."""
    table = [["claim", "contrast", "seeds", "effect, 95% interval", "the paper's", "verdict"]]
    for row in rows:
        seeds = str(row.numbers.seeds) if row.numbers else "-"
        said = f"{row.verdict}: {row.why}"
        table.append([row.claim.name, name_of(row), seeds, effect_cell(row), paper_cell(row), said])
    parts = [columns(table), HOW_TO_READ, families(rows), *sources(rows), conditions(rows)]
    parts += [COLLAPSED, columns(fallen)] if (fallen := collapses(rows)) else []
    parts.append(missing_arms(rows))
    parts.append(columns(table_1(comparison)))
    return "\n\n".join(part for part in [*parts, *notes(comparison), list_left_out(comparison)] if part)


def collapses(rows: Sequence[Row]) -> list[list[str]]:
    """Tabulate how many runs of each arm collapsed, with Fisher's exact test; empty if none did."""
    table = [["claim", "contrast", "collapsed: treated", "collapsed: control", "p, Fisher's exact test"]]
    for row in (row for row in rows if any(row.collapsed)):
        counts = list(zip(row.collapsed, row.finished, strict=True))
        p = fisher_exact([[fell, finished - fell] for fell, finished in counts]).pvalue  # two-sided
        cells = [f"{fell} of {finished}" for fell, finished in counts]
        table.append([row.claim.name, name_of(row), *cells, f"{p:.3f}"])
    return table if len(table) > 1 else []


COLLAPSED = (
    f"Collapsed runs: right answers in the last tenth of the steps below {FALLEN:.0%} of those in the run's best tenth."
)


def families(rows: Sequence[Row]) -> str:
    """Say how many contrasts of each family the correction for multiple tests covers."""
    sizes = family_sizes(rows)
    return "Corrected for: " + ", ".join(f"{n} of {name}" for name, n in sizes.items()) + "." if sizes else ""


def sources(rows: Sequence[Row]) -> list[str]:
    """List each file of claims with its hash and commit, and how many verdicts were preregistered."""
    texts = []
    for file in {row.claim.file.sha256: row.claim.file for row in rows}.values():
        own = [row for row in rows if row.claim.file == file and row.numbers]
        before = f"{sum(map(_is_registered, own))} of {len(own)} measured contrasts"
        texts.append(
            f"Claims: {file.path}, SHA-256 {file.sha256[:12]}, first committed {file.committed}. Preregistered, which "
            f"means that all of their runs record this hash: {before}."
        )
        later = dict.fromkeys(f"{row.claim.name} ({row.claim.added})" for row in own if row.claim.added)
        texts += [f"Added later: {', '.join(later)}."] if later else []
        texts += [f"Planned analysis: {file.analysis}"] if file.analysis else []
    return texts


def _is_registered(row: Row) -> bool:
    return row.registered.startswith("preregistered")


def _assign_letters(rows: Sequence[Row]) -> dict[Conditions, str]:
    """Assign a letter to each set of conditions of the measured contrasts: A, B, ..., Z, A1, ..."""
    found = dict.fromkeys(row.conditions for row in rows if row.numbers)
    return {one: chr(65 + n % 26) + (str(n // 26) if n > 25 else "") for n, one in enumerate(found)}


def conditions(rows: Sequence[Row]) -> str:
    """List the conditions of the measured contrasts, by letter if they differ."""
    letters = _assign_letters(rows)
    head = "Conditions of the runs:"
    if len(letters) > 1:
        head = f"The verdicts are of {len(letters)} sets of conditions; compare those of one letter:"
    lines = [f"- {letter}: {format_conditions(own)}" for own, letter in letters.items()]
    return "\n".join([head, *lines]) if lines else ""


def format_conditions(settings: Conditions) -> str:
    return ", ".join(format_setting(key, value) for key, value in settings)


def missing_arms(rows: Sequence[Row]) -> str:
    """List the commands that make the missing arms, each with the claims that need them."""
    waiting: dict[str, list[str]] = {}
    for row in (row for row in rows if row.numbers is None):
        waiting.setdefault(sweep_command(row.claim), []).append(row.claim.name)
    lines = [f"{line}  # {', '.join(dict.fromkeys(names))}" for line, names in waiting.items()]
    return "\n    ".join([TO_MAKE, *lines]) if lines else ""


IN_TABLE_1 = "as in Table 1"


def table_1(comparison: Comparison) -> list[list[str]]:
    """Tabulate held-out accuracy of every arm, beside the matching row of the paper's Table 1 if there is one."""
    beside = in_table_1(comparison)
    rows = [["arm", "finished", "before", "after", *([IN_TABLE_1, "3B there", "7B there"] if beside else [])]]
    for label, records in comparison.arms.items():
        started = sum(run.arm == records[0].run.arm for run in comparison.started)
        accuracies = [seeds_cell(matrix(records, at), stats.SHARE) for at in ("before", "after")]
        theirs = _format_table_1_cells(beside.get(label)) if beside else []
        rows.append([label, f"{len(records)} of {started}", *accuracies, *theirs])
    return rows


def _format_table_1_cells(row: tuple[str, str] | None) -> list[str]:
    """Return the name of a row of the paper's Table 1, and its accuracy at 3B and 7B; dashes for None."""
    if row is None:
        return ["-", "-", "-"]
    method, weight_format = row
    where = {"table": "Table 1", "metric": "accuracy", "method": method, "weight_format": weight_format}
    numbers = reference.numbers(**where)
    there = [numbers.get(f"Qwen2.5-{size}-Instruct") for size in ("3B", "7B")]
    return [f"{method}, {weight_format}", *("-" if value is None else f"{value / 100:.3f}" for value in there)]


def markdown(comparison: Comparison, rows: Sequence[Row], command_line: str) -> str:
    """Render verdicts.md: a row per contrast with all that decided it, then accuracies, then what was left out.

    Claims without a measured contrast are only named; `text` and `as_json` give the reasons.
    """
    head = ["claim", "contrast", "conditions", "measure", "treated", "control", "finished / started", "effect",
            "the paper's", "effect size", "P(better)", "p of no effect, small, reverse (Holm)", "family", "guardrail",
            "preregistered", "verdict"]  # fmt: skip
    letters, sizes = _assign_letters(rows), family_sizes(rows)
    answered = {row.claim.name: row.claim for row in rows if row.numbers}
    body = []
    for row in (row for row in rows if row.claim.name in answered):
        *numbers, guardrail = measured_cells(row)
        body.append([
            row.claim.name, name_of(row), letters.get(row.conditions, "-"), row.claim.measure, *numbers,
            f"{row.claim.family}, {sizes.get(row.claim.family, 0)}", guardrail,
            "yes" if _is_registered(row) else "no", f"**{row.verdict}**: {row.why}",
        ])  # fmt: skip
    said = [f"- `{name}`: {claim.says} ({claim.where}). {describe_measure(claim)}" for name, claim in answered.items()]
    table = pipe_table([head, *body]) if body else "No claim was measured."
    parts = ["# Verdicts on the paper's claims", f"By `{command_line}`.", "\n".join(said), HOW_TO_READ if body else ""]
    parts += [families(rows), *sources(rows), conditions(rows), table]
    parts += [COLLAPSED, pipe_table(fallen)] if (fallen := collapses(rows)) else []
    rest = ", ".join(dict.fromkeys(f"`{row.claim.name}`" for row in rows if row.claim.name not in answered))
    parts += [f"These runs say nothing of {rest}; `report verdicts` prints why." if rest else "", missing_arms(rows)]
    accuracies = table_1(comparison)
    title = "Accuracies in the shape of the paper's Table 1" if IN_TABLE_1 in accuracies[0] else "Held-out accuracies"
    parts += [f"## {title}", pipe_table(accuracies), *notes(comparison), list_left_out(comparison)]
    return "\n\n".join(part for part in parts if part) + "\n"


def describe_measure(claim: Claim) -> str:
    """Say how a claim is measured, and which measure must not fall with it (the guardrail)."""
    measure, rail = MEASURES[claim.measure], claim.guardrail
    text = f"{claim.measure} ({measure.unit}): {measure.meaning}."
    return f"{text} Guardrail: {rail.measure} may fall by {rail.margin:g} at most." if rail else text


def measured_cells(row: Row) -> list[str]:
    """Format the numbers of a contrast as cells, in the order of the columns of `markdown`; dashes if unmeasured."""
    counts = ", ".join(f"{n} of {m}" for n, m in zip(row.finished, row.started, strict=True) if m) or "-"
    numbers = row.numbers
    if numbers is None:
        return ["-", "-", counts, "-", paper_cell(row), "-", "-", "-", "-"]
    bounds = stats.SHARE if MEASURES[row.claim.measure].unit == "fraction" else ANY
    sides = [cell(stats.clip_interval(side, *bounds), numbers.seeds) for side in (numbers.treated, numbers.control)]
    size = "-" if math.isnan(numbers.effect_size) else f"{numbers.effect_size:+.2f}"
    p_values = ", ".join(f"{p:.3f}" if p >= 0.001 else f"{p:.0e}" for p in numbers.adjusted)
    better = f"{numbers.probability_of_improvement:.2f}"
    return [*sides, counts, effect_cell(row), paper_cell(row), size, better, p_values, numbers.guardrail or "-"]


def pipe_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text as a Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def as_json(comparison: Comparison, rows: Sequence[Row], command_line: str) -> str:
    """Render verdicts.json: contrasts, level, family sizes, notes, and what was left out."""
    about = {
        "schema": SCHEMA, "command": command_line, "level": LEVEL, "families": family_sizes(rows),
        "rows": [_row_as_data(row) for row in rows], "notes": notes(comparison), "left_out": comparison.left_out,
    }  # fmt: skip
    return strict_json(about).decode()


def _row_as_data(row: Row) -> dict[str, Any]:
    claim = {name: value for name, value in asdict(row.claim).items() if name != "contrasts"}
    return {
        "claim": claim, "contrast": row.contrast.name, "treated": dict(row.contrast.treated_settings),
        "control": dict(row.contrast.control_settings), "context": dict(row.context),
        "conditions": dict(row.conditions), "registered": row.registered, "verdict": str(row.verdict), "why": row.why,
        "finished": row.finished, "started": row.started,
        "printed": [{"where": where, "effect": value} for where, value in row.printed],
        "numbers": None if row.numbers is None else _numbers_as_data(row.numbers),
    }  # fmt: skip


def _numbers_as_data(numbers: Numbers) -> dict[str, Any]:
    """Return all fields of the numbers except the matrices."""
    values = {name: value for name, value in vars(numbers).items() if name not in ("oriented", "at_most")}
    by_seed = numbers.oriented.mean(1).tolist()
    return values | {"p": numbers.p._asdict(), "adjusted": numbers.adjusted._asdict(), "effect_by_seed": by_seed}
