"""Read results of `python -m qerl_lab.bench` as tables with ratios to a baseline, and format them as text."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd

from qerl_lab.record.metrics import PHASES
from qerl_lab.report.runs import code_version
from qerl_lab.report.table import NONE
from qerl_lab.system.terminal import columns

Result = dict[str, Any]
# Benchmarks of whole models, and the columns that must be equal for a ratio of two arms.
ALIKE = {"train_step": ["micro_batch_tokens"], "rollout": ["rank", "batch"], "step": ["rank"]}
OTHER_LIBRARIES = {"bf16_peft": "bf16", "qlora": "nf4"}  # arms of train_step in them, and their weight formats
# Arms that differ in one of these settings are not comparable, so `notes` warns.
SETTINGS = (
    "gpus", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "prefix_caching", "async_scheduling", "eager",
    "cuda_graphs", "dtype", "model_runner",
)  # fmt: skip
CLOCKS_APART = 0.03  # share by which GPU clocks may differ
TOKENS_TO_TIME = 32  # a long call must have at least so many tokens more than a short one, to time a token
Columns = Sequence[tuple[str, str]]  # for each column its head, and the format string of a row's cell
OF_BASES = (("of BF16", "{of_bf16:.2f}"), ("of QLoRA", "{of_qlora:.2f}"))
SPEED, ARM = ("tokens/s", "{tokens_per_second:,.0f}"), ("arm", "{arm}")
ENGINE = (("weights", "{weights_gib:.1f}"), ("KV", "{kv_gib:.1f}"))
TABLES: Mapping[str, Columns] = {  # by benchmark
    "train_step": (
        ARM, ("micro-batch", "{micro_batch_tokens:,.0f}"), SPEED, *OF_BASES, ("peak GB", "{peak_gb:.1f}"),
        ("base GB", "{base_gb:.2f}"),
    ),
    "rollout": (
        ("rank", "{rank}"), ("batch", "{batch}"), SPEED, ("least", "{tokens_per_second_min:,.0f}"),
        ("most", "{tokens_per_second_max:,.0f}"), *OF_BASES, ("token ms", "{decode_ms:.2f}"),
        ("host", "{host_share:.0%}"), ("sync ms", "{sync_ms:.1f}"), ("start s", "{start_seconds:.0f}"), *ENGINE,
        ("used", "{used_gib:.1f}"), ARM,
    ),
    "step": (
        ("seconds", "{step_seconds:.2f}"), SPEED, *OF_BASES, *((phase, f"{{{phase}_seconds:.2f}}") for phase in PHASES),
        ("policy", "{policy_gib:.1f}"), *ENGINE, ("peak", "{peak_gib:.1f}"), ("used", "{used_gib:.1f}"), ARM,
    ),
}  # fmt: skip
UNITS = {
    "rollout": "weights, KV, used: GiB on the GPU",
    "step": f"{', '.join(PHASES)}: seconds. policy, weights, KV, peak, used: GiB on the GPU",
}


def load(file: Path) -> Result:
    """Read a benchmark result from a JSON file. Raises ValueError if it is no JSON, OSError if it cannot be read."""
    result: Result = json.loads(file.read_bytes())
    return result


def gpu_of(result: Result) -> str:
    """Return the name of the first GPU on the machine that measured a result; `no GPU` if it had none."""
    gpus = result["environment"]["gpus"]
    return gpus[0]["name"] if gpus else "no GPU"


def code_of(result: Result) -> str:
    """Return the commit of the code that a benchmark measured, as `1a2b3c4` or `1a2b3c4 with changes`."""
    environment = result["environment"]
    return code_version(environment["git_sha"], environment["dirty"])


def origin(result: Result) -> str:
    """Describe the origin of a result in one line: date, GPU, versions of torch and vLLM, commit."""
    environment, packages = result["environment"], result["environment"]["packages"]
    versions = [f"{name} {packages[name]}" for name in ("torch", "vllm") if packages.get(name)]
    return ", ".join([environment["time"][:10], gpu_of(result), *versions, f"commit {code_of(result)}"])


def list_deaths(result: Result) -> list[str]:
    """Return a line `ARM, rank R, died: REASON` for each arm and LoRA rank at which the arm's process died."""
    return [f"{row['arm']}, rank {row['rank']}, died: {row['died']}" for row in result.get("rows", []) if "died" in row]


def measured(result: Result) -> pd.DataFrame:
    """Return the measured rows of a benchmark, with two ratios of tokens/s to a baseline: `of_bf16` and `of_qlora`.

    `base_bf16` and `base_qlora` name the baselines' arms, None if one was not measured. A row and its baseline agree in
    the columns `ALIKE`. In rollouts and steps the baselines are the stock arms: vLLM or TRL as they are
    (`mark_baseline`). In train_step they are the lab's BF16 and bitsandbytes. `decode_ms` is nan if completions are too
    short to time a token. Arms that died have no rows; the table is empty if every arm died. Raises KeyError for a
    benchmark that is not in `ALIKE`.
    """
    kind = result["benchmark"]
    found = result["steps"] if "steps" in result else result["rows"]
    rows = pd.DataFrame([row for row in found if "died" not in row])
    if rows.empty:
        return rows
    if kind == "rollout" and 0.75 * result["options"]["new"] < TOKENS_TO_TIME:  # a short call has a quarter of `new`
        rows["decode_ms"] = math.nan
    if "loss" in rows:  # older files also have a row of a loss from whole logits
        rows = rows[rows["loss"] == "chunked"]
    bases = {base: rows["arm"].str.match(rf"{base}(_stock|_trl|$)") for base in ("bf16", "qlora")}
    if kind != "train_step":
        bases = {base: mark_baseline(rows["arm"], is_base & rows["baseline"]) for base, is_base in bases.items()}
    for base, is_base in bases.items():
        rows[f"base_{base}"] = next(iter(rows["arm"][is_base]), None)
    return with_ratios(rows, "tokens_per_second", ALIKE[kind], bases)


def mark_baseline(arms: pd.Series, may_be: pd.Series) -> pd.Series:
    """Choose the baseline among candidate arms; return a boolean Series that marks its rows.

    `arms` names the arm of each row, `may_be` marks the rows of the candidates. The baseline is the candidate without
    overrides (KEY=VALUE after its name), or if there is none the first candidate.
    """
    chosen = min(arms[may_be], key=lambda arm: "=" in arm, default=None)  # the first of equals
    return may_be & (arms == chosen)


def with_ratios(
    rows: pd.DataFrame, value: str, key: Sequence[str], baselines: Mapping[str, pd.Series]
) -> pd.DataFrame:  # fmt: skip
    """Add a column `of_NAME` per baseline: `value` divided by the baseline's `value` at an equal `key`.

    `value` and `key` name columns. `baselines` maps NAME to a boolean Series that marks the rows of the baseline. A
    ratio is nan where the baseline has no such row.
    """
    for name, is_baseline in baselines.items():
        of_baseline = rows[is_baseline].drop_duplicates(key)[[*key, value]].rename(columns={value: f"of_{name}"})
        rows = rows.merge(of_baseline, on=[*key], how="left")
        rows[f"of_{name}"] = rows[value] / rows[f"of_{name}"]
    return rows


def text(result: Result) -> str:
    """Format a result for the terminal: its table, memory by owner, arms that died, and warnings from `notes`."""
    rows, kind = measured(result), result["benchmark"]
    lines = list[str]()
    if len(rows):
        lines.append(columns(table_rows(rows, TABLES[kind])))
        if kind in UNITS:
            lines.append(UNITS[kind])
    for row in result.get("rows", []):
        owners = [f"{owner} {gib:.1f}" for owner, gib in row.get("gib_by_owner", {}).items()]
        if owners:
            lines.append(f"memory of {row['arm']}, GiB: {'; '.join(owners)}")
    if "host_share" in rows and rows["host_share"].notna().any():
        lines.append(
            "host: share of a call in which its thread is busy; near 100% the host limits the speed, not the GPU"
        )
    return "\n".join([*lines, *list_deaths(result), *(f"note: {note}" for note in notes(rows))])


def notes(rows: pd.DataFrame) -> list[str]:
    """List, as sentences, what makes the arms of `measured` rows incomparable.

    These are baselines with overrides, settings of `SETTINGS` that differ, and GPU clocks that differ by more than the
    share `CLOCKS_APART`.
    """
    sentences = []
    for base, label in (("bf16", "BF16"), ("qlora", "QLoRA")):
        for arm in rows.get(f"base_{base}", pd.Series(dtype=str)).dropna().unique():
            if "=" in arm:
                sentences.append(f'"of {label}" is the ratio to {arm}')
    for name in [name for name in SETTINGS if name in rows]:
        values = rows[name].dropna().convert_dtypes().astype(str)
        arms = rows["arm"].groupby(values, sort=False).unique()
        if len(arms) > 1:
            parts = (f"{value} in {', '.join(names)}" for value, names in arms.items())
            sentences.append(f"{name} differs: {'; '.join(parts)}")
    clocks = rows.get("sm_mhz", pd.Series(dtype=float)).dropna()
    if len(clocks) and clocks.max() > (1 + CLOCKS_APART) * clocks.min():
        sentences.append(
            f"the GPU's clock was between {clocks.min():,.0f} and {clocks.max():,.0f} MHz (sm_mhz of each row)"
        )
    return sentences


def table_rows(rows: pd.DataFrame, spec: Columns) -> list[list[str]]:
    """Format a data frame as rows of cells below a head; `spec` has (head, format string) for each column of cells.

    A format string names columns of the data frame. A cell is a dash if a column in its format string is missing or
    nan.
    """
    table = [[head for head, _ in spec]]
    for row in rows.to_dict("records"):
        cells = []
        for _, form in spec:
            names = [name for _, name, _, _ in Formatter().parse(form) if name]
            is_missing = any(pd.isna(row.get(name)) for name in names)
            cells.append(NONE if is_missing else form.format_map(row))
        table.append(cells)
    return table
