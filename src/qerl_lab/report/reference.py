"""Read the paper's numbers from results/reference; its PROVENANCE.md gives the source of each.

Printed numbers are in paper.csv. Drawn ones come from the points in digitized/: this module computes their means as the
lab does for its own runs, and curves.csv has the reading error of each curve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import pandas as pd

from qerl_lab.config.conf_folder import package_data

EIGHT_STEPS, LAST_TENTH, ALL_STEPS = (
    "mean over steps 0-8",
    "mean over the last tenth of the steps",
    "mean over all steps",
)

FORMATS = {"bf16": "BF16", "nf4": "NF4", "nvfp4": "NVFP4"}  # our format -> the paper's name in tables of speed
MODELS = {f"qwen2.5-{size}b": f"Qwen2.5-{size}B-Instruct" for size in (3, 7, 14, 32)}  # our model -> the paper's name
SPEEDS_OF = dict(zip(MODELS, ("Table 5", "Table 6", "Table 7", "Table 8"), strict=True))
RANKS, MOST_TOKENS = (16, 32, 64), 2048  # of Table 9; of a completion in all tables of speed


@dataclass(frozen=True)
class Difference:
    """An effect that the paper prints: treated minus control, or their ratio.

    `error` is how far a value read from a curve may be off; 0 for a printed number.
    """

    value: float
    error: float


@cache
def printed() -> pd.DataFrame:
    """Return the rows of paper.csv and `_means`, all columns as text, and `number`: the value as a float or nan."""
    rows = pd.read_csv(package_data("results/reference") / "paper.csv", dtype=str, keep_default_na=False)
    rows = rows.assign(number=pd.to_numeric(rows["value"], errors="coerce"))
    return pd.concat([rows, _means()], ignore_index=True).fillna({"file": "", "column": "", "error": 0.0})


@cache
def digitized(file: str) -> pd.DataFrame:
    """Return the lines of a figure as columns by step (Figure 15: stage); nan where another line hides them."""
    return pd.read_csv(package_data("results/reference") / "digitized" / f"{file}.csv", index_col=0)


def interpolated(file: str) -> pd.DataFrame:
    """Return `digitized` with linear interpolation inside each line; nan outside."""
    return digitized(file).interpolate("index", limit_area="inside")


def steps_of_mean(curves: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Select the steps that a mean covers: `EIGHT_STEPS`, `LAST_TENTH` or `ALL_STEPS`."""
    steps = curves.index
    chosen = {EIGHT_STEPS: steps <= 8, LAST_TENTH: steps > 0.9 * steps[-1], ALL_STEPS: steps >= 0}
    return curves[chosen[setting]]


@cache
def curves() -> pd.DataFrame:
    """Read curves.csv: a row for each digitized curve, with its subject and reading `error`."""
    return pd.read_csv(package_data("results/reference") / "curves.csv", keep_default_na=False)


def _means() -> pd.DataFrame:
    """Return the means of every curve as rows of paper.csv, with `file`, `column` and reading `error`."""
    found = []
    for curve in curves().to_dict("records"):
        for setting in (EIGHT_STEPS, LAST_TENTH, ALL_STEPS):
            mean = float(steps_of_mean(interpolated(curve["file"]), setting)[curve["column"]].mean())
            own = {"setting": setting, "number": mean, "value": f"{mean:.3f}", "unit": ""}
            found.append(curve | own | {"certainty": f"approx (digitized plot, +-{curve['error']:g})"})
    return pd.DataFrame(found)


def _where(columns: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows with these column values; `setting` matches a part of its text."""
    rows = printed()
    for column, wanted in columns.items():
        is_it = rows[column].str.contains(wanted, regex=False) if column == "setting" else rows[column] == wanted
        rows = rows[is_it]
    return rows


def _row(where: Mapping[str, str]) -> pd.Series:
    rows = _where(where)
    if len(rows) != 1 or math.isnan(rows["number"].iloc[0]):
        raise KeyError(f"{len(rows)} numbers of the paper have {where}; one is needed")
    return rows.iloc[0]


def value(**where: str) -> float:
    """Return the number of the one row with these values (`setting`: a part of it). Raises KeyError otherwise."""
    return float(_row(where)["number"])


def paper_difference(treated: Mapping[str, str], control: Mapping[str, str], ratio: bool = False) -> Difference:
    """Compare two numbers of the paper, selected as in `value`. Raises KeyError as it does.

    Two lines of one figure are compared over the steps where both are known.
    """
    one, other = _row(treated), _row(control)
    a, b = one["number"], other["number"]
    if one["file"] and one["file"] == other["file"]:
        both = steps_of_mean(interpolated(one["file"]), one["setting"])[[one["column"], other["column"]]].dropna()
        a, b = both.mean()
    return Difference(float(a / b if ratio else a - b), float(max(one["error"], other["error"])))


def numbers(**where: str) -> dict[str, float]:
    """Return the matching numbers by model; a number that several tables repeat appears once."""
    return {str(model): float(number) for model, number in _where(where).set_index("model")["number"].items()}


def printed_text(**where: str) -> str:
    """Return the value of the single matching row as printed, with its unit; a dash if there is no such row."""
    rows = _where(where)
    return f"{rows['value'].iloc[0]} {rows['unit'].iloc[0]}".strip().replace(" x", "x") if len(rows) == 1 else "-"


def tokens(model: str, table: str, setting: str) -> dict[str, float]:
    """Return the paper's rollout tokens/s by our format for one of `MODELS`; empty if it printed none."""
    rows = _where({"table": table, "model": MODELS.get(model, ""), "metric": "rollout throughput", "setting": setting})
    printed_of = rows.set_index("weight_format")["number"]
    return {name: float(printed_of[theirs]) for name, theirs in FORMATS.items() if theirs in printed_of.index}


def tokens_of_rank(model: str, rank: int) -> dict[str, float]:
    """Return the paper's tokens/s at batch 1 by format: BF16 and NVFP4 from Table 9, NF4 from Figure 11."""
    return {**tokens(model, "Figure 11", f"LoRA rank {rank};"), **tokens(model, "Table 9", f"LoRA rank {rank};")}


def ratio_by_rank(model: str, over: str) -> dict[int, float]:
    """Return the paper's NVFP4 speed over its `over` (bf16 or nf4) by rank; empty if it printed none."""
    of_rank = {rank: tokens_of_rank(model, rank) for rank in RANKS}
    return {rank: speeds["nvfp4"] / speeds[over] for rank, speeds in of_rank.items() if over in speeds}


def step_speed(model: str, batch: int, weight_format: str, *, checkpointing: bool = True) -> str:
    """Return the end-to-end speed printed in Tables 5 to 8: over BF16, or seconds per step; a dash if there is none."""
    metric = "E2E RL w/ gradient checkpointing" if checkpointing else "E2E RL speedup w/o gradient checkpointing"
    return printed_text(
        table=SPEEDS_OF.get(model, ""), model=MODELS.get(model, ""), metric=metric, setting=f"BS {batch};",
        weight_format=FORMATS.get(weight_format, ""),
    )  # fmt: skip
