"""Records as pandas frames: from a run directory, which is the truth, or from MLflow, its mirror."""

from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.record import read_metrics
from qerl_lab.report.stats import paired_interval


def read_steps(run_dir: Path) -> pd.DataFrame:
    """Metrics of a run directory: a row a step (index `step`), a column a metric. Step 0 is before training."""
    rows = [{"step": line["step"], **line["metrics"]} for line in read_metrics(run_dir)]
    return pd.DataFrame(rows).groupby("step").last()


def read_phases(run_dir: Path) -> dict[str, pd.DataFrame]:
    """Per-question rows of eval.parquet by phase ("before", "after"); empty where there is none yet."""
    path = run_dir / "eval.parquet"
    if not path.exists():
        return {}
    return {
        str(phase): rows.drop(columns="phase") for phase, rows in pd.read_parquet(path).groupby("phase", sort=False)
    }


def write_phases(run_dir: Path, phases: dict[str, pd.DataFrame]) -> None:
    """Write eval.parquet: one row a question and phase. Atomic."""
    path = run_dir / "eval.parquet"
    pd.concat([rows.assign(phase=phase) for phase, rows in phases.items()]).to_parquet(
        path.with_suffix(".tmp"), index=False
    )
    path.with_suffix(".tmp").replace(path)


def read_mlflow(uri: str, experiment: str) -> pd.DataFrame:
    """Every run's curves from MLflow, tidy: run_id, run, arm, seed, status, metric, step, value.

    Raises ValueError where the store has no such experiment.
    """
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        names = sorted(known.name for known in client.search_experiments())
        raise ValueError(f"MLflow at {uri} has no experiment {experiment!r}; it has {names}.")
    rows: list[dict[str, Any]] = []
    for run in client.search_runs([found.experiment_id], max_results=10_000):
        tags = run.data.tags
        about = {
            "run_id": run.info.run_id,
            "run": tags["mlflow.runName"],
            "arm": tags["experiment"],
            "seed": int(tags["seed"]),
        }
        for name in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, name):
                rows.append(
                    {**about, "status": run.info.status, "metric": name, "step": point.step, "value": point.value}
                )
    return pd.DataFrame(rows, columns=["run_id", "run", "arm", "seed", "status", "metric", "step", "value"])


def accuracy_table(curves: pd.DataFrame) -> pd.DataFrame:
    """Held-out accuracy by arm, means over seeds, from `read_mlflow`: runs, finished, before, after, gain, gain_sd."""
    found = curves[curves["metric"] == "eval/accuracy"].sort_values("step").groupby(["arm", "run_id"])["value"]
    ends = pd.DataFrame({"before": found.first(), "after": found.last(), "points": found.size()}).reset_index()
    ends = ends[ends["points"] > 1]  # a run that was evaluated once has no gain
    ends["gain"] = ends["after"] - ends["before"]
    means = ends.groupby("arm").agg(
        before=("before", "mean"), after=("after", "mean"), gain=("gain", "mean"), gain_sd=("gain", "std")
    )
    every = curves.drop_duplicates("run_id").groupby("arm")["status"]
    counts = pd.DataFrame({"runs": every.size(), "finished": every.agg(lambda status: (status == "FINISHED").sum())})
    return counts.join(means).round(3)


def summarize(run_dir: Path, seconds: float) -> dict[str, Any]:
    """The headline numbers of a finished run, from its record. `seconds` is the wall time of the whole run.

    Entropy first and last are means over the first and the last tenth of the steps (one step is noisy).
    """
    steps = read_steps(run_dir).loc[1:]
    tenth = max(1, len(steps) // 10)
    spent = steps["step/seconds"].sum()
    tokens = (steps["step/tokens_per_second"] * steps["step/seconds"]).sum()
    result = {
        "steps": int(steps.index.max()),
        "entropy_first": float(steps["policy/entropy_nats"].head(tenth).mean()),
        "entropy_last": float(steps["policy/entropy_nats"].tail(tenth).mean()),
        "reward_first": float(steps["reward/mean"].head(tenth).mean()),
        "reward_last": float(steps["reward/mean"].tail(tenth).mean()),
        "tokens_per_second": float(tokens / spent),
        "rollout_tokens_per_second": float(tokens / steps["seconds/rollout"].sum()),
        **{f"share_{name}": float(steps[f"seconds/{name}"].sum() / spent) for name in ("rollout", "train", "sync")},
        "memory_rss_gib": float(steps["memory/rss_gib"].max()),
        "seconds": seconds,
    }
    if "memory/gpu_peak_gib" in steps:
        result["memory_gpu_peak_gib"] = float(steps["memory/gpu_peak_gib"].max())
    return result | _gain(read_phases(run_dir))


def _gain(phases: dict[str, pd.DataFrame]) -> dict[str, Any]:
    if not {"before", "after"} <= set(phases):
        return {}
    before, after = (phases[phase].set_index("id")["accuracy"] for phase in ("before", "after"))
    mean, low, high = paired_interval(before, after)
    return {
        "questions": len(after),
        "accuracy_before": float(before.mean()),
        "accuracy_after": float(after.mean()),
        "accuracy_gain": mean,
        "accuracy_gain_interval": [low, high],
    }
