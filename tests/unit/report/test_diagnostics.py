"""Effects, pass@k, entropy against gain, entropy retained and collapse, by hand."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from qerl_lab.report import comparison, curves, diagnostics, palette, stats, verdicts
from qerl_lab.report.arm_tables import tables
from qerl_lab.report.claims import of_paper
from qerl_lab.report.comparison import Comparison
from qerl_lab.report.measures import MEASURES, Unmeasured, has_collapsed
from run_directories import make_run

# Right answers of four samples; a row is a seed, a column is a question.
RIGHT = {"bf16": [[0, 1, 2, 4], [1, 1, 3, 4], [0, 2, 2, 4]], "nvfp4": [[1, 1, 2, 4], [1, 2, 4, 4], [0, 2, 4, 4]]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("runs")
    for arm, seeds in RIGHT.items():
        for seed, right in enumerate(seeds):
            make_run(folder / f"{arm}-{seed}", arm, seed, before=[0.25] * 4, after=[count / 4 for count in right])
    return comparison.read([folder])


def test_pass_at_k_follows_from_the_samples_with_intervals_within_0_and_1(found: Comparison) -> None:
    passes, *_ = diagnostics.pass_at_each_k(found.arms["bf16"])
    assert list(passes) == [1, 2, 4]
    # C(4 - c, 2) / C(4, 2) is 1, 1/2, 1/6, 0, 0 for c = 0 to 4 right answers
    expected = np.array([[[0, 1 / 2, 5 / 6, 1, 1][count] for count in seed] for seed in RIGHT["bf16"]])
    mean, low, high = stats.over_seeds(expected)
    assert high > 1
    assert passes[2] == pytest.approx((mean, max(low, 0), 1))
    assert passes[1][0] == pytest.approx(np.mean(RIGHT["bf16"]) / 4)
    assert passes[4][0] == pytest.approx((np.array(RIGHT["bf16"]) > 0).mean())


def test_partly_right_answers_have_no_pass_at_k(found: Comparison) -> None:
    one, *others = found.arms["bf16"]
    partly = replace(one, accuracy={**one.accuracy, "after": one.accuracy["after"] + 0.1})
    with pytest.raises(Unmeasured, match="partly right"):
        diagnostics.pass_at_each_k([partly, *others])


def fallen(values: list[float], found: Comparison) -> bool:
    (one, *_) = found.arms["bf16"]
    weight = float(one.value("task.answer_reward"))
    steps = pd.DataFrame({"reward/answer": [value * weight for value in values]}, index=range(1, len(values) + 1))
    return has_collapsed(replace(one, steps=steps))


def test_a_run_has_collapsed_if_it_lost_half_of_its_best_tenth(found: Comparison) -> None:
    rise = [step / 20 for step in range(1, 21)]
    assert not fallen(rise, found)
    assert fallen([*rise[:-2], 0.4, 0.4], found)  # less than half of 0.875, the mean of 0.85 and 0.9
    assert not fallen([*rise[:-2], 0.44, 0.44], found)  # half of the best single step is 0.45


def test_a_table_has_the_retained_entropy_and_collapsed_runs_of_each_arm(found: Comparison) -> None:
    _, table, _ = tables(found, None)
    (row,) = (dict(zip(table.rows[0], cells, strict=True)) for cells in table.rows if cells[0] == "bf16")
    assert row["last / first"].startswith("0.57")  # four steps: 0.35 in the first, 0.2 in the last
    low, high = stats.share_interval(np.zeros(3), 1)[1:]
    assert row["runs that collapsed"] == f"0 of 3 [{low:.2f}, {high:.2f}]"
    certain = [replace(run, summary=run.summary | {"entropy_last": 0.0}) for run in found.arms["bf16"]]
    _, table, _ = tables(replace(found, arms={"bf16": certain}), None)
    assert "last / first" not in table.rows[0], "a geometric mean has no zero"


def test_every_figure_has_every_arm_in_the_color_of_its_format(found: Comparison) -> None:
    gains, said = diagnostics.draw_gains(found)
    for figure, of in ((diagnostics.draw_pass_at_k(found), " (n=3)"), (gains, "")):
        handles, labels = figure.axes[0].get_legend_handles_labels()
        assert labels == [f"bf16{of}", f"nvfp4{of}"]
        lines = [handle[0] if isinstance(handle, tuple) else handle for handle in handles]
        assert [line.get_color() for line in lines] == [palette.FORMATS[name] for name in ("bf16", "nvfp4")]
    assert said == ""  # all runs here begin at the same entropy


def test_pass_at_k_counts_the_questions_that_all_seeds_answered(found: Comparison) -> None:
    """In the second case bf16 has two seeds, and both were asked three of the four questions."""
    one, other, _ = found.arms["bf16"]
    fewer = replace(one, accuracy={phase: values.iloc[1:] for phase, values in one.accuracy.items()})
    for arms, seeds, questions in (
        (found.arms, 3, "4"), ({**found.arms, "bf16": [fewer, other]}, 2, "3 or 4"), ({"bf16": [fewer, other]}, 2, "3"),
    ):  # fmt: skip
        (axis,) = diagnostics.draw_pass_at_k(replace(found, arms=arms)).axes
        assert axis.get_title(loc="left") == f"pass@k after training, {questions} questions"
        assert axis.get_legend_handles_labels()[1][0] == f"bf16 (n={seeds})"


def test_arms_of_one_k_stay_apart_from_those_of_the_next(found: Comparison) -> None:
    """However many arms there are: with a fixed distance between them 60 arms mix, and 101 leave the axis."""
    many = {f"bf16 {number}": found.arms["bf16"] for number in range(101)}
    (axis,) = diagnostics.draw_pass_at_k(replace(found, arms=many)).axes
    x_of_arms = np.array([line.get_xdata() for line in axis.lines if line.get_marker() not in ("", "None", "_", "|")])
    assert x_of_arms.shape == (101, 3)  # k = 1, 2, 4
    assert x_of_arms.min() > 0
    assert (x_of_arms.max(axis=0)[:-1] < x_of_arms.min(axis=0)[1:]).all()


def test_a_correlation_within_arms_loses_a_degree_of_freedom_for_each_arm(found: Comparison) -> None:
    arms = {
        arm: [replace(run, summary=run.summary | {"entropy_first": 0.3 + run.seed**2 / 100}) for run in runs]
        for arm, runs in found.arms.items()
    }
    drawn = diagnostics.draw_gains(replace(found, arms=arms))
    assert drawn is not None
    over_all, within = drawn[1].rstrip(".").split(". ")
    for said, free in ((over_all, 6 - 3), (within, 6 - 2 - 2)):  # six runs; two arms
        value, low, high = (float(number) for number in re.findall(r"[+-]\d\.\d\d", said))
        half = 1.96 / math.sqrt(free)
        assert (low, high) == pytest.approx([math.tanh(math.atanh(value) + sign * half) for sign in (-1, 1)], abs=0.02)


def test_effects_have_a_panel_per_claim_and_the_papers_values_beside_them(found: Comparison) -> None:
    rows = verdicts.judge(found.counted, found.runs)
    measured = [row for row in rows if row.numbers]
    figure = diagnostics.draw_effects(rows)
    panels = {" ".join(axis.get_title(loc="left").split()): axis for axis in figure.axes if axis.axison}
    assert list(panels) == list(dict.fromkeys(f"Claim: {row.claim.says}" for row in measured))
    for title, axis in panels.items():
        own = [row for row in measured if title == f"Claim: {row.claim.says}"]
        labels = [" ".join(label.get_text().split()) for label in axis.get_yticklabels()]
        assert labels == [row.contrast.name for row in own]
        dots = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == "o"]
        assert dots == [row.numbers.effect[0] for row in own]
        diamonds = [value for line in axis.lines if line.get_marker() == "D" for value in line.get_xdata()]
        assert diamonds == [value for row in own for _, value in row.contrast.printed]
        heights = [{y for line in axis.lines if line.get_marker() == mark for y in line.get_ydata()} for mark in "oD"]
        assert not set.intersection(*heights), "an equal effect of the paper would hide the measured one"
    assert any(row.contrast.printed for row in measured)
    assert diagnostics.draw_effects([row for row in rows if not row.numbers]) is None


def test_a_contrast_with_too_few_seeds_for_a_verdict_is_an_open_circle(found: Comparison) -> None:
    row = next(row for row in verdicts.judge(found.counted, found.runs) if row.numbers)
    for seeds, is_open in ((row.claim.file.seeds, False), (row.claim.file.seeds - 1, True)):
        figure = diagnostics.draw_effects([replace(row, numbers=replace(row.numbers, seeds=seeds))])
        (circle,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
        assert (circle.get_markerfacecolor() == "white") == is_open
        names = [text.get_text() for text in figure.legends[0].get_texts()]
        assert ("too few seeds for a verdict" in names) == is_open


def test_an_end_without_a_bound_is_an_arrow_and_a_ratio_has_no_unit(found: Comparison) -> None:
    row = next(row for row in verdicts.judge(found.counted, found.runs) if row.numbers)
    mean, low, _ = row.numbers.effect
    unbounded = replace(row, numbers=replace(row.numbers, effect=(mean, low, math.inf)))
    axis = diagnostics.draw_effects([unbounded]).axes[0]
    (arrow,) = axis.texts
    assert (arrow.xy, arrow.xyann) == ((1, 0), (mean, 0))
    assert axis.get_xlabel().endswith("treated - control, nats")
    measure = next(name for name, measure in MEASURES.items() if measure.is_ratio)
    ratio = replace(row, claim=replace(row.claim, measure=measure, smallest=1.1))
    assert diagnostics.draw_effects([ratio]).axes[0].get_xlabel().endswith("treated / control")


@pytest.mark.parametrize(("is_ratio", "direction", "expected"), [
    (False, 1, [0.0, 0.25]), (False, -1, [0.0, -0.25]), (False, 0, [0.0, -0.25, 0.25]),
    (True, 1, [1.0, 1.25]), (True, -1, [1.0, 0.8]), (True, 0, [1.0, 0.8, 1.25]),
])  # fmt: skip
def test_no_effect_and_the_smallest_that_matters_are_lines(
    found: Comparison, is_ratio: bool, direction: int, expected: list[float]
) -> None:
    row = next(row for row in verdicts.judge(found.counted, found.runs) if row.numbers)
    measure = next(name for name, measure in MEASURES.items() if measure.is_ratio == is_ratio)
    claim = replace(row.claim, measure=measure, direction=direction, smallest=1.25 if is_ratio else 0.25)
    axis = diagnostics.draw_effects([replace(row, claim=claim)]).axes[0]
    upright = [line.get_xdata()[0] for line in axis.lines if list(line.get_ydata()) == [0, 1]]
    assert upright == pytest.approx(expected)


def test_names_of_contrasts_break_between_words_and_rows_are_as_high_as_their_claims(found: Comparison) -> None:
    row = next(row for row in verdicts.judge(found.counted, found.runs) if row.numbers)
    claims = [replace(row, claim=replace(row.claim, name=name)) for name in ("a", "a", "a", "a", "b", "c", "d")]
    rate = (("optim.learning_rate", "0.0006"),)
    figure = diagnostics.draw_effects([replace(one, context=rate) for one in claims])
    assert figure.axes[0].get_yticklabels()[0].get_text() == "nvfp4 against bf16\n(optim.learning_rate=0.0006)"
    figure.canvas.draw()
    tall, low = (figure.axes[number].get_window_extent().height for number in (0, 3))
    assert tall > 2.5 * low


@pytest.mark.parametrize("panels", [1, 3])
def test_effects_name_their_marks_and_no_label_is_cut(found: Comparison, panels: int) -> None:
    rows = [row for row in verdicts.judge(found.counted, found.runs) if row.numbers]
    claims = list(dict.fromkeys(row.claim.name for row in rows))[:panels]
    longest = max(MEASURES, key=lambda name: len(MEASURES[name].meaning))
    says = max((claim.says for claim in of_paper()), key=len)
    rows = [
        replace(row, claim=replace(row.claim, measure=longest, says=says), context=(("optim.learning_rate", "0.0006"),))
        for row in rows if row.claim.name in claims
    ]  # fmt: skip
    figure = diagnostics.draw_effects(rows)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:2] == ["measured, 95% interval", "smallest effect that matters"]
    figure.canvas.draw()
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    axes = [axis for axis in figure.axes if axis.axison]
    assert len(axes) == panels
    for axis in axes:
        title = next(text for text in axis.findobj(Text) if text.get_text().startswith("Claim"))
        for text in (title, axis.xaxis.label):
            label = text.get_window_extent()
            assert figure.bbox.x0 <= label.x0
            assert label.x1 <= figure.bbox.x1
            assert label.y0 >= figure.bbox.y0
            assert label.y1 <= figure.bbox.y1


def test_a_format_that_no_longer_exists_comes_last(found: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(palette, "FORMATS", {"nvfp4": palette.FORMATS["nvfp4"]})
    ((_, formats),) = curves.group_formats(found).items()
    assert list(formats) == ["nvfp4", "bf16"]


def test_the_group_with_most_runs_is_first_among_groups_with_equally_many_formats(tmp_path: Path) -> None:
    for rate, seeds in ((3e-5, 1), (1e-4, 2), (3e-4, 1)):
        for name in ("bf16", "nvfp4"):
            for seed in range(seeds):
                make_run(tmp_path / f"{name}{rate}{seed}", name, seed, optim__learning_rate=rate)
    titles = list(curves.group_formats(comparison.read([tmp_path])))
    assert titles == [f"optim.learning_rate={rate}" for rate in ("0.0001", "3e-05", "0.0003")]


def test_arms_with_noise_that_differ_only_in_format_make_no_figure_of_formats(tmp_path: Path) -> None:
    for name in ("nvfp4", "mxfp4"):
        make_run(tmp_path / name, "nvfp4_aqn", 0, format__name=name)
    assert curves.group_formats(comparison.read([tmp_path])) == {}


def test_the_formats_are_in_one_figure_with_reward_entropy_and_accuracy(found: Comparison) -> None:
    ((title, formats),) = curves.group_formats(found).items()
    assert (title, formats) == ("", {"bf16": "bf16", "nvfp4": "nvfp4"})
    figure = curves.draw_formats(found.arms, formats, title)
    assert [axis.get_ylabel() for axis in figure.axes][:2] == ["mean reward of a step", "nats per token"]
    for axis in figure.axes:
        assert {line.get_color() for line in axis.lines} == {palette.FORMATS[name] for name in formats}
        assert len(axis.collections) == len(formats)  # the intervals over seeds


def test_curves_of_formats_have_the_accuracy_that_was_measured_during_training(found: Comparison) -> None:
    """With a subset, accuracy on all questions was measured only before and after training."""
    ((title, formats),) = curves.group_formats(found).items()
    figures = []
    for metrics in (["eval/accuracy"], ["eval/accuracy", "eval/subset_accuracy"]):
        arms = {
            arm: [
                replace(run, steps=run.steps.assign(**dict.fromkeys(metrics, run.steps["reward/mean"]))) for run in runs
            ]
            for arm, runs in found.arms.items()
        }
        figures.append(curves.draw_formats(arms, formats, title))
    assert [figure.axes[2].get_title(loc="left") for figure in figures] == [
        "Held-out accuracy, all questions", "Held-out accuracy, the first questions",
    ]  # fmt: skip
