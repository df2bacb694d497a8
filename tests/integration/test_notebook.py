"""The notebook runs on a small committed record, mirrored into a fresh MLflow store."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from qerl_lab.record.directory import RunDirectory
from qerl_lab.tracking.mlflow import prepare_mlflow
from qerl_lab.tracking.resync import resync

prepare_mlflow()
from mlflow import MlflowClient  # noqa: E402  (after the settings that it reads)

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "data" / "record"
pytestmark = pytest.mark.integration


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a user has it: a store filled from the committed record, and the notebook in notebooks/ beside it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for run in sorted(RECORD.iterdir()):
        resync(RunDirectory(shutil.copytree(run, tmp_path / run.name)), f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


def run_notebook(folder: Path) -> tuple[str, list[dict]]:
    """What the notebook prints, and its other outputs, run where JupyterLab and VS Code start it."""
    notebook = nbformat.read(folder / "01_curves.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs), [o["data"] for o in outputs if "data" in o]


def test_curves_notebook(lab: Path) -> None:
    client = MlflowClient(tracking_uri=f"sqlite:///{lab}/mlflow.db")
    client.create_run(client.get_experiment_by_name("qerl-lab").experiment_id, run_name="another tool's")
    text, shown = run_notebook(lab / "notebooks")
    assert f"{len(list(RECORD.iterdir()))} runs of 2 arms in sqlite:///{lab}/mlflow.db; 1 left out:" in text
    assert "another tool's" in text
    assert sum("image/png" in data for data in shown) == 2
    table = next(data["text/html"] for data in shown if "text/html" in data)
    assert "nvfp4_aqn" in table
    assert "bf16" in table


def test_without_a_store_the_notebook_says_what_to_type_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    with pytest.raises(CellExecutionError, match=r"no MLflow store.*python -m qerl_lab \+sweeps=weight_formats"):
        run_notebook(tmp_path / "notebooks")
    assert not list(tmp_path.rglob("*.db"))
