"""Every notebook runs on the committed files, has no outputs, and has a rendered copy of its current cells."""

import os
import re
import runpy
from pathlib import Path

import nbformat
import pytest

from run_directories import make_run

ROOT = Path(__file__).parents[2]
RENDER = runpy.run_path(str(ROOT / "notebooks" / "render.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = ROOT / "docs" / "notebooks"
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
pytestmark = [pytest.mark.integration, pytest.mark.slow]
# What the output of a notebook must have: pieces of text, and at least this many figures.
SHOWS = {
    "01_curves": (("arms count", "entropy_first", "bf16"), 4),
    "02_ablation_tables": (("baseline bf16", "as in Table 1", "contrasts are measured here"), 0),
    "03_throughput": (("train_step", "NVIDIA H200, torch", "| qwen2.5-7b, bf16 | bf16 | train_step |"), 4),
    "04_entropy_and_noise": (("weight error", "mxfp4 raises the entropy", "share of its entropy"), 3),
    "05_bring_your_own_format": (("kept    packed tensors", "packs_rows_apart", "packed weights unchanged: True"), 1),
    "06_one_small_gpu": (("fp4_tiles", "nvfp4_aqn at scale pocket", "held-out accuracy"), 1),
}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the source of this checkout, without the hub."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def files() -> set[Path]:
    """Return the files in the two folders in which notebooks are started."""
    return {*ROOT.iterdir(), *(ROOT / "notebooks").iterdir()}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", SHOWS)
def test_a_notebook_runs_in_its_folder_and_leaves_no_files(name: str) -> None:
    """JupyterLab and VS Code start notebooks in notebooks/. One notebook is started in the repository's root."""
    before, (pieces, figures) = files(), SHOWS[name]
    folder = ROOT if name == "02_ablation_tables" else ROOT / "notebooks"
    run = RENDER["execute"](ROOT / "notebooks" / f"{name}.ipynb", folder)
    outputs = [output for cell in run.cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if "data" in output]
    tables = (data.get("text/markdown") or data.get("text/plain", "") for data in shown)
    text = "".join([*(output.get("text", "") for output in outputs), *tables])
    assert [piece for piece in pieces if piece not in text] == []
    assert sum("image/png" in data for data in shown) >= figures
    assert files() == before


@pytest.mark.usefixtures("untouched")
def test_curves_need_no_heldout_questions(tmp_path: Path) -> None:
    (make_run(tmp_path / "runs" / "0", "bf16", 0, eval__questions=0) / "eval.parquet").unlink()
    copy = tmp_path / "copy.ipynb"
    text = (ROOT / "notebooks" / "01_curves.ipynb").read_text(encoding="utf-8")
    copy.write_text(text.replace("results/smollm2/weight_formats", str(tmp_path / "runs")), encoding="utf-8")
    run = RENDER["execute"](copy, tmp_path)
    assert "entropy_first" in run.cells[-1]["outputs"][0]["data"]["text/plain"]


@each_notebook
def test_a_notebook_has_no_outputs(notebook: Path) -> None:
    found = nbformat.read(notebook, as_version=4)
    nbformat.validate(found)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in found.cells)


def test_every_notebook_is_tested_and_rendered() -> None:
    assert list(SHOWS) == [notebook.stem for notebook in NOTEBOOKS]
    assert {page.stem for page in PAGES.glob("0*.md")} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_the_rendered_copy_of_a_notebook_has_its_cells_and_figures(name: str) -> None:
    page = PAGES / f"{name}.md"
    own = RENDER["head"](ROOT / "notebooks" / f"{name}.ipynb")
    assert page.read_text(encoding="utf-8").startswith(own), f"{name} changed: type make notebooks"
    targets = re.findall(r"(!?)\[[^]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert [target for _, target in targets if "://" not in target and not (PAGES / target).exists()] == []
    assert {PAGES / target for is_figure, target in targets if is_figure} == {*PAGES.glob(f"{name}_files/*")}


def test_a_changed_cell_changes_the_digest_and_changed_metadata_do_not(tmp_path: Path) -> None:
    notebook, copy = nbformat.read(NOTEBOOKS[0], as_version=4), tmp_path / "copy.ipynb"
    notebook.metadata["edited_by"] = "an editor"
    nbformat.write(notebook, copy)
    assert RENDER["digest"](copy) == RENDER["digest"](NOTEBOOKS[0])
    notebook.cells[-1]["source"] += " "
    nbformat.write(notebook, copy)
    assert RENDER["digest"](copy) != RENDER["digest"](NOTEBOOKS[0])


def test_text_that_arrives_in_parts_is_one_output() -> None:
    """Otherwise figures after the text would get other names in each rendering."""
    new = nbformat.v4.new_output
    figure = new("display_data", {"text/plain": "figure"})
    parts = [new("stream", text="\n"), new("stream", text="a"), new("stream", name="stderr", text="!"), figure]
    text, last = RENDER["joined"](parts)
    assert (text["text"], last) == ("\na", figure)
