"""Curves of arms: seeds, mean and interval, by step and by time; panels and colors of arms."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from qerl_lab.config.conf_folder import choices_of
from qerl_lab.record.metrics import encode_line
from qerl_lab.report import comparison, curves, palette, paper_curves
from qerl_lab.report.runs import FINISHED, Run
from qerl_lab.report.stats import band_over_seeds, over_seeds
from run_directories import make_run

REWARD = next(curve for curve in curves.CURVES if curve.name == "reward")


def points(arms: list[str], seeds: int = 3, steps: int = 30, metric: str = "reward/mean") -> pd.DataFrame:
    """Return a table in which seed s of an arm has the value step + s and takes 2 + s seconds a step."""
    return pd.DataFrame([
        {"run_id": f"{arm}-{seed}", "arm": arm, "metric": metric, "step": step, "seconds": (2.0 + seed) * step,
         "value": float(step + seed)}
        for arm in arms for seed in range(seeds) for step in range(1, steps + 1)
    ])  # fmt: skip


def draw(table: pd.DataFrame, curve: curves.Curve, by: str, baseline: str | None) -> Figure:
    """Draw the arms of a table. The name of an arm begins with its format, as in `nvfp4_aqn`."""
    arms: dict[str, list[Run]] = {}
    for (arm, name), rows in table.set_index("step").groupby(["arm", "run_id"], sort=False):
        seconds = rows["seconds"].diff().fillna(rows["seconds"])
        steps = pd.DataFrame({rows["metric"].iloc[0]: rows["value"], "step/seconds": seconds})
        run = Run(name, arm, int(name[-1]), {}, frozenset(), FINISHED, ended=0.0, code="", steps=steps)
        arms.setdefault(arm, []).append(run)
    return curves.draw(arms, curve, by, baseline, palette.styles({arm: arm.partition("_")[0] for arm in arms}))


def means(axis: Axes) -> list:
    return [line for line in axis.lines if not line.get_label().startswith("_")]


def test_each_seed_is_drawn_unsmoothed_and_the_mean_has_the_interval_over_seeds() -> None:
    (axis,) = draw(points(["bf16"]), REWARD, curves.STEP, None).axes
    *seeds, _, mean = axis.lines  # _: the markers of the mean
    assert [list(line.get_ydata()) for line in seeds] == [[step + seed for step in range(1, 31)] for seed in range(3)]
    assert all(line.get_linewidth() < mean.get_linewidth() / 2 for line in seeds)
    assert list(mean.get_ydata()) == [step + 1 for step in range(1, 31)]
    assert mean.get_label() == "bf16 (n=3)"
    (band,) = axis.collections
    corners = band.get_paths()[0].vertices
    _, low, high = over_seeds(np.array([[1.0], [2.0], [3.0]]))
    at_one = corners[corners[:, 0] == 1][:, 1]
    assert (at_one.min(), at_one.max()) == (pytest.approx(low), pytest.approx(high))


def test_the_mean_by_step_covers_the_steps_that_every_seed_has() -> None:
    table = points(["bf16"])
    table = table[(table["run_id"] != "bf16-2") | (table["step"] % 10 == 0)]  # such as an evaluation every ten steps
    (axis,) = draw(table, REWARD, curves.STEP, None).axes
    (mean,) = means(axis)
    assert mean.get_xydata().tolist() == [[10, 11], [20, 21], [30, 31]]


def test_the_axis_of_a_speed_begins_at_zero() -> None:
    speed = next(curve for curve in curves.CURVES if curve.name == "throughput")
    table = points(["bf16"], metric=speed.metric)
    (axis,) = draw(table.assign(value=table["value"] + 1000), speed, curves.STEP, None).axes
    assert axis.get_ylim()[0] == 0


def test_one_seed_has_a_line_and_no_interval() -> None:
    (axis,) = draw(points(["bf16"], seeds=1), REWARD, curves.CLOCK, None).axes
    assert (len(means(axis)), len(axis.collections)) == (1, 0)
    assert len(means(axis)[0].get_xdata()) == 30


def test_a_path_with_dollar_signs_in_the_name_of_an_arm_is_not_read_as_a_formula() -> None:
    """matplotlib would refuse the second name, and draw the first without `$` and with a subscript."""
    names = [r"bf16_(model.path=$my_model$)", r"nvfp4_(model.path=$\price$)"]
    figure = draw(points(names, seeds=1, steps=3), REWARD, curves.STEP, None)
    figure.canvas.draw()
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [f"{name} (n=1)" for name in names]
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_a_figure_of_one_step_has_a_tick_at_that_step() -> None:
    (axis,) = draw(points(["bf16"], seeds=1, steps=1), REWARD, curves.STEP, None).axes
    assert [tick for tick in axis.get_xticks() if 0.9 < tick < 1.1] == [1]


def test_arms_with_equal_values_have_markers_at_different_steps_above_every_line() -> None:
    arms = ["bf16", "nvfp4", "mxfp4", "nf4"]  # as with the sigma of a schedule, which all formats share
    (axis,) = draw(points(arms, seeds=1, steps=50), REWARD, curves.STEP, "bf16").axes
    marked = [line for line in axis.lines if line.get_linestyle() == "None"]
    assert [len(line.get_xdata()) for line in marked] == [10] * len(arms)
    assert len({step for line in marked for step in line.get_xdata()}) == 10 * len(arms)
    assert min(line.get_zorder() for line in marked) > max(line.get_zorder() for line in means(axis))


def test_the_mean_by_time_covers_the_times_that_every_seed_has() -> None:
    """Seed 0 ends after 50 s, seed 2 begins at 4 s; at 12 s the three are at steps 6, 4 and 3."""
    (axis,) = draw(points(["bf16"], steps=25), REWARD, curves.CLOCK, None).axes
    (mean,) = means(axis)
    x, y = mean.get_data()
    assert (x[0], x[-1]) == (pytest.approx(4), pytest.approx(50))
    assert np.interp(12, x, y) == pytest.approx((6 + 5 + 5) / 3, abs=1e-2)
    assert axis.get_xlabel() == "seconds of training steps"


@pytest.mark.parametrize(("seconds", "label", "end"), [
    (119, "seconds", 119), (120, "minutes", 2), (7199, "minutes", 7199 / 60), (7200, "hours", 2),
])  # fmt: skip
def test_times_are_in_the_unit_of_the_axis_label(seconds: int, label: str, end: float) -> None:
    table = points(["bf16"], seeds=1, steps=2)
    (axis,) = draw(table.assign(seconds=table["step"] * seconds / 2), REWARD, curves.CLOCK, None).axes
    assert axis.get_xlabel() == f"{label} of training steps"
    assert means(axis)[0].get_xdata()[-1] == pytest.approx(end)


ACCURACY = next(curve for curve in curves.CURVES if curve.name == "accuracy")


def accuracies(arms: list[str], steps: tuple[int, ...]) -> pd.DataFrame:
    """Return a table in which seed s of an arm has the accuracy step / 100 + s / 10."""
    table = points(arms, metric="eval/accuracy")
    table = pd.concat([table[table["step"] == 1].assign(step=0, seconds=0.0), table])
    return table[table["step"].isin(steps)].assign(
        value=lambda rows: rows["step"] / 100 + rows["run_id"].str[-1].astype(int) / 10
    )


def test_accuracy_before_and_after_has_two_points_with_intervals_and_no_curve_between() -> None:
    table = accuracies(["bf16", "nvfp4"], (0, 30))
    (axis,) = draw(table, ACCURACY, curves.STEP, "bf16").axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["before", "after"]
    assert axis.get_xlabel() == "training"
    lines = means(axis)
    assert [list(line.get_ydata()) for line in lines] == [[pytest.approx(0.1), pytest.approx(0.4)]] * 2
    assert {line.get_linestyle() for line in lines} == {":"}
    assert [list(line.get_xdata().round()) for line in lines] == [[0, 1]] * 2
    assert lines[0].get_xdata()[0] < lines[1].get_xdata()[0]  # beside each other
    segments = axis.collections[0].get_segments()
    _, low, high = band_over_seeds(np.array([[0.0, 0.3], [0.1, 0.4], [0.2, 0.5]]))
    drawn = [(segment[:, 1].min(), segment[:, 1].max()) for segment in segments]
    assert drawn == [pytest.approx(end) for end in zip(np.clip(low, 0, 1), high, strict=True)]
    (axis,) = draw(table, ACCURACY, curves.CLOCK, "bf16").axes
    assert list(means(axis)[0].get_xdata()) == [0, pytest.approx(1.5)]  # seeds end after 60, 90 and 120 s
    assert axis.get_xlabel() == "minutes of training steps: before and after them"
    (axis,) = draw(accuracies(["bf16", "nvfp4"], (0, 15, 30)), ACCURACY, curves.STEP, "bf16").axes
    assert axis.get_xlabel() == "step"  # also measured in between, so a line is drawn
    assert {line.get_linestyle() for line in means(axis)} == {"-"}


def test_an_accuracy_after_training_shows_its_whole_interval_with_both_caps() -> None:
    table = accuracies(["bf16"], (0, 30))  # the interval is more than a quarter wider than the values
    (axis,) = draw(table, ACCURACY, curves.STEP, "bf16").axes
    (interval,) = axis.containers
    caps = [end for line in interval.lines[1] for end in line.get_ydata()]
    low, high = axis.get_ylim()
    assert low <= min(caps)
    assert max(caps) <= high
    assert not any(line.get_clip_on() for line in interval.lines[1])  # a cap at 0 or 1 is on the panel's edge


@pytest.mark.parametrize(("arms", "panels", "columns"), [(4, 1, 1), (5, 2, 2), (7, 3, 3), (8, 4, 2), (10, 5, 3)])
def test_many_arms_make_a_figure_that_is_wider_than_high(arms: int, panels: int, columns: int) -> None:
    names = ["bf16", *(f"nvfp4_{number}" for number in range(arms - 1))]
    figure = draw(points(names, steps=4), REWARD, curves.STEP, "bf16")
    assert len(figure.axes) == panels
    drawn = [line.get_label().partition(" ")[0] for axis in figure.axes for line in means(axis)]
    assert [arm for arm in drawn if arm != "bf16"] == names[1:]
    width, height = figure.get_size_inches()
    assert width == pytest.approx(4.4 * columns)
    assert width > height
    assert sum(bool(axis.get_ylabel()) for axis in figure.axes) == -(-panels // columns)  # at the left of each row


@pytest.mark.parametrize(("arms", "panels"), [
    ("bf16 bf16_1 bf16_2 bf16_3 mxfp4 mxfp4_1 nf4 nvfp4 nvfp4_1 nvfp4_2 nvfp4_3",
     ["bf16 bf16_1 bf16_2 bf16_3", "mxfp4 mxfp4_1", "nf4", "nvfp4 nvfp4_1", "nvfp4_2 nvfp4_3"]),
    ("bf16 fp8 mxfp4 nf4 nvfp4", ["fp8 mxfp4", "nf4 nvfp4"]),  # each format has one arm
    # as `aqn=linear, format.name=bf16`, `aqn=linear, format.name=nvfp4`, `aqn=off, format.name=bf16` ... are sorted
    ("bf16_1 nvfp4 bf16_2 nvfp4_1 bf16_3 nvfp4_2", ["bf16_1 bf16_2 bf16_3", "nvfp4 nvfp4_1 nvfp4_2"]),
    # one format; two arms share the color of their schedule
    ("nvfp4 nvfp4_1 nvfp4_linear nvfp4_linear_1 nvfp4_2", ["nvfp4", "nvfp4_1 nvfp4_linear", "nvfp4_linear_1 nvfp4_2"]),
])  # fmt: skip
def test_arms_of_one_format_share_panels_in_any_order(arms: str, panels: list[str]) -> None:
    """The baseline, if there is one, is in each panel."""
    figure = draw(points(arms.split(), seeds=1, steps=2), REWARD, curves.STEP, "bf16")
    first = ["bf16"] if "bf16" in arms.split() else []
    drawn = [[line.get_label().partition(" ")[0] for line in means(axis)] for axis in figure.axes]
    assert drawn == [[*first, *(arm for arm in panel.split() if arm != "bf16")] for panel in panels]


def test_no_two_arms_of_a_report_look_alike() -> None:
    looks = palette.styles({"bf16": "bf16"} | {f"nvfp4_{number}": "nvfp4" for number in range(36)})
    assert len({tuple(look.values()) for look in looks.values()}) == len(looks)
    ten = [*looks.values()][:10]  # they also differ as points, which have no dashes
    assert len({(look["color"], look["marker"]) for look in ten}) == len(ten)


def test_times_are_the_summed_seconds_of_the_steps(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "bf16", 0)
    arms = comparison.read([tmp_path]).arms
    (axis,) = curves.draw(arms, REWARD, curves.CLOCK, None, palette.styles_of_arms(arms)).axes
    assert list(means(axis)[0].get_xdata()) == [2, 4, 6, 8]


def test_an_accuracy_has_the_same_interval_as_in_the_tables(tmp_path: Path) -> None:
    """Two seeds with equal answers have no spread, but their questions have one."""
    for seed in (0, 1):
        run = make_run(tmp_path / str(seed), "bf16", seed, before=[0.0, 1.0, 1.0, 0.0], after=[1.0] * 4)
        metrics = run / "metrics.jsonl"
        lines = encode_line(0, {"eval/accuracy": 0.5}), metrics.read_bytes(), encode_line(4, {"eval/accuracy": 1.0})
        metrics.write_bytes(b"".join(lines))
    found = comparison.read([tmp_path])
    (row,) = comparison.by_arm(found, None).to_dict("records")
    (axis,) = curves.draw(found.arms, ACCURACY, curves.STEP, None, palette.styles_of_arms(found.arms)).axes
    assert list(means(axis)[0].get_ydata()) == [row["accuracy_before"], row["accuracy_after"]]
    drawn = [list(segment[:, 1]) for segment in axis.collections[0].get_segments()]
    tabulated = [[row[f"accuracy_{phase}{end}"] for end in ("_low", "_high")] for phase in ("before", "after")]
    assert drawn == [pytest.approx(ends) for ends in tabulated]
    assert row["accuracy_before_low"] < row["accuracy_before"]
    (axis,) = curves.draw(found.arms, ACCURACY, curves.CLOCK, None, palette.styles_of_arms(found.arms)).axes
    assert list(means(axis)[0].get_xdata()) == [0, 8], "step 0 has no seconds of training"


def test_an_arm_without_noise_has_no_line_of_sigma() -> None:
    (sigma,) = (curve for curve in curves.CURVES if curve.metric == "noise/sigma")
    table = points(["bf16", "nvfp4_aqn"], metric=sigma.metric)
    table.loc[table["arm"] == "bf16", "value"] = 0.0
    (axis,) = draw(table, sigma, curves.STEP, "bf16").axes
    assert [line.get_label() for line in means(axis)] == ["nvfp4_aqn (n=3)"]
    silent = {
        "bf16": [Run("a", "bf16", 0, {}, frozenset(), FINISHED, 0.0, "", steps=pd.DataFrame({sigma.metric: [0]}))]
    }
    assert curves.recorded_curves(silent) == []


def test_a_format_has_one_color_in_our_figures_and_the_papers() -> None:
    """Dashes and hollow markers mark noise. If all arms have one format, only the first has its color."""
    looks = palette.styles({"a": "bf16", "nvfp4": "nvfp4", "nvfp4_aqn": "nvfp4", "mxfp4": "mxfp4", "nf4": "nf4"})
    assert looks["nvfp4"]["color"] == looks["nvfp4_aqn"]["color"]
    assert looks["nvfp4"]["linestyle"] != looks["nvfp4_aqn"]["linestyle"]
    assert len({style["color"] for style in looks.values()}) == 4
    (of_formats,) = (one for one in paper_curves.FIGURES if one.number == "Figure 5")
    drawn = {line.get_label().lower(): line.get_color() for line in paper_curves.draw(of_formats).axes[0].lines}
    assert drawn == {name: palette.FORMATS[name] for name in ("nvfp4", "nf4", "mxfp4", "bf16")}
    with palette.styled():
        assert not {*palette.plt.rcParams["axes.prop_cycle"].by_key()["color"]} & {*palette.KNOWN.values()}
    alike = palette.styles(dict.fromkeys(("rank 16", "rank 32", "rank 64"), "nvfp4"))
    shades = [style["color"] for style in alike.values()]
    assert shades[0] == palette.FORMATS["nvfp4"]
    assert len(set(shades)) == 3
    assert not set(shades[1:]) & set(palette.FORMATS.values())


def test_every_format_has_a_color_that_nothing_else_has() -> None:
    """`color` gives any other format the same gray."""
    assert set(palette.FORMATS) == set(choices_of("format")), "add a color to NEW in report/palette.py"
    shades = [*palette.KNOWN.values(), *palette.NEW, *palette.OTHERS]
    assert len({*shades}) == len(shades), "two have the same color"
    assert {*palette.SCHEDULES.values()} <= {*palette.OTHERS}


def test_only_plain_arms_of_a_format_have_filled_markers_in_any_order(tmp_path: Path) -> None:
    for number, (arm, rate) in enumerate([("bf16", 1e-5), ("bf16", 1e-6), ("nvfp4_aqn", 1e-5), ("nvfp4_aqn", 1e-6)]):
        make_run(tmp_path / str(number), arm, 0, optim__learning_rate=rate)
    make_run(tmp_path / "hot", "bf16", 0, optim__learning_rate=1e-5, rollout__temperature=1.2)
    looks = palette.styles_of_arms(comparison.read([tmp_path]).arms)
    assert len(looks) == 5
    hollow = {arm for arm, look in looks.items() if look["markerfacecolor"] == "white"}
    assert hollow == {arm for arm in looks if "aqn" in arm or "temperature=1.2" in arm}


def test_a_noise_schedule_has_one_color_in_our_figures_and_the_papers() -> None:
    arms = [f"aqn={name}" for name in ("adaptive", "cosine", "exponential", "kl", "linear", "logarithmic", "off")]
    looks = palette.styles(dict.fromkeys(arms, "nvfp4"))
    assert len({style["color"] for style in looks.values()}) == len(arms)
    few = [style["color"] for style in palette.styles(dict.fromkeys(["adaptive", "kl", "linear"], "nvfp4")).values()]
    assert not {*few[:2]} & {*palette.SCHEDULES.values()}
    ours = {arm.removeprefix("aqn="): style["color"] for arm, style in looks.items()}
    for figure in (one for one in paper_curves.FIGURES if one.varies == "schedule"):
        drawn = {line.get_label().split()[0]: line.get_color() for line in paper_curves.draw(figure).axes[0].lines}
        assert drawn == {name: ours[name] for name in palette.SCHEDULES}


def test_a_schedule_called_like_another_and_more_has_a_color_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["cosine", "cosine_restarts", "off"]
    monkeypatch.setattr(palette, "choices_of", lambda group: names)
    looks = palette.styles({f"aqn={name}": "nvfp4" for name in names})
    assert looks["aqn=cosine"]["color"] == palette.SCHEDULES["cosine"]
    assert len({style["color"] for style in looks.values()}) == len(names)


def test_a_png_of_few_colors_shows_lines_and_bands_nearly_as_drawn() -> None:
    colors, steps = [*palette.FORMATS.values(), *palette.OTHERS], np.arange(60)
    with palette.styled():
        figure, axis = palette.plt.subplots()
        for number, line_color in enumerate(colors):
            wave = number + 3 * np.sin(steps / (number + 2))
            axis.plot(steps, wave, color=line_color)
            axis.fill_between(steps, wave - 1, wave + 1, color=line_color, alpha=0.15, linewidth=0)
        whole = io.BytesIO()
        figure.savefig(whole, dpi=palette.DPI)
    small = io.BytesIO(palette.png(figure))
    drawn, shown = (np.asarray(Image.open(file).convert("RGB"), int) for file in (whole, small))
    flat, counts = np.unique(drawn.reshape(-1, 3), axis=0, return_counts=True)
    for color in flat[counts.argsort()[-40:]]:  # background, lines, bands and what lies on bands
        assert abs(shown[(drawn == color).all(2)] - color).max() <= 6  # of 255
    assert len(small.getvalue()) < len(whole.getvalue()) / 2


def test_an_interval_of_shares_is_cut_at_0_and_1() -> None:
    table = points(["bf16"], seeds=2, metric="eval/accuracy")
    table["value"] = table["run_id"].str.endswith("1").map({True: 0.9, False: 0.5})
    (axis,) = draw(table, ACCURACY, curves.STEP, "bf16").axes
    corners = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (corners.min(), corners.max()) == (0, 1)
