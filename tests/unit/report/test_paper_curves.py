"""The paper's curves beside ours: which figure answers to which arms, and that what is drawn is what was read."""

from dataclasses import replace

import numpy as np
import pytest

from qerl_lab.report import palette, paper_curves, reference
from qerl_lab.report.runs import Run

BASE = {"format.name": "nvfp4", "aqn.schedule": "off", "lora.rank": "16", "optim.learning_rate": "1e-05",
        "task.name": "gsm8k", "model.path": "models/pocket", "algorithm.name": "grpo"}  # fmt: skip


def arms(**changes: str) -> list[Run]:
    """An arm of `BASE`, and one for each value that `aqn__schedule="off,linear"` names."""
    found = [BASE] + [
        BASE | {key.replace("__", "."): value} for key, values in changes.items() for value in values.split(",")
    ]
    return [Run(str(n), "x", 0, settings, frozenset(), "finished", 0.0, "c") for n, settings in enumerate(found)]


@pytest.mark.parametrize(
    ("changes", "reward", "entropy", "sigma"),
    [
        ({}, [], [], []),
        ({"format__name": "bf16"}, ["Figure 4, upper row", "Figure 4, lower row"], ["Figure 5"], []),
        ({"aqn__schedule": "exponential"}, ["Figure 8"], [], []),
        ({"aqn__schedule": "exponential,linear"}, ["Figure 8", "Figure 9"], [], ["Figure 15"]),
        ({"lora__rank": "32"}, ["Figure 10"], [], []),
        ({"optim__learning_rate": "3e-05"}, ["Figure 16", "Figure 17"], [], []),
        ({"task__name": "bigmath"}, ["Figure 7", "Figure 7", "Figure 13"], [], []),
    ],
)
def test_a_figure_stands_beside_arms_that_differ_in_what_it_varies(
    changes: dict[str, str], reward: list[str], entropy: list[str], sigma: list[str]
) -> None:
    shown = {below: [figure.number for figure in paper_curves.figures_beside(below, arms(**changes))] for below in
             ("reward", "entropy", "sigma", "sampler_entropy")}  # fmt: skip
    assert shown == {"reward": reward, "entropy": entropy, "sigma": sigma, "sampler_entropy": []}


@pytest.mark.parametrize("figure", paper_curves.FIGURES, ids=lambda figure: figure.name)
def test_every_line_is_what_was_read_point_by_point(figure: paper_curves.PaperFigure) -> None:
    drawn, table = paper_curves.draw(figure), reference.digitized(figure.file)
    assert len(drawn.axes) == len(figure.panels)
    for axis, lines in zip(drawn.axes, figure.panels, strict=True):
        assert [line.get_label() for line in axis.lines] == [*lines.values()]
        looks = {(line.get_linestyle(), line.get_marker()) for line in axis.lines}
        assert len(looks) == len(lines)  # told apart in grey
        for line, column in zip(axis.lines, lines, strict=True):
            read = table[column].dropna()
            np.testing.assert_array_equal(line.get_xydata(), np.column_stack([read.index, read]))
    assert figure.model in drawn.axes[0].get_title(loc="left")
    assert figure.task in drawn.axes[0].get_title(loc="left")
    assert len(palette.png(drawn)) < 50_000


@pytest.mark.parametrize(("task", "shown"), [("gsm8k", "3B GSM8K"), ("bigmath", "7B BigMath"), ("arithmetic", "both")])
def test_arms_of_a_task_of_the_paper_stand_beside_figures_of_that_task_alone(task: str, shown: str) -> None:
    runs = [replace(run, settings={**run.settings, "task.name": task}) for run in arms(aqn__schedule="exponential")]
    found = [figure for figure in paper_curves.figures_beside("reward", runs) if figure.number == "Figure 8"]
    both = ["3B GSM8K", "7B BigMath"]
    named = [f"{figure.model.removeprefix('Qwen2.5-')} {figure.task.split(',')[0]}" for figure in found]
    assert named == (both if shown == "both" else [shown])


def test_a_caption_says_what_both_are_of_and_whether_ours_are_of_another_task() -> None:
    figure = paper_curves.FIGURES[2]
    both, other = paper_curves.caption(figure, arms(task__name="bigmath")), paper_curves.caption(figure, arms())
    assert both.startswith("The paper's Figure 7: Qwen2.5-7B, BigMath, DAPO, read to +-0.006. Ours above: model")
    assert both.endswith("bigmath/gsm8k, grpo.")
    assert other.endswith("Ours above, on another task: model pocket, gsm8k, grpo.")
