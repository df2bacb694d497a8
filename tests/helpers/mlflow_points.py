"""Read every point of an MLflow experiment, to compare with metrics.jsonl."""

import pandas as pd

from qerl_lab.report.frames import find


def mlflow_points(uri: str) -> pd.DataFrame:
    """Return every point of experiment qerl-lab, a row each. Fails if a run is not FINISHED."""
    client, ours, foreign = find(uri, "qerl-lab")
    assert foreign == []
    assert {run.info.status for run in ours.values()} == {"FINISHED"}
    rows = [
        (run.info.run_id, metric, point.step, point.value, point.timestamp)
        for run in ours.values() for metric in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, metric)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["run_id", "metric", "step", "value", "timestamp"])
