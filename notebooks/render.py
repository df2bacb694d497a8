"""`make notebooks`: runs every notebook here, and writes it to docs/notebooks/ with its outputs and figures.

`python notebooks/render.py 03_throughput` runs one. A copy holds the digest of the cells that it was made from.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from traitlets.config import Config

from qerl_lab.report.palette import with_fewer_colors

HERE = Path(__file__).resolve().parent
PAGES = HERE.parent / "docs" / "notebooks"
SECONDS = 600  # of one cell
# Of a table its text: the HTML that JupyterLab shows comes with a style sheet, which pages of Markdown print.
SHOWN = ["text/markdown", "image/png", "text/plain"]


def digest(notebook: Path) -> str:
    """12 hex digits that change with the cells of a notebook, and with nothing else of its file."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook.read_bytes())["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:12]


def head(notebook: Path) -> str:
    """The first line of a rendered copy."""
    return f"<!-- Made by `make notebooks` from notebooks/{notebook.name}, cells {digest(notebook)}. Edit that. -->\n"


def execute(notebook: Path, folder: Path = HERE) -> nbformat.NotebookNode:
    """Run a notebook as from `folder`. Raises CellExecutionError with what its cell raised."""
    run = nbformat.read(notebook, as_version=4)
    NotebookClient(run, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    return run


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join text that arrived in several parts, so that the numbers in names of figures stay the same.

    Leaves out stderr: warnings of libraries about this machine.
    """
    found = list[nbformat.NotebookNode]()
    for one in outputs:
        if one.get("name") == "stderr":
            continue
        if found and one["output_type"] == found[-1]["output_type"] == "stream":
            found[-1]["text"] += one["text"]
        else:
            found.append(one)
    return found


def write(notebook: Path) -> None:
    """Run one, and replace its page and its figures."""
    run, files = execute(notebook), PAGES / f"{notebook.stem}_files"
    for cell in run.cells:
        cell["outputs"] = joined(cell.get("outputs", []))
    exporter = MarkdownExporter(config=Config({"NbConvertBase": {"display_data_priority": SHOWN}}))
    text, resources = exporter.from_notebook_node(run, {"unique_key": notebook.stem, "output_files_dir": files.name})
    shutil.rmtree(files, ignore_errors=True)
    for name, data in resources["outputs"].items():
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / name).write_bytes(with_fewer_colors(data) if name.endswith(".png") else data)
    text = text.replace("](../", "](../../")  # what the notebook links to, from a folder further down; and its pages
    text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text)
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
    (PAGES / f"{notebook.stem}.md").write_text(head(notebook) + text.strip() + "\n", encoding="utf-8")


def main(names: list[str]) -> int:
    """Render the notebooks of these names, or all."""
    known = {path.stem: path for path in sorted(HERE.glob("*.ipynb"))}
    if unknown := [name for name in names if name not in known]:
        print(f"error: {unknown[0]} is no notebook; allowed: {', '.join(known)}.", file=sys.stderr)
        return 2
    for notebook in (path for name, path in known.items() if name in names or not names):
        print(notebook.name)
        write(notebook)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
