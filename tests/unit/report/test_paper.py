"""The paper's numbers and digitized curves as data, and the arms that its figures stand beside."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from qerl_lab.config.conf_folder import package_data
from qerl_lab.report import palette, paper_curves, reference
from qerl_lab.report.runs import Run

FOLDER = package_data("results/reference")


def test_every_row_has_a_source_and_a_certainty() -> None:
    rows = reference.paper_numbers()
    assert (rows[["table", "metric", "source"]] != "").all().all()
    assert set(rows["certainty"].str.extract(r"^(\w+)")[0]) == {"certain", "approx", "derived"}


def test_a_number_is_found_by_its_columns_or_refused() -> None:
    row = {"table": "Table 1", "model": "Qwen2.5-7B-Instruct", "metric": "accuracy"}
    assert reference.select_row(row | {"method": "QeRL +AQN"})["number"] == 90.8
    with pytest.raises(KeyError, match="10 numbers"):
        reference.select_row(row)
    with pytest.raises(KeyError, match="0 numbers"):
        reference.select_row(row | {"method": "QeRL", "weight_format": "BF16"})


def test_every_digitized_curve_has_a_row_with_its_reading_error() -> None:
    drawn = set[tuple[str, str]]()
    for path in (FOLDER / "digitized").glob("*.csv"):
        curve = pd.read_csv(path)
        assert curve.columns[0] in ("step", "stage")
        assert curve.iloc[:, 0].is_monotonic_increasing
        drawn |= {(path.stem, column) for column in curve.columns[1:]}
    curves = reference.curves()
    assert set(zip(curves["file"], curves["column"], strict=True)) == drawn
    assert (curves["error"] > 0).all()


def of_schedule(name: str, setting: str) -> dict[str, str]:
    return {"table": "Figure 9", "method": f"QeRL +AQN {name} decay", "setting": setting}


@pytest.mark.parametrize(("other", "expected"), [("linear", 0.004), ("cosine", 0.010), ("logarithmic", 0.028)])
def test_two_lines_of_a_figure_are_compared_where_both_are_known(other: str, expected: float) -> None:
    """Linear was not read at steps 145 and 150. Means of each line alone would cover different steps."""
    one, two = (of_schedule(name, reference.LAST_TENTH) for name in ("exponential", other))
    source, difference = reference.paper_effect(one, two, is_ratio=False)
    assert (round(difference, 3), source) == (expected, "Figure 9, +-0.006")
    read = reference.digitized("fig09_scheduler_3b")[["exponential", other]]
    table = read.interpolate("index", limit_area="inside").dropna()
    table = table[table.index > 0.9 * 150]
    assert difference == pytest.approx((table["exponential"] - table[other]).mean())


def test_a_number_found_without_its_table_and_metric_has_its_source_and_is_a_fraction() -> None:
    row = {"model": "Qwen2.5-3B-Instruct", "setting": "LoRA rank 32", "weight_format": "NVFP4"}
    with_aqn, without = ({**row, "method": method} for method in ("QeRL +AQN", "QeRL w/o AQN"))
    named = {"table": "Table 1", "metric": "accuracy"}
    expected = ("Table 1 3B", pytest.approx(0.004))
    assert reference.paper_effect(with_aqn | named, without | named, is_ratio=False) == expected
    assert reference.paper_effect(with_aqn, without, is_ratio=False) == expected


# --- curves


BASE = {"format.name": "nvfp4", "aqn.schedule": "off", "lora.rank": "16", "optim.learning_rate": "1e-05",
        "task.name": "gsm8k", "model.path": "models/pocket", "algorithm.name": "grpo"}  # fmt: skip


def arms(**changes: str) -> list[Run]:
    """Return an arm of `BASE` and one for each value in `changes`, as in `aqn__schedule="off,linear"`."""
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
def test_a_figure_stands_beside_arms_that_differ_in_the_setting_it_varies(
    changes: dict[str, str], reward: list[str], entropy: list[str], sigma: list[str]
) -> None:
    shown = {below: [figure.number for figure in paper_curves.figures_below(below, arms(**changes))] for below in
             ("reward", "entropy", "sigma", "sampler_entropy")}  # fmt: skip
    assert shown == {"reward": reward, "entropy": entropy, "sigma": sigma, "sampler_entropy": []}


@pytest.mark.parametrize("figure", paper_curves.FIGURES, ids=lambda figure: figure.name)
def test_every_line_has_the_digitized_points(figure: paper_curves.PaperFigure) -> None:
    drawn, table = paper_curves.draw(figure), reference.digitized(figure.file)
    assert len(drawn.axes) == len(figure.panels)
    for axis, lines in zip(drawn.axes, figure.panels, strict=True):
        assert [line.get_label() for line in axis.lines] == [*lines.values()]
        looks = {(line.get_linestyle(), line.get_marker()) for line in axis.lines}
        assert len(looks) == len(lines)  # they also differ in grey
        for line, column in zip(axis.lines, lines, strict=True):
            read = table[column].dropna()
            np.testing.assert_array_equal(line.get_xydata(), np.column_stack([read.index, read]))
    assert figure.model in drawn.axes[0].get_title(loc="left")
    assert figure.task in drawn.axes[0].get_title(loc="left")
    assert len(palette.png(drawn)) < 50_000


@pytest.mark.parametrize(("task", "shown"), [("gsm8k", "3B GSM8K"), ("bigmath", "7B BigMath"), ("arithmetic", "both")])
def test_arms_of_a_task_of_the_paper_stand_beside_figures_of_that_task_alone(task: str, shown: str) -> None:
    runs = [replace(run, settings={**run.settings, "task.name": task}) for run in arms(aqn__schedule="exponential")]
    found = [figure for figure in paper_curves.figures_below("reward", runs) if figure.number == "Figure 8"]
    both = ["3B GSM8K", "7B BigMath"]
    named = [f"{figure.model.removeprefix('Qwen2.5-')} {figure.task.split(',')[0]}" for figure in found]
    assert named == (both if shown == "both" else [shown])


def test_a_caption_names_model_and_task_of_both_and_says_if_the_tasks_differ() -> None:
    figure = paper_curves.FIGURES[2]
    both, other = paper_curves.caption(figure, arms(task__name="bigmath")), paper_curves.caption(figure, arms())
    assert both.startswith("The paper's Figure 7: Qwen2.5-7B, BigMath, DAPO, read to +-0.006. Ours above: model")
    assert both.endswith("bigmath/gsm8k, grpo.")
    assert other.endswith("Ours above, on another task: model pocket, gsm8k, grpo.")
    own = paper_curves.caption(figure, arms(task__module_hash="123456789abc"))
    assert own.endswith("model pocket, gsm8k/gsm8k with a task.module, grpo.")
