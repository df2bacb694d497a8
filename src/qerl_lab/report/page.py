"""Write a results folder: runs as Parquet and, from these files alone, tables, figures, verdicts and report.html."""

import base64
import re
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from qerl_lab.config.message import with_noun
from qerl_lab.config.paths import CLAIMS
from qerl_lab.config.spelling import hydra_override
from qerl_lab.report import (
    claims,
    comparison,
    curves,
    diagnostics,
    palette,
    paper_curves,
    results,
    speed_tables,
    verdict_tables,
)
from qerl_lab.report.arm_tables import tables
from qerl_lab.report.comparison import Comparison
from qerl_lab.report.speed_tables import SpeedSection
from qerl_lab.report.table import NONE
from qerl_lab.report.verdicts import Row, Verdict, judge
from qerl_lab.system.disk import replace_file
from qerl_lab.system.terminal import format_path

TEMPLATE = Path(__file__).with_name("report.html.j2")
MOST_GROUPS = 4  # most figures of formats on a page
BY = {curves.STEP: "by-step", curves.CLOCK: "by-time"}  # x axis -> end of the file name
# Figures that only some reports have; a new report deletes the ones that an earlier report left.
OPTIONAL = ("*-by-*.png", "paper_*.png", "passes.png", "entropy-and-gain.png", "effects.png")


class Drawn(NamedTuple):
    """A figure as PNG, with its file name, a short description (`about`), and the `caption` below it on the page."""

    name: str
    about: str
    png: bytes
    caption: str = ""

    @property
    def columns(self) -> int:
        """Return how many panels of curves are as wide as the figure. With 2 or more it gets the whole page width."""
        return int.from_bytes(self.png[16:20]) // palette.PANEL_PIXELS  # the width in a PNG's header


def write(folder: Path, compared: Comparison, wanted: str | None, bench: Sequence[Path] = ()) -> list[Path]:
    """Write runs, tables, figures, verdicts and report.html to `folder`; return the paths of the files.

    Outdated files of an earlier report are deleted. `wanted` names the baseline (see `comparison.baseline_of`), `bench`
    lists files or folders of benchmark results. The claims are read from claims.yaml in the folder if there is one,
    else they are the paper's. Raises ConfigError for a wrong baseline, benchmark or claim, OSError if a file cannot be
    written.
    """
    speed = speed_tables.tabulate_files(bench)
    stored = results.to_tables(compared.runs, compared.damaged, compared.arm_of)
    compared = comparison.compare(*results.from_tables(stored))  # use only what the files hold from here on
    baseline = comparison.baseline_of(compared.arms, wanted)
    file = folder / CLAIMS
    own_claims = claims.read(file, format_path(file), key="") if file.exists() else None
    rows = judge(compared.counted, compared.runs, own_claims)
    drawn = draw_all(compared, baseline)
    if figure := diagnostics.draw_effects(rows):
        caption = (
            "Intervals are over seeds and questions. The smallest effect that matters is on the side that the claim "
            "predicts, or on both. An arrow is an end that has no bound."
        )
        drawn = {"Effects": [Drawn("effects", "Effect of each contrast", palette.png(figure), caption)]} | drawn
    words = [format_path(folder), hydra_override("out", format_path(folder))]
    if wanted:
        words.append(hydra_override("baseline", wanted))
    if bench:
        words.append(f"bench={','.join(map(format_path, bench))}")
    line = f"python -m qerl_lab.report {shlex.join(words)}"
    files = {f"figures/{figure.name}.png": figure.png for titled in drawn.values() for figure in titled}
    files["verdicts.md"] = verdict_tables.markdown(compared, rows, line).encode()
    files["arms.csv"] = comparison.by_arm(compared, baseline).to_csv(index=False, float_format="%.6g").encode()
    files["report.html"] = html(compared, rows, baseline, drawn, speed, line, folder.resolve().name).encode()
    results.write(folder, stored)
    written = {folder / name for name in files}
    for name in OPTIONAL:
        for old in set(folder.glob(f"figures/{name}")) - written:
            old.unlink()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, data)
    return [folder / name for name in (results.RUNS, results.STEPS, results.QUESTIONS, *files)]


def draw_all(compared: Comparison, baseline: str | None) -> dict[str, list[Drawn]]:
    """Draw the figures of report.html; return the list of figures of each section, by the section's title.

    The sections are weight formats, each recorded curve with the paper's figures beside it, and diagnostics. Figures of
    speed, and figures by time, show only arms in which no run shared its machine.
    """
    arms, alone = compared.arms, compared.alone
    styles, firsts = palette.styles_of_arms(arms), [runs[0] for runs in arms.values()]  # a run of each arm
    drawn = defaultdict[str, list[Drawn]](list)
    for number, (title, group) in enumerate(list(curves.group_formats(compared).items())[:MOST_GROUPS], 1):
        name = f"formats{f'-{number}' if number > 1 else ''}-by-step"
        about = f"Reward, entropy and held-out accuracy of {', '.join(group)}"
        drawn["Weight formats"].append(Drawn(name, about, palette.png(curves.draw_formats(arms, group, title))))
    of_alone = curves.recorded_curves(alone)
    for curve in curves.recorded_curves(arms):
        is_speed = curve.metric.endswith("tokens_per_second")
        for by, chosen in ((curves.STEP, alone if is_speed else arms), (curves.CLOCK, alone)):
            if chosen is arms or curve in of_alone:
                about = f"{curve.title}, {curve.label}, {BY[by].replace('-', ' ')}"
                image = palette.png(curves.draw(chosen, curve, by, baseline, styles))
                drawn[curve.title].append(Drawn(f"{curve.name}-{BY[by]}", about, image))
        for figure in paper_curves.figures_below(curve.name, firsts):
            image, caption = palette.png(paper_curves.draw(figure)), paper_curves.caption(figure, firsts)
            drawn[curve.title].append(Drawn(figure.name, figure.about, image, caption))
    if passes := diagnostics.draw_pass_at_k(compared):
        caption = "95% intervals over seeds and questions, clipped to 0 and 1."
        drawn["Diagnostics"].append(Drawn("passes", "pass@k after training, by k", palette.png(passes), caption))
    if gains := diagnostics.draw_gains(compared):
        about, caption = "Initial entropy against gain, one point per run", f"One point per run. {gains[1]}"
        drawn["Diagnostics"].append(Drawn("entropy-and-gain", about, palette.png(gains[0]), caption))
    return dict(drawn)


def html(
    compared: Comparison, rows: Sequence[Row], baseline: str | None, figures: dict[str, list[Drawn]],
    speed: SpeedSection, command_line: str, title: str,
) -> str:  # fmt: skip
    """Render report.html, with the `figures` of `draw_all` inside; `rows` are the verdicts.

    `command_line` is the command that makes the page, `title` the name of the folder.
    """
    measured = [row for row in rows if row.numbers]
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "breakable": breakable, "base64": lambda png: base64.b64encode(png).decode(), "details": _list_details,
        "name_of": verdict_tables.name_of, "terms": verdict_tables.describe_measure,
    }  # fmt: skip
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=f"{title}: a report of {with_noun(len(compared.runs) + len(compared.damaged), 'run')}",
        command=command_line,
        facts=_list_counts(compared, Counter(row.verdict for row in measured)),
        notes=[*_list_gaps(compared), *comparison.notes(compared)],
        how_to_read_verdicts=verdict_tables.HOW_TO_READ,
        how_to_read=comparison.HOW_TO_READ, differences=comparison.describe_no_baseline(compared, baseline),
        families=verdict_tables.families(rows),
        measured=[list(own) for _, own in groupby(measured, lambda row: row.claim.name)],
        unmeasured=[row for row in rows if not row.numbers],
        without_runs=verdict_tables.contrasts_without_runs(rows),
        to_make=verdict_tables.missing_arms(rows), tables=tables(compared, baseline), speed=speed,
        of_paper=any(figure.name.startswith("paper_") for section in figures.values() for figure in section),
        figures=figures,
        provenance=_list_provenance(compared), arms_differ=comparison.tabulate_differing_settings(compared, "arm"),
        scales_differ=comparison.tabulate_scales(compared, "key"),
    )  # fmt: skip


def breakable(text: str) -> str:
    """Escape a text for HTML, and let long words break behind `=` and dots: `rollout.<wbr>engine=<wbr>vllm`."""
    return re.sub(r"\S{17,}", lambda word: re.sub(r"(?<=[a-z])\.(?=[a-z])|=", r"\g<0><wbr>", word[0]), escape(text))


def _list_counts(compared: Comparison, verdicts: Counter[Verdict]) -> list[tuple[int, str]]:
    """List (number, what is counted) for the head of the page: runs by state, arms, seeds, and contrasts by verdict."""

    def count(number: int, noun: str, rest: str = "") -> tuple[int, str]:
        return number, f"{noun if number == 1 else noun + 's'}{rest}"

    states = Counter("finished" if run.is_finished else run.status.split(" (")[0] for run in compared.runs)
    states["damaged"] = len(compared.damaged)
    again = states["finished"] - len(compared.counted)
    return [
        *(count(number, "run", f" {state}") for state, number in states.items() if number),
        *([(again, "of these repeated; the newest counts")] if again else []),
        count(len(compared.arms), "arm"),
        count(len({run.seed for run in compared.counted}), "seed"),
        *(count(verdicts[verdict], "contrast", f" {verdict}") for verdict in Verdict if verdicts[verdict]),
    ]


def _list_gaps(compared: Comparison) -> list[str]:
    """List up to two sentences: arms with unfinished runs (excluded from means), and arms without a finished run."""
    counts = [(started - len(compared.arms[label]), started, label) for label, started in compared.started.items()]
    short = [f"{lacking} of {started} of {label}" for lacking, started, label in counts if lacking]
    gaps = [f"Means exclude unfinished runs: {'; '.join(short)}."] if short else []
    if lost := {run.arm for run in compared.runs} - {run.arm for run in compared.counted}:
        names = sorted({run.experiment for run in compared.runs if run.arm in lost})
        gaps.append(f"Arms without a finished run: {', '.join(names)}.")
    return gaps


def _list_details(row: Row) -> list[tuple[str, str]]:
    """List the numbers behind a verdict as (label, text). Missing numbers are left out."""
    cells = verdict_tables.measured_cells(row)
    details = [
        (row.claim.measure, cells["effect"]),
        ("smallest that matters", row.claim.smallest_as_text),
        ("the paper's", cells["the paper's"]),
        (row.contrast.treated, cells["treated"]),
        (row.contrast.control, cells["control"]),
        ("finished", cells["finished / started"]),
        *((head, cells[head]) for head in (verdict_tables.P_VALUES, "guardrail")),
        ("conditions", verdict_tables.format_conditions(row.conditions)),
        ("claim", row.registered),
    ]
    return [(label, text) for label, text in details if text != NONE]


def _list_provenance(compared: Comparison) -> list[tuple[str, list[str]]]:
    """List where the compared results come from, as (title, texts).

    The titles are commands, code commits, machines, versions, times, and the runs left out. Titles without a text are
    dropped.
    """

    def with_counts(texts: Iterable[str]) -> list[str]:
        """List the distinct texts; `texts` has one per run. If several differ, add to each its number of runs."""
        counts = Counter(texts)
        if len(counts) == 1:
            return [text for text in counts if text]
        return [f"{text or 'not known'}  ({with_noun(count, 'run')})" for text, count in counts.items()]

    def format_time(seconds: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))

    origins = [run.origin for run in compared.runs]
    versions = [", ".join(f"{name} {text}" for name, text in sorted(origin.versions.items())) for origin in origins]
    began = [datetime.fromisoformat(run.origin.began).timestamp() for run in compared.counted if run.origin.began]
    first = f"The first began {format_time(min(began))}, the" if began else "The"
    times = [f"{first} last ended {format_time(max(run.ended for run in compared.counted))}."]
    listed = (
        ("Commands", with_counts(origin.command for origin in origins)),
        ("Code", with_counts(run.code for run in compared.runs)),
        ("Machines", with_counts(origin.machine for origin in origins)),
        ("Versions", with_counts(versions)),
        ("Time", times),
        (f"Left out, {len(compared.left_out)} in all", compared.left_out),
    )
    return [(title, texts) for title, texts in listed if texts]
