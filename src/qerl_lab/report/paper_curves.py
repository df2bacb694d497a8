"""Draw the paper's figures from digitized points (results/reference/digitized), to stand beside ours."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import matplotlib.pyplot as plt
import yaml
from matplotlib.figure import Figure

from qerl_lab.config.conf_folder import package_data
from qerl_lab.report import palette, reference
from qerl_lab.report.arms import differing_keys, task_of
from qerl_lab.report.curves import MARKS, add_panel_legend, style_panel
from qerl_lab.report.runs import ABSENT, Run

TASKS = {"gsm8k": "GSM8K", "bigmath": "BigMath"}  # task.name -> name in the paper, with which `PaperFigure.task` begins
LABELS = {"reward": "accuracy reward", "entropy": "nats per token", "sigma": "standard deviation"}


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper: an entry of results/reference/figures.yaml, which describes the fields."""

    number: str
    below: str
    varies: str
    model: str
    task: str
    file: str
    panels: list[dict[str, str]]
    remark: str = ""

    @property
    def name(self) -> str:
        """Return the name of the figure's PNG file, without `.png`."""
        return f"paper_{self.file.removesuffix('_digitized')}"

    @property
    def about(self) -> str:
        """Describe the figure by number, model and task."""
        return f"The paper's {self.number}: {self.model}, {self.task}"

    def shows(self, tasks: Collection[str]) -> bool:
        """Tell whether the figure shows one of `tasks` (GSM8K, BigMath), or no task (noise schedules)."""
        return self.task.startswith(("schedules", *tasks))


FIGURES = [
    PaperFigure(**entry)
    for entry in yaml.safe_load((package_data("results/reference") / "figures.yaml").read_text("utf-8"))
]


def figures_below(curve: str, runs: Sequence[Run]) -> list[PaperFigure]:
    """Select the paper's figures to show below our curve `curve`, e.g. "reward", for comparison.

    A figure is selected if figures.yaml assigns it to this curve, if it varies a setting in which `runs` differ, and if
    it shows a task of `runs` or none. If the paper has no task of `runs`, the task does not matter. `runs` has one run
    per arm.
    """
    schedules, varied = {run.value("aqn.schedule") for run in runs}, set(differing_keys(runs))
    varied |= {"noise"} if "off" in schedules and len(schedules) > 1 else set()
    varied |= {"schedule"} if len(schedules - {"off"}) > 1 else set()
    varied |= {"bigmath"} if "bigmath" in {run.value("task.name") for run in runs} else set()
    tasks = _tasks_of_paper(runs) or set(TASKS.values())
    return [figure for figure in FIGURES if figure.below == curve and figure.varies in varied and figure.shows(tasks)]


def _tasks_of_paper(runs: Sequence[Run]) -> set[str]:
    """Return the tasks that occur both in `runs` and in the paper, under the paper's names (GSM8K, BigMath)."""
    return {TASKS[name] for run in runs if (name := run.value("task.name")) in TASKS}


def caption(figure: PaperFigure, runs: Sequence[Run]) -> str:
    """Format the caption of a figure of the paper: its subject, the error of the digitized points, and a remark.

    The caption also names the models, tasks and algorithms in our figure above. `runs` has one run per arm of our
    figure.
    """
    ours = "Ours above" if figure.shows(_tasks_of_paper(runs)) else "Ours above, on another task"
    models = {PurePath(run.value("model.path")).name for run in runs}
    tasks, algorithms = set[str](), {run.value("algorithm.name") for run in runs}
    for run in runs:
        is_plain = run.value("task.module_hash") in (ABSENT, "None")  # no file of the user replaces parts of the task
        tasks.add(task_of(run) + ("" if is_plain else " with a task.module"))
    named = ", ".join("/".join(sorted(names)) for names in (models, tasks, algorithms))
    curves = reference.curves()
    error = curves.loc[curves["file"] == figure.file, "error"].max()
    return f"{figure.about}, read to +-{error:g}. {ours}: model {named}. {figure.remark}".strip()


@palette.styled()
def draw(figure: PaperFigure) -> Figure:
    """Draw a figure of the paper from digitized points, its panels below each other. The caller closes the figure."""
    table, curves = reference.digitized(figure.file), reference.curves()
    formats = curves[curves["file"] == figure.file].set_index("column")["weight_format"]
    size = (4.4, sum(2.9 + 0.19 * len(lines) for lines in figure.panels))
    drawn, axes = plt.subplots(len(figure.panels), 1, sharex=True, sharey=True, squeeze=False, figsize=size)
    for axis, lines in zip(axes.flat, figure.panels, strict=True):
        styles = palette.styles({column: formats[column] for column in lines})
        for column, label in lines.items():
            values = table[column].dropna()
            axis.plot(values, label=label, markevery=max(1, len(values) // MARKS), **styles[column])
        style_panel(axis, LABELS[figure.below], str(table.index.name))
        add_panel_legend(axis)
    axes.flat[0].set_title(figure.about.replace(": ", ":\n", 1))
    return drawn
