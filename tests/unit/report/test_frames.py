"""Runs from MLflow: which count, what their arms are called, and what a user without a store or a folder is told."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.config.arm import leaves
from qerl_lab.config.option import ConfigError
from qerl_lab.report import frames
from qerl_lab.report.arms import choose, labels
from qerl_lab.tracking.mlflow import prepare_mlflow
from run_directories import config

prepare_mlflow()
from mlflow import MlflowClient  # noqa: E402  (after the settings that it reads)
from mlflow.entities import Metric, Param  # noqa: E402

Add = Callable[..., str]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    MlflowClient(tracking_uri=found).create_experiment("empty")
    return found


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri)


@pytest.fixture
def experiment(client: MlflowClient, request: pytest.FixtureRequest) -> str:
    client.create_experiment(request.node.name)
    return request.node.name


@pytest.fixture
def add(client: MlflowClient, experiment: str) -> Add:
    """Adds a run of two steps to the test's experiment, as the mirror would, and returns its id."""
    folder = client.get_experiment_by_name(experiment).experiment_id

    def add(arm: str, seed: int, *, ended: float = 1e9, status: str = "FINISHED", **changes: Any) -> str:
        params = [Param(name, str(value)) for name, _, value in leaves(config(arm, seed, **changes))]
        run_id = client.create_run(folder, run_name=f"{arm}-seed{seed}", tags={"git_sha": "c0"}).info.run_id
        points = [("reward/mean", step, seed + step / 10) for step in (1, 2)] + [("eval/accuracy", 0, 0.25)]
        points += [("eval/accuracy", 2, 0.5 + seed / 4)] if status == "FINISHED" else []
        for n in range(0, len(params), 100):
            client.log_batch(run_id, params=params[n : n + 100])
        client.log_batch(run_id, metrics=[Metric(name, value, int(ended * 1000), step) for name, step, value in points])
        client.set_terminated(run_id, status, int(ended * 1000))
        return run_id

    return add


def test_other_settings_are_another_arm_whatever_the_label(uri: str, experiment: str, add: Add) -> None:
    for seed in (0, 1):
        add("nvfp4", seed)
        add("nvfp4", seed, aqn__schedule="cosine")
    _, runs, left_out = frames.find(uri, experiment)
    counted, not_counted = choose(list(runs))
    assert Counter(labels(counted)[run.arm] for run in counted) == {
        "nvfp4 (aqn=cosine)": 2, "nvfp4 (aqn=off)": 2
    }  # fmt: skip
    assert left_out == not_counted == []


def test_repeated_aborted_and_foreign_runs_are_left_out_and_named(
    uri: str, client: MlflowClient, experiment: str, add: Add
) -> None:
    new, old = add("bf16", 0, ended=2e9), add("bf16", 0, ended=1e9)
    killed = add("bf16", 1, status="KILLED")
    folder = client.get_experiment_by_name(experiment).experiment_id
    foreign = client.create_run(folder, run_name="sweep of another tool").info.run_id
    half = client.create_run(folder, run_name="bf16-seed9", tags={"experiment": "bf16", "seed": "nine"}).info.run_id
    client.log_param(half, "seed", "nine")
    _, runs, left_out = frames.find(uri, experiment)
    counted, not_counted = choose(list(runs))
    assert [runs[run].info.run_id for run in counted] == [new]
    assert sorted(left_out + not_counted) == sorted([
        f"bf16-seed0 ({old[:8]}): repeated by bf16-seed0 ({new[:8]}), with the same settings and seed",
        f"bf16-seed1 ({killed[:8]}): killed",
        f"sweep of another tool ({foreign[:8]}): no run of this lab (its configuration lacks 'device')",
        f"bf16-seed9 ({half[:8]}): no run of this lab (its configuration lacks 'device')",
    ])  # fmt: skip


# --- nothing to draw


def test_an_unknown_experiment_is_answered_with_those_there_are(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"no experiment 'empyt'; it has: .*\bempty\b"):
        frames.find(uri, "empyt")


def test_a_missing_store_is_said_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no MLflow store at sqlite:.*mlflow.db. Type another. Fill one with"):
        frames.find(f"sqlite:///{tmp_path}/mlflow.db", "qerl-lab")
    assert not list(tmp_path.iterdir())


def test_a_store_that_cannot_be_read_is_told_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"MLflow at {tmp_path}/x cannot be read \(.*\)\. Start it, or type another"):
        frames.find(f"{tmp_path}/x", "qerl-lab")
    assert not list(tmp_path.iterdir())


def test_the_store_is_found_from_the_folder_of_the_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    with pytest.raises(ConfigError, match=re.escape(f"no mlflow.db in {tmp_path}/notebooks or above it. Fill one")):
        frames.find_store()
    (tmp_path / "mlflow.db").touch()
    assert frames.find_store() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.chdir(tmp_path)
    assert frames.find_store() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://store")
    assert frames.find_store() == "http://store"


def test_results_are_found_from_the_folder_of_the_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "results" / "x").mkdir(parents=True)
    for here in (tmp_path, tmp_path / "notebooks"):
        monkeypatch.chdir(here)
        assert frames.find_folder("results/x").resolve() == tmp_path / "results" / "x"
    assert frames.find_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"results/y is no directory, here or in the folder above .*RESULTS"):
        frames.find_folder("results/y")
