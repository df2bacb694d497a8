"""Read the paper's numbers from results/reference, and find those that belong beside our arms.

Printed numbers are in paper.csv. Drawn ones come from the points in digitized/: this module computes their means as the
lab does for its own runs, and curves.csv has the reading error of each curve.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import pandas as pd

from qerl_lab.config.conf_folder import package_data
from qerl_lab.report.runs import Run

EIGHT_STEPS, LAST_TENTH = "mean over steps 0-8", "mean over the last tenth of the steps"
# Settings of the paper's arms, beside format and noise. A number of the paper beside an arm that the paper lacks, such
# as BF16 at another temperature, would mislead.
PLAIN = {
    "rollout.temperature": "1.0", "algorithm.entropy_coef": "0.0", "algorithm.entropy_target": "None",
    "format.scale_rule": "max", "lora.rank": "32",
}  # fmt: skip
QUIET = {"aqn.schedule": "off"}
AQN = {"aqn.schedule": "exponential", "aqn.unit": "sigma", "aqn.relative": "False"}
TABLE_1 = (  # settings of our arms, with method and weight format of their row in the paper's Table 1
    ({"format.name": "bf16", **QUIET, **PLAIN}, ("LoRA", "BF16")),
    ({"format.name": "nf4", **QUIET, **PLAIN}, ("QLoRA", "NF4")),
    ({"format.name": "mxfp4", **QUIET, **PLAIN}, ("LoRA", "MXFP4")),
    ({"format.name": "nvfp4", **QUIET, **PLAIN}, ("QeRL w/o AQN", "NVFP4")),
    ({"format.name": "nvfp4", **AQN, **PLAIN}, ("QeRL +AQN", "NVFP4")),
)


@cache
def printed() -> pd.DataFrame:
    """Return the numbers of the paper, a row each: the rows of paper.csv, and two means of every digitized curve.

    Columns of paper.csv are text; `number` is `value` as a float, nan if it is none.
    """
    rows = pd.read_csv(package_data("results/reference") / "paper.csv", dtype=str, keep_default_na=False)
    rows = rows.assign(number=pd.to_numeric(rows["value"], errors="coerce"))
    means = []
    for curve in curves().to_dict("records"):
        for setting in (EIGHT_STEPS, LAST_TENTH):
            mean = float(steps_of_mean(interpolated(curve["file"]), setting)[curve["column"]].mean())
            own = {"setting": setting, "number": mean, "value": f"{mean:.3f}", "unit": ""}
            means.append(curve | own | {"certainty": f"approx (digitized plot, +-{curve['error']:g})"})
    return pd.concat([rows, pd.DataFrame(means)], ignore_index=True).fillna({"file": "", "column": "", "error": 0.0})


@cache
def digitized(file: str) -> pd.DataFrame:
    """Read the curves of a figure, a row per step (Figure 15: stage); nan where another line hides the curve."""
    return pd.read_csv(package_data("results/reference") / "digitized" / f"{file}.csv", index_col=0)


def interpolated(file: str) -> pd.DataFrame:
    """Return the curves of `digitized` with gaps filled linearly; nan before the first and after the last point."""
    return digitized(file).interpolate("index", limit_area="inside")


def steps_of_mean(curves: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Select the steps of a mean: up to step 8 if `setting` is `EIGHT_STEPS`, the last tenth if it is `LAST_TENTH`."""
    steps = curves.index
    return curves[steps <= 8 if setting == EIGHT_STEPS else steps > 0.9 * steps[-1]]


@cache
def curves() -> pd.DataFrame:
    """Read curves.csv: a row for each digitized curve, with file, column, model, format, metric and reading `error`."""
    return pd.read_csv(package_data("results/reference") / "curves.csv", keep_default_na=False)


def _select_rows(columns: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows of `printed` with these values by column. For the column `setting`, a part is enough."""
    rows = printed()
    for column, wanted in columns.items():
        is_it = rows[column].str.contains(wanted, regex=False) if column == "setting" else rows[column] == wanted
        rows = rows[is_it]
    return rows


def _select_one_row(where: Mapping[str, str]) -> pd.Series:
    """Return the row that `_select_rows` finds. Raises KeyError unless it finds exactly one, with a number."""
    rows = _select_rows(where)
    if len(rows) != 1 or math.isnan(rows["number"].iloc[0]):
        raise KeyError(f"{len(rows)} numbers of the paper have {where}; one is needed")
    return rows.iloc[0]


def value(**where: str) -> float:
    """Return the paper's number with these column values (`metric="accuracy"`), as `_select_one_row` finds it."""
    return float(_select_one_row(where)["number"])


def paper_difference(
    treated: Mapping[str, str], control: Mapping[str, str], ratio: bool = False
) -> tuple[float, float]:  # fmt: skip
    """Return the paper's number `treated` minus `control`, or their `ratio`; and how far reading a curve may be off.

    Two curves of one figure are compared where both are known.
    """
    one, other = _select_one_row(treated), _select_one_row(control)
    a, b = one["number"], other["number"]
    if one["file"] and one["file"] == other["file"]:
        both = steps_of_mean(interpolated(one["file"]), one["setting"])[[one["column"], other["column"]]].dropna()
        a, b = both.mean()
    return float(a / b if ratio else a - b), float(max(one["error"], other["error"]))


def numbers(**where: str) -> dict[str, float]:
    """Map each model to the number of the paper with these column values; if several rows have them, to the last."""
    return {str(model): float(number) for model, number in _select_rows(where).set_index("model")["number"].items()}


def rows_of_table_1(arms: Mapping[str, Sequence[Run]], where: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Map the labels of our arms to (method, weight format) of the row in the paper's Table 1 with the same settings.

    Arms without the settings `where` are left out; so are several arms with one row, as the paper's is not known.
    """
    keys = ("model.path", "task.name", "algorithm.name")
    found = {
        label: (row, tuple(runs[0].value(key) for key in keys))
        for label, runs in arms.items() for settings, row in TABLE_1 if settings.items() <= runs[0].settings.items()
    }  # fmt: skip
    counts = Counter(found.values())
    return {
        label: row for label, (row, place) in found.items()
        if counts[row, place] == 1 and where.items() <= arms[label][0].settings.items()
    }  # fmt: skip
