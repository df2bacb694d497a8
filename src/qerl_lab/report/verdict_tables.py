"""Format verdicts as text and as Markdown."""

import shlex
from collections import Counter
from collections.abc import Sequence

from scipy.stats import fisher_exact

from qerl_lab.report import stats
from qerl_lab.report.arms import format_setting
from qerl_lab.report.claims import Claim, of_paper
from qerl_lab.report.comparison import Comparison, accuracy_rows, list_left_out, notes
from qerl_lab.report.measures import FALLEN, MEASURES
from qerl_lab.report.table import ANY, NONE, format_mean_and_interval, format_number
from qerl_lab.report.verdicts import LEVEL, Row, family_sizes
from qerl_lab.system.terminal import columns

Conditions = tuple[tuple[str, str], ...]
HOW_TO_READ = f"""\
Effects are treated less control (of steps and tokens/s treated over control), paired by seed and question, with
intervals of 95% over both. supported: the effect is there. too small to matter: it is there, and below the smallest
effect that matters. excluded: an effect of that size is excluded. reversed: the other sign is shown. undecided: none of
these. Each at a one-sided level of {LEVEL:g} for a whole family (Holm), with a variance no smaller than the median of
its family's; the intervals are of each contrast alone. Inside, outside: whether the interval holds the paper's own
value. The seeds that would decide are estimates from the measured spread: at the first number about half of such
repetitions are decided, at the second, where one is, most."""
COLLAPSED = (
    f"Collapsed runs: right answers in the last tenth of the steps below {FALLEN:.0%} of those in the run's best tenth."
)
P_VALUES = "p of no effect, small, reverse (Holm)"
HEADS = (  # columns of numbers; `markdown` shows the last one after the family
    "treated", "control", "finished / started", "effect", "the paper's", P_VALUES, "guardrail",
)  # fmt: skip


def text(comparison: Comparison, rows: Sequence[Row]) -> str:
    """Format verdicts for the terminal: their table, what they rest on, accuracies, warnings, and runs left out."""
    table = [["claim", "contrast", "seeds", "effect, 95% interval", "the paper's", "verdict"]]
    for row in (row for row in rows if not row.lacks_runs):
        seeds = str(row.numbers.seeds) if row.numbers else NONE
        verdict = f"{row.verdict}: {row.why}"
        table.append([row.claim.name, name_of(row), seeds, effect_cell(row), paper_cell(row), verdict])
    shown = [columns(table), HOW_TO_READ] if len(table) > 1 else []
    parts = [*shown, contrasts_without_runs(rows), *_basis(rows)]
    if fallen := collapses(rows):
        parts += [COLLAPSED, columns(fallen)]
    parts += [missing_arms(rows), columns(accuracy_rows(comparison, None))]
    parts += [*notes(comparison), list_left_out(comparison)]
    return "\n\n".join(part for part in parts if part)


def markdown(comparison: Comparison, rows: Sequence[Row], command_line: str) -> str:
    """Render verdicts.md: what decided each contrast, then accuracies and what was left out.

    `command_line` is the command that makes the file. Claims without a measured contrast are only named, and contrasts
    with an arm without runs are only counted; `text` gives the reasons.
    """
    letters, sizes = _letters(rows), family_sizes(rows)
    answered = {row.claim.name: row.claim for row in rows if row.numbers}
    shown = []
    for row in (row for row in rows if row.claim.name in answered and not row.lacks_runs):
        cells = measured_cells(row)
        numbers = {head: cells[head] for head in HEADS[:-1]}
        shown.append({
            "claim": row.claim.name, "contrast": name_of(row), "conditions": letters.get(row.conditions, NONE),
            "measure": row.claim.measure, **numbers, "family": f"{row.claim.family}, {sizes.get(row.claim.family, 0)}",
            "guardrail": cells["guardrail"], "preregistered": "yes" if row.is_registered else "no",
            "verdict": f"**{row.verdict}**: {row.why}",
        })  # fmt: skip
    meanings = [
        f"- `{name}`: {claim.says} ({claim.where}). {describe_measure(claim)}" for name, claim in answered.items()
    ]
    parts = ["# Verdicts on claims", f"By `{command_line}`.", "\n".join(meanings)]
    if shown:
        table = pipe_table([list(shown[0]), *(list(row_cells.values()) for row_cells in shown)])
        parts += [HOW_TO_READ, *_basis(rows), table]
    else:
        parts += [*_basis(rows), "No claim was measured."]
    if fallen := collapses(rows):
        parts += [COLLAPSED, pipe_table(fallen)]
    silent = (row.claim.name for row in rows if row.claim.name not in answered and not row.lacks_runs)
    if rest := ", ".join(f"`{name}`" for name in dict.fromkeys(silent)):
        parts.append(f"These runs say nothing of {rest}; `report verdicts` prints why.")
    parts += [contrasts_without_runs(rows), missing_arms(rows)]
    parts += ["## Held-out accuracies", pipe_table(accuracy_rows(comparison, None))]
    parts += [*notes(comparison), list_left_out(comparison)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _basis(rows: Sequence[Row]) -> list[str]:
    """Return paragraphs on what the verdicts rest on: numbers of tests, claims files, conditions of the runs."""
    texts = [families(rows)]
    for file in {row.claim.file.sha256: row.claim.file for row in rows}.values():
        own_rows = [row for row in rows if row.claim.file == file and row.numbers]
        before = f"{sum(row.is_registered for row in own_rows)} of {len(own_rows)} measured contrasts"
        texts.append(
            f"Claims: {file.path}, SHA-256 {file.sha256[:12]}, first committed {file.committed}. Preregistered, which "
            f"means that all of their runs record this hash: {before}."
        )
        later = dict.fromkeys(f"{row.claim.name} ({row.claim.added})" for row in own_rows if row.claim.added)
        if later:
            texts.append(f"Added later: {', '.join(later)}.")
        if file.analysis:
            texts.append(f"Planned analysis: {file.analysis}")
    if letters := _letters(rows):
        head = "Conditions of the runs:"
        if len(letters) > 1:
            head = f"The verdicts are of {len(letters)} sets of conditions; compare those of one letter:"
        texts.append("\n".join([head, *(f"- {letter}: {format_conditions(own)}" for own, letter in letters.items())]))
    return texts


def _letters(rows: Sequence[Row]) -> dict[Conditions, str]:
    """Name each set of conditions that measured contrasts have by a letter: A, B, ..., Z, A1, ..."""
    found = dict.fromkeys(row.conditions for row in rows if row.numbers)
    return {conditions: chr(ord("A") + n % 26) + (str(n // 26) if n > 25 else "") for n, conditions in enumerate(found)}


def families(rows: Sequence[Row]) -> str:
    """Format a sentence that says for how many tests p-values are corrected, by family.

    The tests of a family are its judged contrasts (`Row.judged`). The text is empty if no contrast was judged.
    """
    sizes = family_sizes(rows)
    return "Corrected for: " + ", ".join(f"{n} of {name}" for name, n in sizes.items()) + "." if sizes else ""


def missing_arms(rows: Sequence[Row]) -> str:
    """Return text with the commands that start the runs which verdicts lack, one per line, with the claims' names.

    A claim with a queue file gets the command that plans the queue, because a sweep may have other values than the arms
    of the claim. The text is empty if every contrast has enough seeds.
    """
    blocks: dict[str, dict[str, dict[str, None]]] = {}  # head -> command -> names of claims
    for claim in (row.claim for row in rows if row.judged is None):
        file = claim.file
        if file.queue:
            head = "The queue beside the claims has the runs that verdicts lack. To list those that are left:\n"
            line = f"python -m qerl_lab.tools.queue plan {shlex.quote(file.queue)}"
        else:
            add = "add what the runs had beside their sweep, such as scale=NAME"
            if file != of_paper()[0].file:
                add += f"; where a sweep has other values than the arms in {file.path}, type those of the arms"
            head, line = f"To make what verdicts lack ({add}):\n", f"python -m qerl_lab +sweeps={claim.sweep}"
        blocks.setdefault(head, {}).setdefault(line, {})[claim.name] = None
    texts = []
    for head, commands in blocks.items():
        lines = [f"{line}  # {', '.join(names)}" for line, names in commands.items()]
        texts.append("\n    ".join([head, *lines]))
    return "\n\n".join(texts)


def contrasts_without_runs(rows: Sequence[Row]) -> str:
    """Say in one line how many contrasts have an arm without any run, and of which claims they are; empty if none."""
    lacking = Counter(row.claim.name for row in rows if row.lacks_runs)
    named = ", ".join(f"{number} of {name}" for name, number in lacking.items())
    return f"In {lacking.total()} of {len(rows)} contrasts an arm has no runs: {named}." if lacking else ""


def collapses(rows: Sequence[Row]) -> list[list[str]]:
    """Tabulate contrasts with collapsed runs, with the two-sided p-value of Fisher's exact test.

    A contrast without enough seeds for a verdict has a dash as p-value. The table is empty if no run collapsed.
    """
    table = [["claim", "contrast", "collapsed: treated", "collapsed: control", "p, Fisher's exact test"]]
    for row in (row for row in rows if any(row.collapsed)):
        counts = list(zip(row.collapsed, row.finished, strict=True))
        p = fisher_exact([[fell, finished - fell] for fell, finished in counts]).pvalue  # two-sided
        cells = [f"{fell} of {finished}" for fell, finished in counts]
        table.append([row.claim.name, name_of(row), *cells, f"{p:.3f}" if row.judged else NONE])
    return table if len(table) > 1 else []


def measured_cells(row: Row) -> dict[str, str]:
    """Format the numbers of a contrast as cells of a table, by their `HEADS`; a dash for what was not measured."""
    counts = ", ".join(f"{n} of {m}" for n, m in zip(row.finished, row.started, strict=True) if m)
    cells = dict.fromkeys(HEADS, NONE) | {"finished / started": counts or NONE, "the paper's": paper_cell(row)}
    numbers = row.numbers
    if numbers is None:
        return cells
    measure, spell = MEASURES[row.claim.measure], format_number
    bounds = stats.SHARE if measure.unit == "fraction" else ANY
    if measure.is_change:
        bounds, spell = stats.CHANGE, stats.format_change
    for side, interval in (("treated", numbers.treated), ("control", numbers.control)):
        text = format_mean_and_interval(stats.clip_interval(interval, *bounds), spell, spell)
        cells[side] = f"{text} ({numbers.seeds})"
    cells["effect"] = effect_cell(row)
    if row.judged:
        cells[P_VALUES] = ", ".join(f"{p:.3f}" if p >= 0.001 else f"{p:.0e}" for p in numbers.adjusted)
        cells["guardrail"] = numbers.guardrail or NONE
    return cells


def effect_cell(row: Row) -> str:
    """Format the measured effect as `+0.013 [-0.003, +0.030]` or `>= 1.9x [1.3, no bound]`; a dash if there is none."""
    if row.numbers is None:
        return NONE
    spell_end = "{:.2f}".format if row.claim.is_ratio else stats.format_change
    return format_mean_and_interval(row.numbers.effect, row.claim.format_effect, spell_end)


def paper_cell(row: Row) -> str:
    """List the paper's effects as `+0.049 (Table 1 7B, inside)`; a dash without any.

    Inside and outside say whether our interval holds the paper's effect.
    """
    texts = []
    for where, value in row.contrast.printed:
        if row.numbers:
            _, low, high = row.numbers.effect
            where += ", inside" if low <= value <= high else ", outside"
        texts.append(f"{row.claim.format_effect(value)} ({where})")
    return ", ".join(texts) or NONE


def name_of(row: Row) -> str:
    """Return the name of a row's contrast, with the settings that distinguish it from contrasts of the same name."""
    context = format_conditions(row.context)
    return f"{row.contrast.name} ({context})" if context else row.contrast.name


def format_conditions(settings: Conditions) -> str:
    """Format settings as `key=value, key=value`."""
    return ", ".join(format_setting(key, value) for key, value in settings)


def describe_measure(claim: Claim) -> str:
    """Say how a claim is measured, and which second measure must not fall too far (the guardrail)."""
    measure, rail = MEASURES[claim.measure], claim.guardrail
    text = f"{claim.measure} ({measure.unit}): {measure.meaning}."
    return f"{text} Guardrail: {rail.measure} may fall by {rail.margin:g} at most." if rail else text


def pipe_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text as a Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
