"""Read every point of an MLflow experiment, to compare with metrics.jsonl."""

import pandas as pd

from qerl_lab.report.frames import find


def mlflow_points(uri: str) -> pd.DataFrame:
    """Return run_id, metric, step and value of every point of experiment qerl-lab. Fails if a run is not FINISHED."""
    client, ours, foreign = find(uri, "qerl-lab")
    assert foreign == []
    assert {run.info.status for run in ours.values()} == {"FINISHED"}
    rows = [
        (run.info.run_id, metric, point.step, point.value)
        for run in ours.values() for metric in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, metric)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["run_id", "metric", "step", "value"])
