"""A report of an MLflow experiment: of run directories where they are, else of what MLflow keeps, and what it lacks."""

import shutil
from pathlib import Path

import pytest

from qerl_lab.record.directory import RunDirectory
from qerl_lab.report import comparison, results
from qerl_lab.report.__main__ import main
from qerl_lab.report.mirrored import read_experiment
from qerl_lab.tracking.mlflow import resync
from run_directories import make_run


def test_a_report_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folders = [make_run(tmp_path / "runs" / f"bf16-{seed}", "bf16", seed) for seed in range(3)]
    (folders[2] / "DONE").unlink()
    (folders[2] / "FAILED").write_text("RuntimeError: x")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for folder in folders:
        resync(RunDirectory(folder), uri)
    there = comparison.read([tmp_path / "runs"])
    from_directories = comparison.compare(*read_experiment(uri, "qerl-lab"))
    assert comparison.text(from_directories, comparison.by_arm(from_directories, None), None) == comparison.text(
        there, comparison.by_arm(there, None), None
    )

    shutil.rmtree(tmp_path / "runs")
    (artifacts,) = tmp_path.glob(f"mlruns/*/{_mlflow_id(uri, 1)}/artifacts")
    (artifacts / "eval.parquet").unlink()
    gone = comparison.compare(*read_experiment(uri, "qerl-lab"))
    (arm,) = gone.arms
    by_seed = {record.run.seed: record for record in gone.arms[arm]}
    assert sorted(by_seed) == [0, 1]
    for record in there.counted:
        same = by_seed[record.run.seed]
        assert same.run.settings == record.run.settings
        assert same.steps.to_dict() == record.steps.to_dict()
        assert same.summary["entropy_first"] == record.summary["entropy_first"]
    assert by_seed[0].accuracy["gain"].tolist() == [0.25] * 4
    assert by_seed[1].accuracy == {}
    assert by_seed[1].origin.missing == (
        f"its directory {folders[1]} is gone; MLflow keeps no machine, versions, the answers to each held-out question"
        ", and its seconds are from start to end, with all between two sessions"
    )
    assert any(line.endswith(": failed") for line in gone.left_out)

    assert main(["mlflow=qerl-lab"]) == 0
    printed = capsys.readouterr().out
    assert "MLflow keeps no machine, versions, the answers" in printed
    assert "2 of 3" in printed
    assert main(["verdicts", "mlflow=qerl-lab"]) == 0
    assert "MLflow keeps no machine" in capsys.readouterr().out
    made = results.frames(gone.records, gone.damaged, gone.arm_of)
    assert comparison.notes(comparison.compare(*results.records_of(made))) == comparison.notes(gone)


def test_a_run_whose_directory_another_run_has_by_now_is_not_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """run_dir=DIR typed again, after DIR was removed: MLflow still has the first."""
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for arm, seed in (("bf16", 0), ("nvfp4", 1)):
        shutil.rmtree(tmp_path / "mine", ignore_errors=True)
        resync(RunDirectory(make_run(tmp_path / "mine", arm, seed)), uri)
    found = comparison.compare(*read_experiment(uri, "qerl-lab"))
    assert {arm: [record.run.seed for record in records] for arm, records in found.arms.items()} == {
        "bf16": [0], "nvfp4": [1]
    }  # fmt: skip
    assert found.left_out == []
    assert capsys.readouterr().err == ""  # no bar a file
    (tmp_path / "mine" / "mlflow.json").unlink()  # an older directory does not say which it is
    found = comparison.compare(*read_experiment(uri, "qerl-lab"))
    assert [record.run.name for record in found.counted] == ["mine"]
    assert found.left_out == []


def _mlflow_id(uri: str, seed: int) -> str:
    from mlflow import MlflowClient

    (run,) = MlflowClient(tracking_uri=uri).search_runs(["1"], f"tags.seed = '{seed}'")
    return run.info.run_id
