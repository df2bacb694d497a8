"""From records to numbers and figures."""

import math
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qerl_lab.record import encode
from qerl_lab.report import plots, runs, tables
from qerl_lab.report.stats import paired_interval


def series(values: list[float], ids: str = "abcd") -> pd.Series:
    return pd.Series(values, index=list(ids))


# --- the interval


def test_paired_interval_by_hand() -> None:
    """Differences 1/2, 0, 0, 1/2: mean 1/4, deviation sqrt(1/12), error sqrt(1/48); t(0.975, 3) is 3.182446."""
    mean, low, high = paired_interval(series([0, 0.5, 1, 0.25]), series([0.5, 0.5, 1, 0.75]))
    half = 3.182446 / math.sqrt(48)
    assert (mean, low, high) == pytest.approx((0.25, 0.25 - half, 0.25 + half), abs=1e-6)
    _, low, high = paired_interval(series([0, 0.5, 1, 0.25]), series([0.5, 0.5, 1, 0.75]), level=0.9)
    assert (low, high) == pytest.approx((0.25 - 2.353363 / math.sqrt(48), 0.25 + 2.353363 / math.sqrt(48)), abs=1e-6)


def test_paired_interval_pairs_by_question_and_not_by_place() -> None:
    before, after = series([0, 0.5, 1, 0.25]), series([0.5, 0.5, 1, 0.75])
    assert paired_interval(before, after[::-1]) == pytest.approx(paired_interval(before, after))


def test_paired_interval_of_equal_gains_has_no_width() -> None:
    assert paired_interval(series([0, 0.25, 0.5, 0.5]), series([0.25, 0.5, 0.75, 0.75])) == (0.25, 0.25, 0.25)


def test_paired_interval_covers_the_truth_as_often_as_it_says() -> None:
    """And the difficulty of the questions, which both sides share, does not widen it."""
    rng, covered, widths = np.random.default_rng(0), 0, []
    for _ in range(2000):
        difficulty = rng.normal(0, 10, 12)
        before = pd.Series(difficulty + rng.normal(0, 1, 12))
        after = pd.Series(difficulty + rng.normal(0.3, 1, 12))
        _, low, high = paired_interval(before, after)
        covered += low <= 0.3 <= high
        widths.append(high - low)
    assert covered / 2000 == pytest.approx(0.95, abs=0.02)
    assert np.mean(widths) < 2.5


@pytest.mark.parametrize(("before", "after"), [
    (series([1, 0], "ab"), series([1, 0], "ac")), (series([1], "a"), series([0], "a")),
    (series([1, 0], "ab"), series([1, 0, 1], "abc")), (series([], ""), series([], "")),
])  # fmt: skip
def test_paired_interval_needs_the_same_questions_two_at_least(before: pd.Series, after: pd.Series) -> None:
    with pytest.raises(ValueError, match="the same questions before and after, two at least"):
        paired_interval(before, after)


# --- a run directory


def metrics_of(step: int) -> dict[str, float]:
    """Of twenty steps: entropy falls by 0.01 a step, reward rises by 0.05, a step takes 2 s for 100 tokens."""
    return {
        "policy/entropy_nats": 0.41 - 0.01 * step, "sampler/entropy_nats": 0.5,
        "reward/mean": 0.05 * step, "reward/answer": 0.04 * step, "reward/format": 0.01 * step,
        "noise/sigma": 0.1, "noise/std_observed": 0.11,
        "step/seconds": 2.0, "step/tokens_per_second": 50.0, "rollout/tokens_per_second": 200.0,
        "seconds/rollout": 0.5, "seconds/train": 1.0, "seconds/sync": 0.1, "memory/rss_gib": 1 + step / 100,
    }  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    lines = [encode(0, {"eval/accuracy": 0.25}), *(encode(step, metrics_of(step)) for step in range(1, 21))]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines, encode(20, {"eval/accuracy": 0.5})]))
    before = pd.DataFrame({"id": list("abcd"), "accuracy": [0.0, 0.5, 1.0, 0.25], "sample": ["x", "", "ü", "\n"]})
    after = before.assign(accuracy=[0.5, 0.5, 1.0, 0.75])
    runs.write_phases(tmp_path, {"before": before, "after": after})
    return tmp_path


def test_read_steps_joins_the_lines_of_a_step(run_dir: Path) -> None:
    steps = runs.read_steps(run_dir)
    assert steps.index.tolist() == list(range(21))
    assert steps.loc[20, "eval/accuracy"] == 0.5
    assert steps.loc[20, "reward/mean"] == pytest.approx(1.0)
    assert steps.loc[0, "eval/accuracy"] == 0.25
    assert math.isnan(steps.loc[0, "reward/mean"])


def test_phases_survive_writing_and_reading_and_the_second_is_added_to_the_first(tmp_path: Path) -> None:
    assert runs.read_phases(tmp_path) == {}
    before = pd.DataFrame({"id": ["a", "b"], "accuracy": [0.0, 1.0], "sample": ["<answer>", "ü\n"]})
    runs.write_phases(tmp_path, {"before": before})
    phases = runs.read_phases(tmp_path)
    assert list(phases) == ["before"]
    runs.write_phases(tmp_path, phases | {"after": before.assign(accuracy=1.0)})
    phases = runs.read_phases(tmp_path)
    assert list(phases) == ["before", "after"]
    pd.testing.assert_frame_equal(phases["before"], before)
    assert [path.name for path in tmp_path.iterdir()] == ["eval.parquet"]


def test_summarize(run_dir: Path) -> None:
    """A tenth of twenty steps is two."""
    result = runs.summarize(run_dir, seconds=47.0)
    half = 3.182446 / math.sqrt(48)
    assert result.pop("accuracy_gain_interval") == pytest.approx([0.25 - half, 0.25 + half], abs=1e-6)
    assert result == pytest.approx({
        "steps": 20, "entropy_first": 0.395, "entropy_last": 0.215, "reward_first": 0.075, "reward_last": 0.975,
        "tokens_per_second": 50.0, "rollout_tokens_per_second": 200.0,
        "share_rollout": 0.25, "share_train": 0.5, "share_sync": 0.05, "memory_rss_gib": 1.2, "seconds": 47.0,
        "questions": 4, "accuracy_before": 0.4375, "accuracy_after": 0.6875, "accuracy_gain": 0.25,
    })  # fmt: skip


def test_summarize_without_evaluation_has_no_gain_and_a_gpu_shows_its_memory(run_dir: Path) -> None:
    (run_dir / "eval.parquet").unlink()
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(encode(20, {"memory/gpu_peak_gib": 3.5}))
    result = runs.summarize(run_dir, seconds=1.0)
    assert "accuracy_gain" not in result
    assert result["memory_gpu_peak_gib"] == 3.5
    text = tables.closing(result)
    assert "held-out" not in text
    assert "3.50 GiB on the GPU" in text


def test_the_closing_table_says_the_numbers(run_dir: Path) -> None:
    text = tables.closing(runs.summarize(run_dir, seconds=47.0))
    for part in (
        "0.438 -> 0.688", "+0.250 [-0.209, +0.709], 4 questions", "0.075 -> 0.975", "0.395 -> 0.215 nats", "50", "200",
        "25% rollout, 50% train, 5% sync; 47 s in all", "1.20 GiB peak resident",
    ):  # fmt: skip
        assert part in text


# --- figures


def test_curves_have_four_panels_with_the_values_of_the_record(run_dir: Path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    plots.save_curves(runs.read_steps(run_dir), "nvfp4_aqn, seed 0", run_dir / "curves.png")
    image = plots.plt.imread(run_dir / "curves.png")
    assert image.shape[0] > 500
    assert image.std() > 0.02  # not blank
    (figure,) = figures
    assert [axis.get_title() for axis in figure.axes] == ["Reward", "Entropy", "AQN noise", "Throughput"]
    assert [len(axis.lines) for axis in figure.axes] == [3, 2, 2, 2]
    assert all(axis.get_ylabel() and axis.get_xlabel() == "step" and axis.get_legend() for axis in figure.axes)
    x, y = figure.axes[1].lines[0].get_data()
    assert list(x) == list(range(1, 21))  # step 0 is before training
    assert list(y) == pytest.approx([0.41 - 0.01 * step for step in range(1, 21)])


def test_comparing_arms_draws_the_mean_thick_and_each_seed_thin() -> None:
    rows = [
        {"run_id": f"{arm}{seed}", "arm": arm, "metric": "reward/mean", "step": step, "value": seed + step}
        for arm in ("bf16", "nvfp4") for seed in (0, 1) for step in (0, 1, 2)
    ]  # fmt: skip
    figure = plots.compare_arms(pd.DataFrame(rows), {"reward/mean": "reward"})
    (axis,) = figure.axes
    assert [line.get_label() for line in axis.lines if not line.get_label().startswith("_")] == [
        "bf16 (n=2)",
        "nvfp4 (n=2)",
    ]
    assert len(axis.lines) == 2 * 3
    mean = next(line for line in axis.lines if line.get_label() == "bf16 (n=2)")
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([1, 2], [1.5, 2.5])
    plots.plt.close(figure)


# --- MLflow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs of one experiment, and an empty experiment beside it."""
    from qerl_lab import tracking

    tracking.prepare_mlflow()
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    client.create_experiment("empty")
    experiment = client.create_experiment("lab")
    for arm, seed, status in (("bf16", 0, "FINISHED"), ("nvfp4", 3, "KILLED")):
        tags = {"mlflow.runName": f"{arm}-seed{seed}", "experiment": arm, "seed": str(seed)}
        run_id = client.create_run(experiment, tags=tags).info.run_id
        points = [("reward/mean", step, seed + step / 10) for step in (1, 2)] + [("eval/accuracy", 0, 0.25)]
        points += [("eval/accuracy", 2, 0.75)] if status == "FINISHED" else []
        now = int(time.time() * 1000)
        client.log_batch(run_id, metrics=[Metric(name, value, now, step) for name, step, value in points])
        client.set_terminated(run_id, status)
    return uri


def test_read_mlflow_is_tidy(store: str) -> None:
    frame = runs.read_mlflow(store, "lab")
    assert list(frame.columns) == ["run_id", "run", "arm", "seed", "status", "metric", "step", "value"]
    assert len(frame) == 7
    found = frame.drop(columns="run_id").sort_values(["seed", "metric", "step"])
    assert found.to_numpy().tolist() == [
        ["bf16-seed0", "bf16", 0, "FINISHED", "eval/accuracy", 0, 0.25],
        ["bf16-seed0", "bf16", 0, "FINISHED", "eval/accuracy", 2, 0.75],
        ["bf16-seed0", "bf16", 0, "FINISHED", "reward/mean", 1, 0.1],
        ["bf16-seed0", "bf16", 0, "FINISHED", "reward/mean", 2, 0.2],
        ["nvfp4-seed3", "nvfp4", 3, "KILLED", "eval/accuracy", 0, 0.25],
        ["nvfp4-seed3", "nvfp4", 3, "KILLED", "reward/mean", 1, 3.1],
        ["nvfp4-seed3", "nvfp4", 3, "KILLED", "reward/mean", 2, 3.2],
    ]
    assert frame.groupby("run_id")["run"].nunique().tolist() == [1, 1]


def test_the_accuracy_table_counts_runs_and_compares_ends(store: str) -> None:
    table = runs.accuracy_table(runs.read_mlflow(store, "lab"))
    assert table.loc["bf16", ["runs", "finished", "before", "after", "gain"]].tolist() == [1, 1, 0.25, 0.75, 0.5]
    assert table.loc["nvfp4", ["runs", "finished"]].tolist() == [1, 0]
    assert math.isnan(table.loc["nvfp4", "gain"])


def test_an_experiment_without_runs_is_an_empty_frame_and_an_unknown_one_is_named(store: str) -> None:
    assert runs.read_mlflow(store, "empty").shape == (0, 8)
    with pytest.raises(ValueError, match=r"no experiment 'lap'; it has \['Default', 'empty', 'lab'\]"):
        runs.read_mlflow(store, "lap")


def test_paths_are_shown_as_they_can_be_typed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tables.near(tmp_path / "runs" / "x") == "runs/x"
    assert tables.near(tmp_path.parent / "y") == str(tmp_path.parent / "y")
    text = tables.where(tmp_path / "runs" / "x", "sqlite:////tmp/a b.db")
    assert "run directory: runs/x " in text
    assert text.endswith("-m mlflow ui --backend-store-uri 'sqlite:////tmp/a b.db'")
    assert tables.where(tmp_path, None).count("\n") == 0
