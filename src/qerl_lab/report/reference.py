"""Read the paper's numbers from results/reference, and find those that belong beside our arms.

Numbers that the paper prints are in paper.csv. Numbers that it only draws are means of the points in digitized/, which
this module computes as the lab does for its own runs; curves.csv has the reading error of each curve.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

import pandas as pd

from qerl_lab.config.conf_folder import package_data
from qerl_lab.report.arms import representative_of
from qerl_lab.report.runs import Run

EIGHT_STEPS, LAST_TENTH = "mean over steps 0-8", "mean over the last tenth of the steps"
# Settings of the paper's arms, apart from format and noise. A number of the paper beside an arm that the paper lacks,
# such as BF16 at another temperature, would mislead.
PLAIN = {
    "rollout.temperature": "1.0", "algorithm.entropy_coef": "0.0", "algorithm.entropy_target": "None",
    "format.scale_rule": "max", "lora.rank": "32",
}  # fmt: skip
QUIET = {"aqn.schedule": "off"}
PLAIN_AT_ANY_RANK = QUIET | {key: value for key, value in PLAIN.items() if key != "lora.rank"}
AQN = {"aqn.schedule": "exponential", "aqn.unit": "sigma", "aqn.relative": "False"}
TABLE_1 = (  # settings of our arms, with method and weight format of their row in the paper's Table 1
    ({"format.name": "bf16", **QUIET, **PLAIN}, ("LoRA", "BF16")),
    ({"format.name": "nf4", **QUIET, **PLAIN}, ("QLoRA", "NF4")),
    ({"format.name": "mxfp4", **QUIET, **PLAIN}, ("LoRA", "MXFP4")),
    ({"format.name": "nvfp4", **QUIET, **PLAIN}, ("QeRL w/o AQN", "NVFP4")),
    ({"format.name": "nvfp4", **AQN, **PLAIN}, ("QeRL +AQN", "NVFP4")),
)


def is_plain(run: Run) -> bool:
    """Tell whether a run's arm is a weight format alone: without noise, and with the settings `PLAIN` at any rank."""
    return PLAIN_AT_ANY_RANK.items() <= dict(run.arm).items()


@cache
def paper_numbers() -> pd.DataFrame:
    """Tabulate the numbers of the paper, a row each: the rows of paper.csv, and two means of every digitized curve.

    The means are over `EIGHT_STEPS` and over `LAST_TENTH`. `number` is `value` as a float, nan if it is no number.
    """
    rows = pd.read_csv(package_data("results/reference") / "paper.csv", dtype=str, keep_default_na=False)
    rows = rows.assign(number=pd.to_numeric(rows["value"], errors="coerce"))
    means = []
    for curve in curves().to_dict("records"):
        for setting in (EIGHT_STEPS, LAST_TENTH):
            mean = float(curves_to_average(curve["file"], setting)[curve["column"]].mean())
            own = {"setting": setting, "number": mean, "value": f"{mean:.3f}", "unit": ""}
            means.append(curve | own | {"certainty": f"approx (digitized plot, +-{curve['error']:g})"})
    return pd.concat([rows, pd.DataFrame(means)], ignore_index=True).fillna({"file": "", "column": "", "error": 0.0})


@cache
def digitized(file: str) -> pd.DataFrame:
    """Read the curves of a figure from digitized/FILE.csv: a row per step, a column per curve.

    In Figure 15 there is a row per stage. Values are nan where another line hides the curve.
    """
    return pd.read_csv(package_data("results/reference") / "digitized" / f"{file}.csv", index_col=0)


def curves_to_average(file: str, setting: str) -> pd.DataFrame:
    """Return the part of a figure's curves that a mean covers: steps 0 to 8 for `EIGHT_STEPS`, else the last tenth.

    The rows are those of `digitized`, with gaps filled linearly. Values outside a curve's known points stay nan.
    """
    known = digitized(file).interpolate("index", limit_area="inside")
    return known[known.index <= 8 if setting == EIGHT_STEPS else known.index > 0.9 * known.index[-1]]


@cache
def curves() -> pd.DataFrame:
    """Read curves.csv: a row for each digitized curve, with file, column, model, format, metric and reading `error`."""
    return pd.read_csv(package_data("results/reference") / "curves.csv", keep_default_na=False)


def select_row(where: Mapping[str, str]) -> pd.Series:
    """Return the row of `paper_numbers` with the column values `where`, such as `{"metric": "accuracy"}`.

    In the column `setting` a part of the text is enough. Raises KeyError unless exactly one row has these values and a
    number.
    """
    rows = paper_numbers()
    for column, wanted in where.items():
        matches = rows[column].str.contains(wanted, regex=False) if column == "setting" else rows[column] == wanted
        rows = rows[matches]
    if len(rows) != 1 or math.isnan(rows["number"].iloc[0]):
        raise KeyError(f"{len(rows)} numbers of the paper have {where}; one is needed")
    return rows.iloc[0]


def paper_effect(treated: Mapping[str, str], control: Mapping[str, str], is_ratio: bool) -> tuple[str, float]:
    """Compare two numbers of the paper: return their source, and treated - control, with `is_ratio` treated / control.

    `treated` and `control` find a number each (`select_row`). The source is table or figure, model, and reading error
    of a curve. Curves of one figure are compared at steps at which both are known. Percentages become fractions. Raises
    KeyError if a number is not found.
    """
    treated_row, control_row = select_row(treated), select_row(control)
    of_treated, of_control = treated_row["number"], control_row["number"]
    file, setting = treated_row["file"], treated_row["setting"]
    if file and file == control_row["file"]:
        both = curves_to_average(file, setting)[[treated_row["column"], control_row["column"]]]
        of_treated, of_control = both.dropna().mean()
    effect = of_treated / of_control if is_ratio else of_treated - of_control
    if treated_row["metric"] == "accuracy" and not is_ratio:
        effect /= 100  # from a percentage
    error = max(treated_row["error"], control_row["error"])
    model = treated.get("model", "").removeprefix("Qwen2.5-").removesuffix("-Instruct")
    source = f"{treated_row['table']} {model}".strip() + (f", +-{error:g}" if error else "")
    return source, float(effect)


def rows_of_table_1(arms: Mapping[str, Sequence[Run]], where: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Map labels of our arms to (method, weight format) of the row with the same settings in the paper's Table 1.

    Arms without the settings `where` are left out. If several arms on one model, task and algorithm fit a row,
    `arms.representative_of` is kept.
    """
    fitting = defaultdict[tuple[tuple[str, str], tuple[str, ...]], list[str]](list)
    for label, runs in arms.items():
        for settings, row in TABLE_1:
            if settings.items() <= runs[0].settings.items():
                keys = ("model.path", "task.name", "algorithm.name")
                fitting[row, tuple(runs[0].value(key) for key in keys)].append(label)
    found = dict[str, tuple[str, str]]()
    for (row, _), labels in fitting.items():
        kept = representative_of(labels, arms)
        if kept is not None and where.items() <= arms[kept][0].settings.items():
            found[kept] = row
    return found
