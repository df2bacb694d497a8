"""The paper's numbers (results/reference; its PROVENANCE.md says where each is from).

What is printed is in paper.csv. What is drawn has one source, the points of digitized/; means of them are made here, by
the measures that the lab takes of its own runs, and curves.csv has the reading error of each curve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import pandas as pd

from qerl_lab.config.files import package_data

EIGHT_STEPS, LAST_TENTH, ALL_STEPS = (
    "mean over steps 0-8",
    "mean over the last tenth of the steps",
    "mean over all steps",
)


@dataclass(frozen=True)
class Difference:
    """Treated less control, or over it. `error` is the reading error of a point of the curves; 0 of printed numbers."""

    value: float
    error: float


@cache
def printed() -> pd.DataFrame:
    """Every row of paper.csv and of `_means`, all columns as text; `number` is the value as a float, nan for none."""
    rows = pd.read_csv(package_data("results/reference") / "paper.csv", dtype=str, keep_default_na=False)
    rows = rows.assign(number=pd.to_numeric(rows["value"], errors="coerce"))
    return pd.concat([rows, _means()], ignore_index=True).fillna({"file": "", "column": "", "error": 0.0})


@cache
def digitized(file: str) -> pd.DataFrame:
    """A column a line of a figure by step (of Figure 15 by stage); nan where it was not read, under another mostly."""
    return pd.read_csv(package_data("results/reference") / "digitized" / f"{file}.csv", index_col=0)


def joined(file: str) -> pd.DataFrame:
    """`digitized` with straight lines between what was read, as the figures are drawn; nan before and after it."""
    return digitized(file).interpolate("index", limit_area="inside")


def over(curves: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The steps of these curves that a mean is over: `EIGHT_STEPS`, `LAST_TENTH` or `ALL_STEPS`."""
    steps = curves.index
    chosen = {EIGHT_STEPS: steps <= 8, LAST_TENTH: steps > 0.9 * steps[-1], ALL_STEPS: steps >= 0}
    return curves[chosen[setting]]


@cache
def curves() -> pd.DataFrame:
    """curves.csv: of each file of digitized/ and column in it, what it is of and its reading `error`."""
    return pd.read_csv(package_data("results/reference") / "curves.csv", keep_default_na=False)


def _means() -> pd.DataFrame:
    """Rows as those of paper.csv: the means of every curve, with its `file`, `column` and reading `error`."""
    found = []
    for curve in curves().to_dict("records"):
        for setting in (EIGHT_STEPS, LAST_TENTH, ALL_STEPS):
            mean = float(over(joined(curve["file"]), setting)[curve["column"]].mean())
            own = {"setting": setting, "number": mean, "value": f"{mean:.3f}", "unit": ""}
            found.append(curve | own | {"certainty": f"approx (digitized plot, +-{curve['error']:g})"})
    return pd.DataFrame(found)


def _where(columns: Mapping[str, str]) -> pd.DataFrame:
    """The rows with these columns, `setting` by a part of its text."""
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
    """The number of the one row with these columns, `setting` by a part of its text. Raises KeyError otherwise."""
    return float(_row(where)["number"])


def compared(treated: Mapping[str, str], control: Mapping[str, str], ratio: bool = False) -> Difference:
    """Two numbers of the paper, each as in `value`, compared. Raises KeyError as it does.

    Two lines of one figure are compared over the steps where both are known.
    """
    one, other = _row(treated), _row(control)
    a, b = one["number"], other["number"]
    if one["file"] and one["file"] == other["file"]:
        both = over(joined(one["file"]), one["setting"])[[one["column"], other["column"]]].dropna()
        a, b = both.mean()
    return Difference(float(a / b if ratio else a - b), float(max(one["error"], other["error"])))


def numbers(**where: str) -> dict[str, float]:
    """The numbers with these columns by model, one each, in however many tables it stands."""
    return {str(model): float(number) for model, number in _where(where).set_index("model")["number"].items()}


def said(**where: str) -> str:
    """The value of the one row with these columns as printed, with its unit; a dash where there is no such row."""
    rows = _where(where)
    return f"{rows['value'].iloc[0]} {rows['unit'].iloc[0]}".strip().replace(" x", "x") if len(rows) == 1 else "-"
