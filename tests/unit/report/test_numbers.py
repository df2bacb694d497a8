"""Numbers of tables and axes, as a reader meets them."""

import pandas as pd
import pytest

from qerl_lab.report.palette import tick
from qerl_lab.report.table import number
from qerl_lab.report.verdict_tables import of_seeds


@pytest.mark.parametrize(
    ("value", "spelled"),
    [(0.0304, "0.030"), (-0.5, "-0.500"), (24.4901, "24.49"), (797.63, "797.6"), (999.96, "1,000"), (1641.1, "1,641"),
     (9999.7, "10,000"), (10602.4, "10,602"), (-15350.2, "-15,350"), (1.25e6, "1,250,000")],
)  # fmt: skip
def test_a_number_has_commas_and_no_exponent(value: float, spelled: str) -> None:
    assert number(value) == spelled


def test_so_has_a_cell_of_a_table() -> None:
    assert of_seeds(pd.DataFrame({"run": {0: 10400.0, 1: 10600.0}})) == "10,500 [9,229, 11,771] (2)"


@pytest.mark.parametrize(("value", "spelled"), [(0.25, "0.25"), (250, "250"), (12500, "12,500"), (2e6, "2,000,000")])
def test_an_axis_has_no_exponent_either(value: float, spelled: str) -> None:
    assert tick(value) == spelled
