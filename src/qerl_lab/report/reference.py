"""The paper's numbers, from results/reference/paper.csv (its PROVENANCE.md says where each is from)."""

import math
from collections.abc import Mapping
from functools import cache

import pandas as pd

from qerl_lab.config.files import package_data


@cache
def printed() -> pd.DataFrame:
    """Every row, all columns as text; `number` is the value as a float, nan where it is none."""
    rows = pd.read_csv(package_data("results/reference") / "paper.csv", dtype=str, keep_default_na=False)
    return rows.assign(number=pd.to_numeric(rows["value"], errors="coerce"))


def _where(columns: Mapping[str, str]) -> pd.DataFrame:
    """The rows with these columns, `setting` by a part of its text."""
    rows = printed()
    for column, wanted in columns.items():
        is_it = rows[column].str.contains(wanted, regex=False) if column == "setting" else rows[column] == wanted
        rows = rows[is_it]
    return rows


def value(**where: str) -> float:
    """The number of the one row with these columns, `setting` by a part of its text. Raises KeyError otherwise."""
    rows = _where(where)
    if len(rows) != 1 or math.isnan(rows["number"].iloc[0]):
        raise KeyError(f"{len(rows)} numbers of the paper have {where}; one is needed")
    return float(rows["number"].iloc[0])


def numbers(**where: str) -> dict[str, float]:
    """The numbers with these columns by model, one each, in however many tables it stands."""
    return {str(model): float(number) for model, number in _where(where).set_index("model")["number"].items()}


def said(**where: str) -> str:
    """The value of the one row with these columns as printed, with its unit; a dash where there is no such row."""
    rows = _where(where)
    return f"{rows['value'].iloc[0]} {rows['unit'].iloc[0]}".strip().replace(" x", "x") if len(rows) == 1 else "-"
