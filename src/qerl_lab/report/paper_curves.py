"""Draw the paper's figures from digitized points (results/reference/digitized), for panels beside ours.

Most runs use other models, so each figure has its own panel titled with model and task. Runs on a task of the paper are
shown with figures on that task only; other runs are shown with all, and the captions say so.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qerl_lab.report import palette, reference
from qerl_lab.report.arms import Run, differing, task_of
from qerl_lab.report.curves import MARKS, style_panel

Lines = tuple[tuple[str, str], ...]  # (column of the file, label)
GSM8K, PRESUMED, BIGMATH = "GSM8K, DAPO", "GSM8K, GRPO (presumed)", "BigMath, DAPO"
TASKS = {"gsm8k": "GSM8K", "bigmath": "BigMath"}  # prefix of a figure's `task`, by task.name
NOISE, SCHEDULE, ON_BIGMATH = "noise", "schedule", "bigmath"  # what arms may differ in, beyond a single key
FORMATS: tuple[Lines, Lines] = (
    (("NVFP4_LoRA", "NVFP4, LoRA"), ("Float16_LoRA", "BF16, LoRA"), ("Float16_Full", "BF16, all parameters")),
    (("NVFP4_LoRA", "NVFP4, LoRA"), ("MXFP4_LoRA", "MXFP4, LoRA"), ("NF4_LoRA", "NF4, LoRA")),
)
# The lower row of Figure 4 was read panel by panel, so NVFP4 has one column for each.
FORMATS_GRPO: tuple[Lines, Lines] = (
    (("NVFP4_LoRA_leftpanel", "NVFP4, LoRA"), *FORMATS[0][1:]),
    (("NVFP4_LoRA_rightpanel", "NVFP4, LoRA"), *FORMATS[1][1:]),
)
AQN: Lines = (("with_AQN", "NVFP4 with AQN"), ("without_AQN", "NVFP4 without AQN"))
SCHEDULES: Lines = tuple((name, f"{name} decay") for name in ("exponential", "linear", "cosine", "logarithmic"))
RANKS: Lines = tuple((f"rank{rank}", f"rank {rank}") for rank in (16, 32, 64, 128))
LORA: Lines = (("QeRL", "QeRL, NVFP4"), ("LoRA", "LoRA, BF16"))
LABELS = {"reward": "accuracy reward", "entropy": "nats per token", "sigma": "standard deviation"}


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper, shown below our curve `below` if arms differ in `varies`.

    `panels` are the paper's, from top to bottom; `remark` is what a reader must know.
    """

    number: str
    below: str
    varies: str
    model: str
    task: str
    file: str
    panels: tuple[Lines, ...]
    remark: str = ""

    @property
    def name(self) -> str:
        """Name of its PNG file."""
        return f"paper_{self.file.removesuffix('_digitized')}"

    @property
    def about(self) -> str:
        return f"The paper's {self.number}: {self.model}, {self.task}"

    def is_of(self, tasks: Collection[str]) -> bool:
        """Return whether the figure is on one of these tasks, or on none, as for a schedule."""
        return not self.task.startswith(tuple(TASKS.values())) or self.task.startswith(tuple(tasks))


FIGURES = (
    PaperFigure("Figure 4, upper row", "reward", "format.name", "Qwen2.5-7B", GSM8K, "fig04_dapo_7b", FORMATS,
                "Learning rates by Figures 16 and 17: NVFP4 3e-5, BF16 with LoRA 5e-6. Six misread points of BF16 are "
                "left out."),
    PaperFigure("Figure 4, lower row", "reward", "format.name", "Qwen2.5-7B", "GSM8K, GRPO",
                "fig4_grpo_7b_reward_digitized", FORMATS_GRPO,
                "The panels were read separately. Three points of NVFP4, misread in one, are left out there."),
    PaperFigure("Figure 7", "reward", ON_BIGMATH, "Qwen2.5-7B", BIGMATH, "fig07_bigmath_7B", (LORA,)),
    PaperFigure("Figure 7", "reward", ON_BIGMATH, "Qwen2.5-14B", BIGMATH, "fig07_bigmath_14B", (LORA,)),
    PaperFigure("Figure 8", "reward", NOISE, "Qwen2.5-3B", PRESUMED, "fig08_aqn_3b", (AQN,)),
    PaperFigure("Figure 8", "reward", NOISE, "Qwen2.5-7B", BIGMATH, "fig08_aqn_7b", (AQN,)),
    PaperFigure("Figure 9", "reward", SCHEDULE, "Qwen2.5-3B", PRESUMED, "fig09_scheduler_3b", (SCHEDULES,)),
    PaperFigure("Figure 10", "reward", "lora.rank", "Qwen2.5-3B", PRESUMED, "fig10_lora_rank_3b", (RANKS,)),
    PaperFigure("Figure 13", "reward", ON_BIGMATH, "Qwen2.5-32B", BIGMATH, "fig13_32b_reward_digitized",
                (tuple((f"{column}_reward", label) for column, label in LORA),)),
    PaperFigure("Figure 16", "reward", "optim.learning_rate", "Qwen2.5-7B in NVFP4", GSM8K, "fig16_lr_qerl_7b",
                ((("QeRL_lr3e-5", "learning rate 3e-5"), ("QeRL_lr5e-6", "learning rate 5e-6")),)),
    PaperFigure("Figure 17", "reward", "optim.learning_rate", "Qwen2.5-7B in BF16", GSM8K, "fig17_lr_lora_7b",
                ((("LoRA_lr3e-5", "learning rate 3e-5"), ("LoRA_lr5e-6", "learning rate 5e-6")),)),
    PaperFigure("Figure 5", "entropy", "format.name", "Qwen2.5-7B", "GSM8K", "fig05_entropy_7b",
                ((("NVFP4_LoRA_r32", "NVFP4"), ("NF4_LoRA_r32", "NF4"), ("MXFP4_LoRA_r32", "MXFP4"),
                  ("Float16_LoRA_r32", "BF16")),)),
    PaperFigure("Figure 14", "entropy", "format.name", "Qwen2.5-14B", "BigMath, DAPO (presumed)", "fig14_entropy_14b",
                (LORA,)),
    PaperFigure("Figure 15", "sigma", SCHEDULE, "no model", "schedules only", "fig15_noise_schedulers",
                (SCHEDULES,)),
)  # fmt: skip


def figures_beside(below: str, runs: Sequence[Run]) -> list[PaperFigure]:
    """Return the paper's figures for the curve `below` that vary what the arms do, on the arms' task if it has any."""
    schedules, varied = {run.value("aqn.schedule") for run in runs}, set(differing(runs))
    varied |= {NOISE} if "off" in schedules and len(schedules) > 1 else set()
    varied |= {SCHEDULE} if len(schedules - {"off"}) > 1 else set()
    varied |= {ON_BIGMATH} if "bigmath" in {run.value("task.name") for run in runs} else set()
    tasks = _tasks(runs) or set(TASKS.values())
    return [figure for figure in FIGURES if figure.below == below and figure.varies in varied and figure.is_of(tasks)]


def _tasks(runs: Sequence[Run]) -> set[str]:
    """Return the paper's tasks among the arms' tasks."""
    return {TASKS[name] for run in runs if (name := run.value("task.name")) in TASKS}


def caption(figure: PaperFigure, runs: Sequence[Run]) -> str:
    """Caption a figure of the paper: its subject, and the model and task of our arms above it."""
    ours = "Ours above" if figure.is_of(_tasks(runs)) else "Ours above, on another task"
    models = {PurePath(run.value("model.path")).name for run in runs}
    tasks, algorithms = {task_of(run) for run in runs}, {run.value("algorithm.name") for run in runs}
    named = ", ".join("/".join(sorted(names)) for names in (models, tasks, algorithms))
    curves = reference.curves()
    error = curves.loc[curves["file"] == figure.file, "error"].max()
    return f"{figure.about}, read to +-{error:g}. {ours}: model {named}. {figure.remark}".strip()


@plt.style.context(palette.STYLE)
def draw(figure: PaperFigure) -> Figure:
    """Draw the panels below each other with straight lines between digitized points; the caller closes the figure."""
    table, curves = reference.digitized(figure.file), reference.curves()
    formats = curves[curves["file"] == figure.file].set_index("column")["weight_format"]
    size = (4.4, sum(2.9 + 0.19 * len(lines) for lines in figure.panels))
    drawn, axes = plt.subplots(len(figure.panels), 1, sharex=True, sharey=True, squeeze=False, figsize=size)
    for axis, lines in zip(axes.flat, figure.panels, strict=True):
        styles = palette.styles({column: formats[column] for column, _ in lines})
        for column, label in lines:
            values = table[column].dropna()
            axis.plot(values, label=label, markevery=max(1, len(values) // MARKS), **styles[column])
        style_panel(axis, LABELS[figure.below], str(table.index.name))
    axes.flat[0].set_title(f"The paper's {figure.number}:\n{figure.model}, {figure.task}")
    return drawn
