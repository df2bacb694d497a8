"""Match arms of a report to arms of the paper, by settings and task, and only if exactly one arm matches.

A number of the paper beside an arm that the paper lacks, such as BF16 at another temperature, would mislead.
"""

from collections import Counter

from qerl_lab.report.claims import AQN, PRINTED_AS, Settings, noiseless_settings
from qerl_lab.report.comparison import Comparison

GSM8K = "gsm8k"  # task of the paper's tables
Table1Rows = dict[str, tuple[str, str]]  # arm label -> (method, weight format) as in the paper's Table 1
PLAIN: Settings = {
    "rollout.temperature": "1.0", "algorithm.entropy_coef": "0.0", "algorithm.entropy_target": "None",
    "format.scale_rule": "max", "lora.rank": "32",
}  # fmt: skip
# Settings of our arms, with their rows of Table 1.
TABLE_1: tuple[tuple[Settings, tuple[str, str]], ...] = (
    ({**noiseless_settings("bf16"), **PLAIN}, ("LoRA", "BF16")),
    ({**noiseless_settings("nf4"), **PLAIN}, ("QLoRA", "NF4")),
    ({**noiseless_settings("mxfp4"), **PLAIN}, ("LoRA", "MXFP4")),
    ({**noiseless_settings("nvfp4"), **PLAIN}, ("QeRL w/o AQN", "NVFP4")),
    ({**noiseless_settings("nvfp4"), **AQN, **PLAIN}, ("QeRL +AQN", "NVFP4")),
)


def table_1_rows(comparison: Comparison) -> Table1Rows:
    """Map each of our arms to its row of the paper's Table 1, if its settings match one.

    Several matches on one model, task and algorithm all drop out.
    """
    firsts = {label: records[0].run for label, records in comparison.arms.items()}
    found = {
        label: row
        for label, run in firsts.items() for settings, row in TABLE_1
        if settings.items() <= run.settings.items()
    }  # fmt: skip
    places = {
        label: (row, *(firsts[label].value(key) for key in ("model.path", "task.name", "algorithm.name")))
        for label, row in found.items()
    }
    counts = Counter(places.values())
    return {label: row for label, row in found.items() if counts[places[label]] == 1}


def in_table_1(comparison: Comparison) -> Table1Rows:
    """Map each of our arms on GSM8K with GRPO, as in the paper's Table 1, to its row there."""
    return _select_table_1_rows(comparison, {"task.name": GSM8K, "algorithm.name": "grpo"})


def in_figure_5(comparison: Comparison) -> dict[str, str]:
    """Map each of our arms that matches a curve of the paper's Figure 5 to the weight format's name there.

    The figure is of GSM8K without noise.
    """
    found = _select_table_1_rows(comparison, {"task.name": GSM8K, "aqn.schedule": "off"})
    return {label: PRINTED_AS[weight_format.lower()] for label, (_, weight_format) in found.items()}


def _select_table_1_rows(comparison: Comparison, settings: Settings) -> Table1Rows:
    arms = comparison.arms
    return {
        label: row for label, row in table_1_rows(comparison).items()
        if settings.items() <= arms[label][0].run.settings.items()
    }  # fmt: skip
