"""The paper's numbers as data: whole, read as they stand, and the same as those that bench tables have."""

import pandas as pd
import pytest

from qerl_lab.config.files import package_data
from qerl_lab.report import paper, reference

FOLDER = package_data("results/reference")
COLUMNS = (
    "table", "model", "method", "weight_format", "algorithm", "dataset", "metric", "value", "unit", "setting",
    "source", "certainty",
)  # fmt: skip


def test_every_row_says_where_it_is_from_and_how_sure_it_is() -> None:
    rows = reference.printed()
    assert tuple(rows.columns[:-1]) == COLUMNS
    assert len(rows) == 606
    assert (rows[["table", "metric", "source"]] != "").all().all()
    assert set(rows["certainty"].str.extract(r"^(\w+)")[0]) == {"certain", "approx", "derived"}


def test_a_number_is_found_by_its_columns_or_refused() -> None:
    row = {"table": "Table 1", "model": "Qwen2.5-7B-Instruct", "metric": "accuracy"}
    assert reference.value(**row, method="QeRL +AQN") == 90.8
    with pytest.raises(KeyError, match="10 numbers"):
        reference.value(**row)
    with pytest.raises(KeyError, match="0 numbers"):
        reference.value(**row, method="QeRL", weight_format="BF16")


def test_a_model_has_one_size_in_every_table() -> None:
    rows = reference.printed().query("metric == 'model size'")
    assert rows.groupby(["model", "weight_format"])["number"].nunique().eq(1).all()
    assert reference.numbers(metric="model size", weight_format="NF4") == {
        "Qwen2.5-7B-Instruct": 5.7, "Qwen2.5-14B-Instruct": 10.2,
    }  # fmt: skip


def test_table_9_is_what_the_tables_of_speed_have() -> None:
    rows = reference.printed().query("table == 'Table 9' and metric == 'rollout throughput'")
    for model, formats in paper.TOKENS_BY_RANK.items():
        found = rows[rows["model"].str.lower() == f"{model}-instruct"]
        for name in ("bf16", "nvfp4"):
            mine = found[found["weight_format"].str.lower() == name]["number"]
            assert sorted(mine) == sorted(formats[name].values())


def test_every_curve_that_a_row_names_is_there_and_starts_with_steps() -> None:
    named = set(reference.printed()["source"].str.extract(r"(digitized/\w+\.csv)")[0].dropna())
    assert named
    assert all((FOLDER / name).is_file() for name in named)
    for path in (FOLDER / "digitized").glob("*.csv"):
        curve = pd.read_csv(path)
        assert curve.columns[0] in ("step", "stage")
        assert curve.iloc[:, 0].is_monotonic_increasing
