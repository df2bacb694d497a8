"""Which arms of a report answer to which of the paper's: by their settings and task, and only where one alone does.

A paper's number beside an arm that the paper does not have, BF16 at another temperature say, would compare two things.
"""

from collections import Counter

from qerl_lab.report.arms import Run
from qerl_lab.report.claims import AQN, PRINTED_AS, Settings, of_format
from qerl_lab.report.comparison import Comparison

GSM8K, BIGMATH = "gsm8k", "bigmath"  # tasks of the paper's tables
Answers = dict[str, tuple[str, str]]  # method and weight format, as the paper's Table 1 calls them, by an arm's label
PLAIN: Settings = {
    "rollout.temperature": "1.0", "algorithm.entropy_coef": "0.0", "algorithm.entropy_target": "None",
    "format.scale_rule": "max", "lora.rank": "32",
}  # fmt: skip
# The arms of Table 1, and as which of its rows.
TABLE_1: tuple[tuple[Settings, tuple[str, str]], ...] = (
    ({**of_format("bf16"), **PLAIN}, ("LoRA", "BF16")),
    ({**of_format("nf4"), **PLAIN}, ("QLoRA", "NF4")),
    ({**of_format("mxfp4"), **PLAIN}, ("LoRA", "MXFP4")),
    ({**of_format("nvfp4"), **PLAIN}, ("QeRL w/o AQN", "NVFP4")),
    ({**of_format("nvfp4"), **AQN, **PLAIN}, ("QeRL +AQN", "NVFP4")),
)


def answers(comparison: Comparison) -> Answers:
    """The row of Table 1 of each arm that answers to one; of several of one model and task none is the paper's."""
    firsts = {label: records[0].run for label, records in comparison.arms.items()}
    found = {label: row for label, run in firsts.items() if (row := _row(run))}

    def place(label: str) -> tuple[object, ...]:
        return found[label], *(firsts[label].value(key) for key in ("model.path", "task.name", "algorithm.name"))

    counts = Counter(map(place, found))
    return {label: row for label, row in found.items() if counts[place(label)] == 1}


def _row(run: Run) -> tuple[str, str] | None:
    return next((row for settings, row in TABLE_1 if settings.items() <= run.settings.items()), None)


def in_table_1(comparison: Comparison) -> Answers:
    """Those of `answers` that Table 1 asked: of GSM8K, by GRPO."""
    return _that_have(comparison, {"task.name": GSM8K, "algorithm.name": "grpo"})


def in_figure_5(comparison: Comparison) -> dict[str, str]:
    """The weight format, as Figure 5 calls it, of each arm that answers to one of its curves: GSM8K without noise."""
    found = _that_have(comparison, {"task.name": GSM8K, "aqn.schedule": "off"})
    return {label: PRINTED_AS[weight_format.lower()] for label, (_, weight_format) in found.items()}


def _that_have(comparison: Comparison, settings: Settings) -> Answers:
    arms = comparison.arms
    return {
        label: row for label, row in answers(comparison).items()
        if settings.items() <= arms[label][0].run.settings.items()
    }  # fmt: skip
