"""The paper's numbers as data: whole, read as they stand, and the same as those that bench tables have."""

import pandas as pd
import pytest

from qerl_lab.config.conf_folder import package_data
from qerl_lab.report import reference

FOLDER = package_data("results/reference")


def test_every_row_says_where_it_is_from_and_how_sure_it_is() -> None:
    rows = reference.printed()
    assert (rows[["table", "metric", "source"]] != "").all().all()
    assert set(rows["certainty"].str.extract(r"^(\w+)")[0]) == {"certain", "approx", "derived"}


def test_a_number_is_found_by_its_columns_or_refused() -> None:
    row = {"table": "Table 1", "model": "Qwen2.5-7B-Instruct", "metric": "accuracy"}
    assert reference.value(**row, method="QeRL +AQN") == 90.8
    with pytest.raises(KeyError, match="10 numbers"):
        reference.value(**row)
    with pytest.raises(KeyError, match="0 numbers"):
        reference.value(**row, method="QeRL", weight_format="BF16")


def test_every_curve_has_a_row_that_says_what_it_is_and_how_well_it_was_read() -> None:
    drawn = set[tuple[str, str]]()
    for path in (FOLDER / "digitized").glob("*.csv"):
        curve = pd.read_csv(path)
        assert curve.columns[0] in ("step", "stage")
        assert curve.iloc[:, 0].is_monotonic_increasing
        drawn |= {(path.stem, column) for column in curve.columns[1:]}
    curves = reference.curves()
    assert set(zip(curves["file"], curves["column"], strict=True)) == drawn
    assert (curves["error"] > 0).all()


def of_schedule(name: str, setting: str) -> dict[str, str]:
    return {"table": "Figure 9", "method": f"QeRL +AQN {name} decay", "setting": setting}


@pytest.mark.parametrize(("other", "expected"), [("linear", 0.004), ("cosine", 0.010), ("logarithmic", 0.028)])
def test_two_lines_of_a_figure_are_compared_where_both_are_known(other: str, expected: float) -> None:
    """Linear was not read at steps 145 and 150: the means of each alone would be of other steps."""
    one, two = (of_schedule(name, reference.LAST_TENTH) for name in ("exponential", other))
    difference, error = reference.paper_difference(one, two)
    assert (round(difference, 3), error) == (expected, 0.006)
    table = reference.interpolated("fig09_scheduler_3b")[["exponential", other]].dropna()
    table = table[table.index > 0.9 * 150]
    assert difference == pytest.approx((table["exponential"] - table[other]).mean())
