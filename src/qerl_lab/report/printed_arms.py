"""Match arms of a report to arms of the paper, by settings and task, and only if exactly one arm matches.

A number of the paper beside an arm that the paper lacks, such as BF16 at another temperature, would mislead.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from qerl_lab.report import reference
from qerl_lab.report.claims import AQN, PRINTED_AS, Settings, of_format
from qerl_lab.report.comparison import Comparison
from qerl_lab.report.measures import MEASURES, Unmeasured
from qerl_lab.report.runs import Record
from qerl_lab.report.table import NONE, Table

GSM8K = "gsm8k"  # task of the paper's tables
Answers = dict[str, tuple[str, str]]  # arm label -> (method, weight format) as in the paper's Table 1
PLAIN: Settings = {
    "rollout.temperature": "1.0", "algorithm.entropy_coef": "0.0", "algorithm.entropy_target": "None",
    "format.scale_rule": "max", "lora.rank": "32",
}  # fmt: skip
# Settings of our arms, with their rows of Table 1.
TABLE_1: tuple[tuple[Settings, tuple[str, str]], ...] = (
    ({**of_format("bf16"), **PLAIN}, ("LoRA", "BF16")),
    ({**of_format("nf4"), **PLAIN}, ("QLoRA", "NF4")),
    ({**of_format("mxfp4"), **PLAIN}, ("LoRA", "MXFP4")),
    ({**of_format("nvfp4"), **PLAIN}, ("QeRL w/o AQN", "NVFP4")),
    ({**of_format("nvfp4"), **AQN, **PLAIN}, ("QeRL +AQN", "NVFP4")),
)


def table_1_rows(comparison: Comparison) -> Answers:
    """Map each matching arm to its row of Table 1; several matches on one model, task and algorithm all drop out."""
    firsts = {label: records[0].run for label, records in comparison.arms.items()}
    found = {
        label: row
        for label, run in firsts.items() for settings, row in TABLE_1
        if settings.items() <= run.settings.items()
    }  # fmt: skip

    def place(label: str) -> tuple[object, ...]:
        return found[label], *(firsts[label].value(key) for key in ("model.path", "task.name", "algorithm.name"))

    counts = Counter(map(place, found))
    return {label: row for label, row in found.items() if counts[place(label)] == 1}


def in_table_1(comparison: Comparison) -> Answers:
    """Select the `table_1_rows` under the conditions of Table 1: GSM8K with GRPO."""
    return _match_arms(comparison, {"task.name": GSM8K, "algorithm.name": "grpo"})


def in_figure_5(comparison: Comparison) -> dict[str, str]:
    """Map each arm that matches a curve of Figure 5 (GSM8K without noise) to the figure's name of its weight format."""
    found = _match_arms(comparison, {"task.name": GSM8K, "aqn.schedule": "off"})
    return {label: PRINTED_AS[weight_format.lower()] for label, (_, weight_format) in found.items()}


def _match_arms(comparison: Comparison, settings: Settings) -> Answers:
    arms = comparison.arms
    return {
        label: row for label, row in table_1_rows(comparison).items()
        if settings.items() <= arms[label][0].run.settings.items()
    }  # fmt: skip


# --- right answers beside the paper's reward curves; Figure 4 is left out, since its lines differ in learning rate

Shown = Callable[[pd.DataFrame], str]  # formats differences [seeds, 1] as a cell
MEASURED = (("answers_last", reference.LAST_TENTH), ("answers_mean", reference.ALL_STEPS))


@dataclass(frozen=True)
class Pair:
    """Two lines of a figure of the paper, and the values of `key` that select our two matching arms.

    The two arms must share all settings outside the group of `key`, such as `aqn.` for aqn.schedule.
    """

    table: str
    key: str
    treated: tuple[str, str]  # value of `key`, method in the paper
    control: tuple[str, str]

    def of_paper(self, setting: str) -> str:
        """Format the paper's difference with its reading error."""
        where = {"table": self.table, "model": "Qwen2.5-3B-Instruct", "setting": setting}
        found = reference.paper_difference(where | {"method": self.treated[1]}, where | {"method": self.control[1]})
        return f"{found.value:+.3f} +-{found.error:g}"


EXPONENTIAL, RANK_32 = ("exponential", "QeRL +AQN exponential decay"), ("32", "QeRL LoRA rank 32")
PAIRS = (
    Pair("Figure 8", "aqn.schedule", ("exponential", "QeRL with AQN"), ("off", "QeRL without AQN")),
    *(
        Pair("Figure 9", "aqn.schedule", EXPONENTIAL, (other, f"QeRL +AQN {other} decay"))
        for other in ("linear", "cosine", "logarithmic")
    ),
    *(Pair("Figure 10", "lora.rank", (rank, f"QeRL LoRA rank {rank}"), RANK_32) for rank in ("16", "64", "128")),
)  # fmt: skip


def growth(comparison: Comparison, shown: Shown) -> list[Table]:
    """Build the table; empty if no two arms match a pair of the paper's lines."""
    rows = [
        [f"{treated} - {control}", *_ours(comparison, treated, control, shown), pair.table,
         *(pair.of_paper(setting) for _, setting in MEASURED)]
        for pair in PAIRS for treated, control in _arms(comparison, pair)
    ]  # fmt: skip
    head = ["arms", "last tenth of the steps", "all steps", "the paper's", "last tenth there", "all steps there"]
    about = (
        "Share of right answers among a step's completions, paired by seed: mean [95% interval] (seeds). Paper: "
        "one run per line, Qwen2.5-3B in NVFP4 on GSM8K, read from its figures, with the reading error."
    )
    return [Table("Right answers beside the paper's curves", about, [head, *rows])] if rows else []


def _arms(comparison: Comparison, pair: Pair) -> Iterator[tuple[str, str]]:
    """Yield the pairs of arms that match both lines of a pair and share a seed."""
    group = pair.key.partition(".")[0] + "."

    def others(records: Sequence[Record]) -> dict[str, str]:
        return {key: value for key, value in records[0].run.arm if not key.startswith(group)}

    def answers_to(value: str) -> list[str]:
        """Return the NVFP4 arms with this value; with noise only those that set sigma, as the paper does, not KL."""
        noise = AQN if group == "aqn." and value != "off" else {}
        wanted = {"format.name": "nvfp4", **noise, pair.key: value}
        return [arm for arm, records in comparison.arms.items() if wanted.items() <= records[0].run.settings.items()]

    for treated in answers_to(pair.treated[0]):
        for control in answers_to(pair.control[0]):
            records, base = comparison.arms[treated], comparison.arms[control]
            if others(records) == others(base) and {r.run.seed for r in records} & {r.run.seed for r in base}:
                yield treated, control


def _ours(comparison: Comparison, treated: str, control: str, shown: Shown) -> list[str]:
    records, base = comparison.arms[treated], comparison.arms[control]
    try:
        return [
            shown((MEASURES[name].of(records, base) - MEASURES[name].of(base, base)).dropna()) for name, _ in MEASURED
        ]
    except Unmeasured:
        return [NONE, NONE]
