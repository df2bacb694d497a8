"""Tables of arms shaped like the paper's, with our numbers beside the paper's."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qerl_lab.report import comparison, stats
from qerl_lab.report.arm_tables import ENTROPIES, tables
from qerl_lab.report.palette import format_tick
from qerl_lab.report.table import Table, format_mean_and_interval, format_number, in_words, seeds_cell
from run_directories import make_run

AFTER = {"bf16": ([0.5, 0.5, 0.75, 1.0], [0.25, 0.5, 0.5, 0.75], [0.5, 0.75, 0.5, 0.75]),
         "nvfp4": ([0.75, 0.5, 1.0, 1.0], [0.5, 0.25, 0.75, 0.75], [0.5, 1.0, 0.5, 1.0])}  # fmt: skip

ON_GSM8K = {"task__name": "gsm8k"}


def faster(run: Path, factor: float) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"]["step/tokens_per_second"] *= factor
        line["metrics"]["memory/rss_gib"] /= factor
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Table]:
    """Tabulate two arms of three seeds. NVFP4 is slower by a tenth, a fifth and three tenths, and needs more memory."""
    for arm, of_arm in AFTER.items():
        for seed, after in enumerate(of_arm):
            run = make_run(tmp_path / f"{arm}-{seed}", arm, seed, before=[0.5] * 4, after=after, **ON_GSM8K)
            faster(run, 1 - 0.1 * (seed + 1) * (arm == "nvfp4"))
    make_run(tmp_path / "failed", "nvfp4", 3, failed="x", **ON_GSM8K)
    return {table.title.split(",")[0]: table for table in tables(comparison.read([tmp_path]), "bf16")}


def cells(table: Table, *row: str) -> dict[str, str]:
    head, *rows = table.rows
    (found,) = (one for one in rows if one[: len(row)] == list(row))
    assert len(head) == len(found)
    return dict(zip(head, found, strict=True))


def test_accuracies_stand_beside_table_1(made: dict[str, Table]) -> None:
    found = cells(made["Held-out accuracy"], "nvfp4")
    mean, low, high = stats.over_seeds(np.array(AFTER["nvfp4"]))
    assert high > 1
    assert found["after"] == f"{mean:.3f} [{low:.3f}, 1.000] (3)"
    assert low < 0.5, "the accuracy before training"
    assert found["gain"] == f"{mean - 0.5:+.3f} [{low - 0.5:+.3f}, {high - 0.5:+.3f}] (3)"
    assert (found["finished"], found["3B there"], found["7B there"]) == ("3 of 4", "0.833", "0.885")
    assert found["pass@n after"] == "1.000 [no spread] (3)"
    paired = np.array(AFTER["nvfp4"]) - np.array(AFTER["bf16"])
    mean, low, high = stats.over_seeds(paired)
    assert found["after - bf16"] == f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] (3)"
    assert cells(made["Held-out accuracy"], "bf16")["after - bf16"] == "-"
    assert made["Held-out accuracy"].about.startswith("Held-out questions of a run: 4. Cells")


def test_speeds_are_compared_as_ratios(made: dict[str, Table]) -> None:
    found = cells(made["Throughput and memory"], "nvfp4")
    mean, low, high = np.exp(stats.over_seeds(np.log([[0.9], [0.8], [0.7]])))
    assert found["end to end / bf16"] == f"{mean:.2f}x [{low:.2f}, {high:.2f}] (3)"
    assert found["rollout, train, sync"] == "25%, 50%, 5%"
    assert found["peak GiB"] == f"{1.04 / 0.7:.2f}", "the seed that needs most"
    assert cells(made["Throughput and memory"], "bf16")["end to end / bf16"] == "-"


def test_speeds_of_runs_beside_others_are_left_out_and_a_line_says_so(made: dict[str, Table], tmp_path: Path) -> None:
    """One run of six that shared its machine is enough."""
    assert made["Throughput and memory"].left_out == ""
    (tmp_path / "bf16-1" / "env.json").write_text(json.dumps({"command": "python -m qerl_lab jobs=2 jobs_per_gpu=2"}))
    again = {table.title.split(",")[0]: table for table in tables(comparison.read([tmp_path]), "bf16")}
    speeds = again["Throughput and memory"]
    timed = ("rollouts, tokens/s", "end to end, tokens/s", "rollout, train, sync", "seconds a run")
    assert speeds.rows[0] == ["arm", *timed[:3], "peak GiB", timed[3]]
    assert {cells(speeds, "bf16")[name] for name in timed} == {"-"}
    assert cells(speeds, "bf16")["peak GiB"] == cells(made["Throughput and memory"], "bf16")["peak GiB"]
    assert "-" not in {cells(speeds, "nvfp4")[name] for name in timed}
    assert speeds.left_out.startswith("Left out: seconds and tokens/s of bf16, since runs ran beside others")


def test_the_interval_of_a_speed_is_taken_of_logarithms_and_stays_above_0(tmp_path: Path) -> None:
    for seed, factor in enumerate((1, 4)):
        faster(make_run(tmp_path / f"{seed}", "bf16", seed), factor)
    speeds = next(table for table in tables(comparison.read([tmp_path]), None) if table.title.startswith("Thro"))
    low, high = 100 * np.exp(np.array([-1, 1]) * 12.706205 * np.log(4) / 2)  # Student's t of one degree of freedom
    assert cells(speeds, "bf16")["end to end, tokens/s"] == f"100 [{low:.3f}, {high:,.0f}] (2)"


def test_accuracies_that_no_run_has_get_no_column(tmp_path: Path) -> None:
    for arm in ("bf16", "nvfp4"):
        (make_run(tmp_path / arm, arm, 0, eval__questions=0) / "eval.parquet").unlink()
    first, *_ = tables(comparison.read([tmp_path]), "bf16")
    assert first.rows == [["arm", "finished"], ["bf16", "1 of 1"], ["nvfp4", "1 of 1"]]
    left_out = (
        "Left out: before, after, gain, after - bf16 and pass@n after, since no held-out questions were evaluated."
    )
    assert first.left_out == left_out


def test_arms_without_a_common_seed_have_no_difference(tmp_path: Path) -> None:
    for seed, arm in enumerate(("bf16", "nvfp4")):
        make_run(tmp_path / arm, arm, seed)
    first, *_ = tables(comparison.read([tmp_path]), "bf16")
    left_out = "Left out: after - bf16, since eval.samples=1, or the arms share no seed and question."
    assert first.left_out == left_out


def test_controls_that_the_paper_lacks_stand_beside_no_number_of_the_paper(
    made: dict[str, Table], tmp_path: Path
) -> None:
    """BF16 at a higher temperature or with an entropy bonus shares the format of a row of the paper, and only that."""
    controls = {"hot": {"rollout__temperature": 1.06}, "bonus": {"algorithm__entropy_coef": 0.05}}
    for name, changes in controls.items():
        make_run(tmp_path / name, "bf16", 0, **ON_GSM8K, **changes)
    first, *others = tables(comparison.read([tmp_path]), None)
    entropies = next(table for table in others if table.title.startswith("Entropy"))
    arms = [row[0] for row in first.rows[1:]]
    assert [arm.partition(" ")[0] for arm in arms] == ["bf16", "bf16", "bf16", "nvfp4"]
    assert [cells(entropies, arm)["Figure 5, 7B"] for arm in arms] == ["0.227", "-", "-", "0.262"]
    assert [cells(first, arm)["3B there"] for arm in arms] == ["0.761", "-", "-", "0.833"]


def test_entropies_of_forking_tokens_and_answers_stand_beside_the_mean(tmp_path: Path) -> None:
    """Older runs lack these entropies, and their cells are dashes. If no run has them, there are no columns."""
    for seed in range(2):
        make_run(tmp_path / f"{seed}", "bf16", seed, **ON_GSM8K)
    compared = comparison.read([tmp_path])
    _, entropies, *_ = tables(compared, None)
    assert not {*ENTROPIES} & {*entropies.rows[0]}
    for run in compared.arms["bf16"]:
        for n, metric in enumerate(ENTROPIES.values()):
            run.steps[metric] = [n + run.seed, 9, 9, 9]
        run.steps.loc[0] = math.nan  # evaluations before training have a row of their own
    _, entropies, *_ = tables(compared, None)
    found = cells(entropies, "bf16")
    assert [found[head].partition(" ")[0] for head in ENTROPIES] == ["0.500", "1.500", "2.500"]
    assert "Forking tokens: the fifth" in entropies.about


def test_several_arms_that_match_one_row_of_the_paper_get_no_number_of_it(tmp_path: Path) -> None:
    """The paper names no learning rate for a row. Arms of two models do not compete, and each gets the number."""
    for name, rate in (("a", 1e-5), ("b", 1e-4)):
        make_run(tmp_path / f"{rate}", "bf16", 0, optim__learning_rate=rate, **ON_GSM8K)
        make_run(tmp_path / name, "nvfp4", 0, optim__learning_rate=rate, model__path=f"hub/{name}", **ON_GSM8K)
    first, *_ = tables(comparison.read([tmp_path]), None)
    assert [(row[0].partition(" ")[0], row[-1]) for row in first.rows[1:]] == [
        ("bf16", "-"), ("bf16", "-"), ("nvfp4", "0.885"), ("nvfp4", "0.885"),
    ]  # fmt: skip


def test_the_arm_at_the_most_common_rate_gets_the_papers_number_whatever_its_accuracy(tmp_path: Path) -> None:
    for name, rate, after in (("bf16", 1e-4, 0.5), ("nvfp4", 1e-4, 0.5), ("nvfp4", 3e-4, 1.0)):
        run = tmp_path / f"{name}-{rate}"
        make_run(run, name, 0, after=[after] * 4, optim__learning_rate=rate, **ON_GSM8K)
    first, *_ = tables(comparison.read([tmp_path]), None)
    assert {row[0]: row[-1] for row in first.rows[1:]} == {
        "bf16": "0.881", "nvfp4": "0.885", "nvfp4 (optim.learning_rate=0.0003)": "-",
    }  # fmt: skip


def test_runs_of_another_task_or_algorithm_stand_beside_no_accuracy_and_no_entropy_of_the_paper(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "bf16", 0, task__name="bigmath")
    first, entropies, *_ = tables(comparison.read([tmp_path]), None)
    assert (first.title, first.rows[0][-1]) == ("Held-out accuracy", "pass@n after")
    assert "Table 1" not in first.about
    assert (entropies.title, entropies.rows[0][-1]) == ("Entropy and collapse", "runs that collapsed")
    assert "paper" not in entropies.about
    make_run(tmp_path / "1", "bf16", 0, algorithm__name="gspo", **ON_GSM8K)
    first, *_ = tables(comparison.read([tmp_path / "1"]), None)
    assert first.rows[0][-1] == "pass@n after"


@pytest.mark.parametrize("baseline", ["bf16", None])
def test_without_shared_seeds_or_a_baseline_no_speed_is_a_ratio(tmp_path: Path, baseline: str | None) -> None:
    for arm, seed in (("bf16", 0), ("nvfp4", 1)):
        make_run(tmp_path / arm, arm, seed)
    accuracies, *_, speeds = tables(comparison.read([tmp_path]), baseline)
    assert not [head for head in speeds.rows[0] if " / " in head]
    assert cells(accuracies, "nvfp4")["after"] == "0.625 (1)"


def test_a_cell_says_which_end_has_no_bound_and_how_many_seeds_count() -> None:
    spelled = [format_mean_and_interval((2, *ends)) for ends in ((1, math.inf), (-math.inf, 3), (-math.inf, math.inf))]
    assert spelled == [">= 2.000 [1.000, no bound]", "<= 2.000 [no bound, 3.000]", "2.000 [no bound, no bound]"]
    assert seeds_cell(pd.DataFrame([[math.nan], [0.5]])) == "0.500 (1)"


def test_a_list_in_words_has_semicolons_where_a_part_has_a_comma() -> None:
    assert in_words(["a", "b", "c"]) == "a, b and c"
    assert in_words(["a, b", "c", "d"]) == "a, b; c and d"


@pytest.mark.parametrize(("spell", "value", "spelled"), [
    (format_number, 0.0304, "0.030"), (format_number, 999.96, "1,000"), (format_number, -15350.2, "-15,350"),
    (format_tick, 0.25, "0.25"), (format_tick, 2e6, "2,000,000"),
])  # fmt: skip
def test_numbers_of_tables_and_axes_have_commas_and_no_exponent(
    spell: Callable[[float], str], value: float, spelled: str
) -> None:
    assert spell(value) == spelled
