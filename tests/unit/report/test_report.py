"""The record of a run becomes numbers, figures and closing words."""

import itertools
import math
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared_metrics, encode_line
from qerl_lab.report import comparison, curves, palette, plots, run_summary, runs
from qerl_lab.report.__main__ import COMMAND as report_command
from qerl_lab.report.__main__ import ReportOptions
from qerl_lab.tools.export import COMMAND as export_command
from qerl_lab.tools.export import ExportOptions
from qerl_lab.tools.samples import COMMAND as sample_command
from run_directories import make_run, metrics_of

# --- a run directory


STEPS = {step: metrics_of(step, steps=20) for step in range(1, 21)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    lines = [encode_line(0, {"eval/accuracy": 0.25}), *(encode_line(*line) for line in STEPS.items())]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines, encode_line(20, {"eval/accuracy": 0.5})]))
    before = pd.DataFrame({"id": list("abcd"), "accuracy": [0.0, 0.5, 1.0, 0.25], "sample": ["x", "", "ü", "\n"]})
    after = before.assign(accuracy=[0.5, 0.5, 1.0, 0.75])
    RunDirectory(tmp_path).write_evaluations({"before": before, "after": after})
    return tmp_path


def summary_of(run: Path, seconds: float) -> dict[str, Any]:
    directory = RunDirectory(run)
    return runs.summarize(runs.read_steps(directory), directory.evaluations(), seconds)


def test_read_steps_joins_the_lines_of_a_step(run_dir: Path) -> None:
    steps = runs.read_steps(RunDirectory(run_dir))
    assert steps.index.tolist() == list(range(21))
    assert steps.loc[20, "eval/accuracy"] == 0.5
    assert steps.loc[20, "reward/mean"] == pytest.approx(1.0)
    assert steps.loc[0, "eval/accuracy"] == 0.25
    assert math.isnan(steps.loc[0, "reward/mean"])


def test_a_summary_has_speeds_accuracies_and_the_first_and_last_tenth(run_dir: Path) -> None:
    """A tenth of twenty steps is two."""
    result = summary_of(run_dir, seconds=47.0)
    half = 3.182446 / math.sqrt(48)
    assert result.pop("accuracy_gain_interval") == pytest.approx([0.25 - half, 0.25 + half], abs=1e-6)
    assert result == pytest.approx({
        "steps": 20, "entropy_first": 0.385, "entropy_last": 0.205, "reward_first": 0.075, "reward_last": 0.975,
        "tokens_per_second": 50.0, "rollout_tokens_per_second": 200.0,
        "share_rollout": 0.25, "share_train": 0.5, "share_sync": 0.05, "memory_rss_gib": 1.2, "seconds": 47.0,
        "questions": 4, "accuracy_before": 0.4375, "accuracy_after": 0.6875, "accuracy_gain": 0.25,
    })  # fmt: skip
    steps = pd.Series(range(1, 26))
    assert [part(steps).tolist() for part in (runs.first_tenth, runs.last_tenth)] == [[1, 2], [24, 25]], "rounded down"


def test_the_interval_of_a_gain_ends_at_the_largest_possible_gain(run_dir: Path) -> None:
    before = pd.DataFrame({"id": ["a", "b"], "accuracy": [0.0, 0.0]})
    RunDirectory(run_dir).write_evaluations({"before": before, "after": before.assign(accuracy=[0.0, 1.0])})
    assert summary_of(run_dir, seconds=1.0)["accuracy_gain_interval"] == [-1, 1]
    assert runs.gain_metrics(RunDirectory(run_dir)) == {"eval/gain": 0.5, "eval/gain_low": -1, "eval/gain_high": 1}


def test_a_summary_without_evaluation_has_no_gain_and_a_gpu_shows_its_memory(run_dir: Path) -> None:
    (run_dir / "eval.parquet").unlink()
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(encode_line(19, {"memory/gpu_peak_gib": 3.5}) + encode_line(20, {"memory/gpu_peak_gib": 2.5}))
    result = summary_of(run_dir, seconds=1.0)
    assert "accuracy_gain" not in result
    assert result["memory_gpu_peak_gib"] == 3.5
    text = run_summary.closing_table(result, runs.read_steps(RunDirectory(run_dir)))
    assert "held-out" not in text
    assert "3.50 GiB on the GPU" in text


def test_speeds_are_tokens_over_seconds_of_all_steps_and_memory_is_the_largest(tmp_path: Path) -> None:
    """100 tokens in 1 s, then 60 in 3 s, each step with half a second of rollouts.

    In the second step the slower of two processes generates for that time, and the first, which records, for 0.1 s.
    """
    steps = [
        {"step/seconds": 1.0, "step/tokens_per_second": 100.0, "memory/rss_gib": 2.0},
        {"step/seconds": 3.0, "step/tokens_per_second": 20.0, "memory/rss_gib": 1.0,
         "rollout/tokens_per_second": 120.0, "seconds/rollout": 0.1},
    ]  # fmt: skip
    lines = [encode_line(number, metrics_of(number, steps=2) | own) for number, own in enumerate(steps, 1)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    result = summary_of(tmp_path, seconds=1.0)
    assert (result["tokens_per_second"], result["rollout_tokens_per_second"]) == (40, 160)
    assert (result["share_rollout"], result["memory_rss_gib"]) == (0.15, 2)


def test_the_closing_table_has_the_numbers_of_the_summary(run_dir: Path) -> None:
    text = run_summary.closing_table(summary_of(run_dir, seconds=47.0), runs.read_steps(RunDirectory(run_dir)))
    for part in (
        "0.438 -> 0.688", "+0.250 [-0.209, +0.709], 4 questions", "50", "200",
        "0.075 -> 0.975 (first and last tenth of the steps)", "0.385 -> 0.205 nats (likewise)",
        "25% rollout, 50% train, 5% sync, 20% other (seconds/* in metrics.jsonl); 47 s in all",
        "1.20 GiB peak resident",
    ):  # fmt: skip
        assert part in text
    assert "cut at" not in text
    phases = RunDirectory(run_dir).evaluations()
    RunDirectory(run_dir).write_evaluations(
        {phase: rows.assign(truncated=[0.5, 0.0, 0.0, 0.0]) for phase, rows in phases.items()}
    )
    told = run_summary.closing_table(summary_of(run_dir, seconds=47.0), runs.read_steps(RunDirectory(run_dir)))
    assert "cut at the token limit  12.5% -> 12.5% of the answers" in told


def test_the_closing_table_names_the_time_of_a_slow_grader(run_dir: Path) -> None:
    result, steps = summary_of(run_dir, seconds=47.0), runs.read_steps(RunDirectory(run_dir))
    slow = steps.assign(**{"seconds/reward": 0.17 * steps["step/seconds"], "seconds/probe": 0.01})
    text = run_summary.closing_table(result, slow)
    assert "25% rollout, 50% train, 5% sync, 17% grading; 47 s in all" in text


def test_a_run_of_one_step_shows_one_number(tmp_path: Path, run_dir: Path) -> None:
    """The first and the last tenth of one step are the same step."""
    result = summary_of(run_dir, seconds=47.0) | {
        "steps": 1, "reward_first": 0.119, "reward_last": 0.119, "entropy_first": 0.25, "entropy_last": 0.25,
    }  # fmt: skip
    text = run_summary.closing_table(result, runs.read_steps(RunDirectory(run_dir))).splitlines()
    assert [line.split() for line in text if "reward" in line] == [["reward", "0.119"]]
    assert [line.split()[2:] for line in text if "entropy" in line] == [["0.250", "nats"]]
    assert any("0.438 -> 0.688" in line for line in text)  # accuracy was measured twice
    for steps, entropy in ((1, "0.200"), (4, "0.350 -> 0.200")):
        folder = make_run(tmp_path / "runs" / str(steps), "bf16", steps, steps=steps)
        if steps == 1:
            (folder / "metrics.jsonl").write_bytes(encode_line(1, metrics_of(1, steps=1)))
        table = comparison.text(comparison.read([folder]), None)
        assert next(line for line in table.splitlines() if line.startswith("bf16")).endswith(f"  {entropy}")


# --- figures


def test_curves_have_panels_for_recorded_metrics_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may never see the whole vocabulary; a run may have no noise and a policy that diverged."""
    figures: list[Figure] = []
    monkeypatch.setattr(palette.plt, "close", figures.append)
    whole = pd.DataFrame([{"reward/mean": 0.0}, *STEPS.values()])  # step 0 is before training
    unseen = whole.drop(columns="sampler/entropy_nats")
    quiet = unseen.assign(**{"noise/sigma": 0.0, "noise/std_observed": 0.0, "policy/entropy_nats": float("nan")})
    for table in (whole, unseen, quiet):
        plots.save_curves(table, "title", tmp_path / "curves.png", "nvfp4")
    every = {"Reward": 3, "Entropy": 2, "AQN noise": 2, "Throughput": 2}  # lines by panel
    drawn = [{axis.get_title(loc="left"): len(axis.lines) for axis in figure.axes} for figure in figures]
    assert drawn == [every, every | {"Entropy": 1}, {"Reward": 3, "Throughput": 2}]
    assert all(axis.get_ylabel() and axis.get_xlabel() == "step" and axis.get_legend() for axis in figures[0].axes)
    assert {axis.lines[0].get_color() for axis in figures[0].axes} == {palette.FORMATS["nvfp4"]}
    assert figures[2].axes[-1].get_gridspec().get_geometry() == (1, 2)  # two panels, none empty
    x, y = figures[0].axes[1].lines[0].get_data()
    assert list(x) == list(range(1, 21))
    assert list(y) == pytest.approx([0.4 - 0.01 * step for step in range(1, 21)])
    image = plots.plt.imread(tmp_path / "curves.png")
    assert image.shape[0] > 250
    assert image.std() > 0.02  # not blank


def test_the_parts_of_the_reward_add_up_to_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts include those that a task adds, and penalties, which are below 0."""
    figures: list[Figure] = []
    monkeypatch.setattr(palette.plt, "close", figures.append)
    parts = {"answer": 0.5, "format": 0.2, "brief": 0.1, "rude": -0.3, "overlong": -0.2}
    row = {f"reward/{part}": mean for part, mean in parts.items()} | {"reward/mean": sum(parts.values())}
    others = {"reward/std": 0.3, "reward/unparsed": 0.1, "reward/zero_variance_groups": 0.2}
    plots.save_curves(pd.DataFrame([row | others] * 3), "title", tmp_path / "curves.png", "nvfp4")
    (axis,) = figures[0].axes
    drawn = {str(line.get_label()): line.get_data()[1][0] for line in axis.lines}
    assert list(drawn) == ["total", *parts]
    assert drawn.pop("total") == pytest.approx(sum(drawn.values()))
    assert axis.get_ylim()[0] < -0.3, "otherwise the penalties are cut off"
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.lines}) == 6
    plots.save_curves(pd.DataFrame([{"reward/mean": -0.5}] * 3), "title", tmp_path / "curves.png", "nvfp4")
    low, high = figures[1].axes[0].get_ylim()
    assert low < -0.5 < 0 < high


def test_a_run_of_one_step_has_points_and_a_tick_at_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(palette.plt, "close", figures.append)
    plots.save_curves(pd.DataFrame([{}, STEPS[1]]), "title", tmp_path / "curves.png", "nvfp4")
    for axis in figures[0].axes:
        assert {line.get_marker() for line in axis.lines} == {"o"}
        assert [tick for tick in axis.get_xticks() if 0.9 < tick < 1.1] == [1]


def test_the_legend_of_parts_with_long_names_is_not_wider_than_its_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(palette.plt, "close", figures.append)
    names = ["answer", "format", "brief", "does_not_repeat_any_word_of_the_question"]
    for parts in (names[:2], names[:3], names):
        row = {f"reward/{part}": 0.1 for part in parts} | {"reward/mean": 0.1 * len(parts), "policy/entropy_nats": 0.2}
        plots.save_curves(pd.DataFrame([row] * 3), "title", tmp_path / "curves.png", "nvfp4")
    for figure in figures:
        left, right = figure.axes
        legend = left.get_legend()
        assert legend is not None
        assert legend.get_window_extent().x1 <= left.get_window_extent().x1
        assert left.get_window_extent().width == pytest.approx(right.get_window_extent().width, rel=0.05)
        highest = left.transData.transform((0, max(line.get_ydata()[0] for line in left.lines)))[1]
        assert highest < legend.get_window_extent().y0


def test_paths_of_checkpoints_leave_room_for_the_entropies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(palette.plt, "close", figures.append)
    folder = "/data/checkpoints/pocket-nvfp4-four_over_six-calibrated-on-512-texts-of-gsm8k-of-2048-tokens"
    arms = dict.fromkeys(("nvfp4 rtn", f"nvfp4 gptq in {folder}", f"nvfp4 awq in {folder}"), (0.1, 0.05, 0.15))
    plots.save_entropy(arms, tmp_path / "entropy.png")
    (axis,) = figures[0].axes
    assert axis.get_window_extent().width > figures[0].bbox.width / 2
    assert axis.xaxis.label.get_window_extent().x1 <= figures[0].bbox.x1
    heights = [text.get_window_extent() for text in axis.get_yticklabels()]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(heights))


def test_a_users_name_with_dollar_signs_is_not_read_as_a_formula(tmp_path: Path) -> None:
    """matplotlib would refuse the name after the training, before the run counts as done."""
    row = {"reward/mean": 0.5, r"reward/$\price$": 0.5}
    plots.save_curves(pd.DataFrame([row] * 3), r"gsm8k by $\price$.py", tmp_path / "curves.png", "nvfp4")
    assert (tmp_path / "curves.png").stat().st_size > 0


# --- the terminal


def mirrored(run_dir: Path, **noted: str) -> Path:
    """Make a run directory with these values in its mlflow.json."""
    run_dir.mkdir(parents=True, exist_ok=True)
    RunDirectory(run_dir).note_mirror(**noted)
    return run_dir


def test_paths_are_shown_as_they_can_be_typed(here: Path) -> None:
    text = run_summary.location(mirrored(here / "runs" / "x", uri="sqlite:////tmp/a b.db", experiment_id="7"), True)
    assert "run directory: runs/x " in text
    assert "-m mlflow ui --backend-store-uri 'sqlite:////tmp/a b.db'\n" in text
    assert text.endswith(" http://127.0.0.1:5000/#/experiments/7/runs")
    assert run_summary.location(here, None).count("\n") == 0
    (here / "metrics.jsonl").touch(), (here / "model").mkdir()
    assert run_summary.location(here, None).endswith("  (metrics.jsonl, model/)"), (
        "files that are not there are not named"
    )


def test_the_next_commands_name_the_run(here: Path) -> None:
    samples, report, export = (shlex.split(line)[3:] for line in run_summary.next_steps(here / "a run").splitlines())
    assert [words[0] for words in (samples, report, export)] == [
        "qerl_lab.tools.samples", "qerl_lab.report", "qerl_lab.tools.export",
    ]  # fmt: skip
    assert sample_command.read(samples[1:]).run_dir == "a run"
    assert report_command.read(report[1:]) == ReportOptions(sweep=["a run"], out="results/a run")
    assert export_command.read(export[1:]) == ExportOptions(run="a run", out="exports/a run")
    (here / "a run" / "model").mkdir(parents=True)  # lora=full
    assert "export" not in run_summary.next_steps(here / "a run")


def test_a_server_is_opened_at_its_own_address(tmp_path: Path) -> None:
    text = run_summary.location(mirrored(tmp_path, uri="https://***@host/ml/", experiment_id="7"), True)
    assert text.endswith("open MLflow:   https://host/ml/#/experiments/7/runs")
    text = run_summary.location(mirrored(tmp_path, uri="postgresql://***@host/db"), True)
    assert '--backend-store-uri "$MLFLOW_TRACKING_URI"\n' in text


def test_an_incomplete_mirror_is_reported_with_the_command_that_completes_it(here: Path) -> None:
    text = run_summary.location(mirrored(here / "run", uri="http://host"), False)
    assert "MLflow at http://host lacks a part of this run" in text
    assert text.endswith("-m qerl_lab.tracking resync run")
    assert "open MLflow" not in text


def test_every_line_of_a_figure_is_of_a_metric_that_exists() -> None:
    """A metric that no run has recorded has no line, so a typing error would go unseen."""
    compared = {curve.metric for curve in curves.CURVES}
    assert compared - {*runs.KEPT} == set(), "a report reads no other metrics: enter them in KEPT of report/runs.py"
    of_one_run = {metric for _, _, lines in plots.PANELS for metric, _ in lines}
    assert (of_one_run | {*runs.KEPT}) - declared_metrics(("answer", "format")).keys() == set()
