"""The notebook runs on a small committed record, mirrored into a fresh MLflow store."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from qerl_lab import tracking

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "data" / "record"
pytestmark = pytest.mark.integration


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLflow store filled from the committed record."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    for run in sorted(RECORD.iterdir()):
        tracking.resync(shutil.copytree(run, tmp_path / run.name), uri)
    return uri


def test_curves_notebook(store: str, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "01_curves.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert f"{len(list(RECORD.iterdir()))} runs of 2 arms" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    table = next(output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {}))
    assert "nvfp4_aqn" in table
    assert "bf16" in table
