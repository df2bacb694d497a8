"""Read every point of an MLflow experiment, to compare with metrics.jsonl."""

import pandas as pd

from qerl_lab.tracking.mlflow import prepare_mlflow


def mlflow_points(uri: str) -> pd.DataFrame:
    """Return every point of experiment qerl-lab, a row each. Fails if a run is not FINISHED."""
    prepare_mlflow()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("qerl-lab").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    rows = [
        (run.info.run_id, metric, point.step, point.value, point.timestamp)
        for run in runs for metric in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, metric)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["run_id", "metric", "step", "value", "timestamp"])
