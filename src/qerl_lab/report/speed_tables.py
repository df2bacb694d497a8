"""Tabulate benchmark results beside the paper's speed and memory (Tables 3 and 5 to 9, Figure 11)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB
from qerl_lab.report import bench, reference
from qerl_lab.report.arms import version
from qerl_lab.report.bench_figures import Result, alive, gpu_of, ratios
from qerl_lab.report.reference import FORMATS, MODELS, RANKS, SPEEDS_OF
from qerl_lab.report.table import NONE, Rows, Table, number, without_constant_columns, without_empty_columns
from qerl_lab.system.terminal import format_path

GB_PER_GIB = GIB / 1e9
PRINTED_RANK = 16  # not stated in Tables 5 to 8, but their numbers equal Table 9's at this rank
PRINTED_AT = (*((1, rank) for rank in RANKS), (2, PRINTED_RANK), (8, PRINTED_RANK))  # (batch, rank)
WITHOUT = "No benchmarks on this page: add results of python -m qerl_lab.bench with bench=FILE.json,... in its command."
ABOUT = "Ratios are to the baseline of the same file. The paper used one H100 with 80 GB: compare ratios, not tokens/s."


@dataclass(frozen=True)
class Speed:
    """The speed section of the page: tables, and notes on the files."""

    tables: list[Table]
    notes: list[str]


def tabulate_files(paths: Sequence[Path]) -> Speed:
    """Tabulate result files and folders of them. Raises ConfigError for a missing path.

    Invalid and incomplete files are left out with a note.
    """
    if not paths:
        return Speed([], [WITHOUT])
    results, rows, notes = list[Result](), [Rows(), Rows(), Rows()], list[str]()
    for file in _files(paths):
        try:
            result = bench.load(file)
            made = [make(result) for make in (_rollouts, _steps, _memory)]
            notes.append(f"{format_path(file)}: {_about(result)}")
        except (*bench.NO_RESULT, OSError) as error:
            notes.append(
                f"{format_path(file)} is left out: no complete result of python -m qerl_lab.bench ({error!r})."
            )
            continue
        results.append(result)
        for table, more in zip(rows, made, strict=True):
            table.extend(more)
    notes += [
        f"{format_path(path)} holds no result." for path in paths if path.is_dir() and not any(path.glob("*.json"))
    ]
    return Speed(_tables(rows, results), notes)


def _files(paths: Sequence[Path]) -> list[Path]:
    """List the result files of the paths, each once. Raises ConfigError for a missing path."""
    files = []
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"bench={path} is not there. Type a result of python -m qerl_lab.bench, or a folder of them."
            )
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return list(dict.fromkeys(files))


def _about(result: Result) -> str:
    """Describe a result: what was measured where, which arms died, which rows lack, and what makes it doubtful."""
    options, parts = result["options"], [f"{result['benchmark']}, {bench.origin(result)}"]
    if result["benchmark"] in bench.OF_ARMS:
        parts[0] += f"; prompts of {options['prompt']} tokens, completions of {options['new']}"
        parts += [f"{row['arm']}, rank {row['rank']}, died: {row['died']}" for row in result["rows"] if "died" in row]
        a_arm = len(options["ranks"]) * len(options["batches"]) if "batches" in options else 1
        have, asked = len(alive(result)), a_arm * len(options["arms"])
        parts += [f"it has {have} of {asked} requested rows"] if have < asked else []
        parts += bench.notes(alive(result))
    elif result["benchmark"] != "train_step":
        parts.append("the paper has no such table")
    return "; ".join(parts) + "."


def _tables(rows: Sequence[Rows], results: Sequence[Result]) -> list[Table]:
    """Build the three tables."""
    rollouts, steps, memory = rows
    no_rollouts, no_steps, no_sizes = _not_measured(results, memory)
    return [
        _table(
            "Rollouts, as in the paper's Tables 5 to 9 and Figure 11",
            f"Completion tokens per second with prefill: median of the repeats [least, most]. {ABOUT} Its completions "
            "have at most 2,048 tokens. Tables 5 to 8 state no rank; Table 9 (batch 1) has the same numbers at rank "
            "16. Where the paper lacks our rank, its number at its own rank is shown.",
            [["model, batch, rank", "arm", "tokens/s", "of BF16", "of QLoRA", "paper: tokens/s", "paper: of BF16",
              "paper: of QLoRA", "paper: where", "repeats", "lengths", "GPU", "commit"], *rollouts],
            "rollout", "batch at rank", no_rollouts,
        ),
        _table(
            "Steps end to end, as in the paper's Tables 3 and 5 to 8",
            "Medians of the steps after the first, with gradient checkpointing unless the arm says otherwise; "
            f"baselines are TRL's. {ABOUT} Its batch is assumed to count completions. For 7B, Table 3 "
            "contradicts Table 6.",
            [["model, completions", "arm", "seconds", "tokens/s", "of BF16", "of QLoRA", "paper: Table 3, of BF16",
              "paper: Tables 5 to 8, checkpointing", "paper: without", "steps", "lengths", "GPU", "commit"], *steps],
            "step", "completions", no_steps,
        ),
        _table(
            "Memory, as in the paper's Tables 3 and 5 to 8",
            "GB are 1e9 bytes. Weights: vLLM's in rollouts, the trainer's base in steps, the frozen model in "
            "train_step. Peak: torch's maximum; in rollouts it includes the key-value cache and, in the lab's arms, "
            "the trainer's base. The paper prints model sizes, but no peak.",
            [["model, format", "arm", "benchmark", "weights, GB", "of BF16", "paper: GB", "paper: of BF16", "peak, GB",
              "GPU", "commit"], *memory],
            "rollout, step or train_step", "format", no_sizes,
        ),
    ]  # fmt: skip


Missing = list[tuple[str, str]]  # model, and the setting at which only the paper has a number


def _not_measured(results: Sequence[Result], memory: Rows) -> tuple[Missing, Missing, Missing]:
    """List where the paper has a speed of NVFP4, in rollouts and in steps, or a size, and we have none."""
    ours = [(result, row) for result in results if result["benchmark"] in bench.OF_ARMS for row in alive(result)
            if row["format"] == "nvfp4"]  # fmt: skip
    rolled = {(row["model"], row["batch"], row["rank"] if row["batch"] == 1 else PRINTED_RANK)
              for result, row in ours if result["benchmark"] == "rollout"}  # fmt: skip
    stepped = {
        (result["options"]["model"], _completions(result)) for result, _ in ours if result["benchmark"] == "step"
    }
    no_rollouts = [(model, f"{batch} at {rank}") for model in MODELS for batch, rank in PRINTED_AT
                   if (model, batch, rank) not in rolled]  # fmt: skip
    no_steps = [(model, str(batch)) for model in MODELS for batch in (2, 4, 8)
                if (model, batch) not in stepped and set(_printed_steps(model, batch, "nvfp4")) != {NONE}]  # fmt: skip
    sized = {row[0] for row in memory}
    no_sizes = [(model, FORMATS[name]) for model in MODELS for name in FORMATS
                if f"{model}, {name}" not in sized and _printed_size(model, name) != [NONE, NONE]]  # fmt: skip
    return no_rollouts, no_steps, no_sizes


def _table(title: str, about: str, rows: Rows, made_by: str, where: str, missing: Missing) -> Table:
    """Build a table sorted by model and batch, without empty columns, with a line on what only the paper has."""
    head, *body = rows
    if not body:
        return Table(title, "", [head], f"Left out: none of these files is a result of {made_by}.")
    rows, empty = without_empty_columns([head, *sorted(body, key=lambda row: _natural_key(row[0]))], 2)
    rows, alike = without_constant_columns(rows, ("repeats", "steps", "lengths", "GPU"))
    of_model: dict[str, list[str]] = {}
    for model, place in missing:
        of_model.setdefault(model, []).append(place)
    printed = "; ".join(f"{model} {', '.join(places)}" for model, places in of_model.items())
    left_out = [f"Left out: {', '.join(empty)}, empty in every row."] if empty else []
    left_out += [f"In the paper, but not measured here ({where}): {printed}."] if printed else []
    return Table(title, about + alike, rows, " ".join(left_out))


def _natural_key(text: str) -> list[str | int]:
    """Return a sort key that puts 7b before 32b."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _short_arm(arm: str) -> str:
    """Shorten an arm by dropping the groups of its keys: `nvfp4 rollout.vllm.lora=dense` becomes `nvfp4 lora=dense`."""
    return re.sub(r"(?<= )[\w.]+\.(?=\w+=)", "", arm)


def _rollouts(result: Result) -> Rows:
    if result["benchmark"] != "rollout":
        return []
    model, made = result["options"]["model"], _dead(result, "batch not reached")
    for row in ratios(result, ("rank", "batch")).to_dict("records") if alive(result) else []:
        speed = number(row["tokens_per_second"])
        if row["repeats"] > 1:
            speed += f" [{number(row['tokens_per_second_min'])}, {number(row['tokens_per_second_max'])}]"
        made.append([
            f"{model}, {row['batch']}, {row['rank']}", _short_arm(row["arm"]), speed, _ratio(row["of_bf16"]),
            _ratio(row["of_qlora"]), *_printed_rollout(model, row["batch"], row["rank"], row["format"]),
            str(row["repeats"]), _lengths(result), *_made_by(result),
        ])  # fmt: skip
    return made


def _printed_rollout(model: str, batch: int, rank: int, name: str) -> list[str]:
    """Return the paper's cells of a format: tokens/s, ratio to BF16, ratio to NF4, and the source.

    At `rank` for batch 1, else at the only printed rank.
    """
    if batch == 1:
        tokens, where = reference.tokens_of_rank(model, rank), f"Table 9, rank {rank}"
        where += "; Figure 11" * ("nf4" in tokens)
    else:
        table = SPEEDS_OF.get(model, "")
        drawn = reference.tokens(model, "Figure 1", f"batch={batch},")
        tokens = {**drawn, **reference.tokens(model, table, f"BS {batch};")}
        where = f"{table}{', Figure 1' if 'nf4' in drawn else ''}, rank {PRINTED_RANK}"
    if name not in tokens:
        return 4 * [NONE]
    of = [_ratio(tokens[name] / tokens[base]) if base in tokens else NONE for base in ("bf16", "nf4")]
    return [number(tokens[name]), *of, where]


def _completions(result: Result) -> int:
    return int(result["options"]["groups"] * result["options"]["group_size"])


def _steps(result: Result) -> Rows:
    if result["benchmark"] != "step":
        return []
    options, completions = result["options"], _completions(result)
    model, made = options["model"], _dead(result, str(completions))
    for row in ratios(result, ("rank",)).to_dict("records") if alive(result) else []:
        made.append([
            f"{model}, {completions}", _short_arm(row["arm"]), f"{row['step_seconds']:.2f}",
            number(row["tokens_per_second"]),
            _ratio(row["of_bf16"]), _ratio(row["of_qlora"]), *_printed_steps(model, completions, row["format"]),
            str(options["steps"]), _lengths(result), *_made_by(result),
        ])  # fmt: skip
    return made


def _printed_steps(model: str, batch: int, name: str) -> list[str]:
    """Return the paper's speedup over BF16: Table 3, and Tables 5 to 8 with and without gradient checkpointing."""
    return [
        reference.printed_text(table="Table 3", metric="end-to-end training speedup vs BF16 LoRA",
                       setting=f"batch size {batch};", model=MODELS.get(model, ""),
                       weight_format=FORMATS.get(name, "")),
        *(reference.step_speed(model, batch, name, checkpointing=on) for on in (True, False)),
    ]  # fmt: skip


def _memory(result: Result) -> Rows:
    """Return a row per arm and rank: weight size, and the peak memory over its batches."""
    if result["benchmark"] == "train_step":
        rows = pd.DataFrame(result["steps"])
        rows = rows[rows["loss"] == "chunked"].rename(columns={"base_gb": "weights", "peak_gb": "peak"}).assign(rank=0)
        rows["format"] = rows["arm"].replace({"bf16_peft": "bf16", "qlora": "nf4"})
        rows["baseline"] = rows["arm"] == "bf16"
    elif result["benchmark"] in bench.OF_ARMS and alive(result):
        rows, size = pd.DataFrame(alive(result)), "weights_gib" if result["benchmark"] == "rollout" else "policy_gib"
        for column, name in (("weights", size), ("peak", "peak_gib")):
            rows[column] = pd.to_numeric(rows.get(name)) * GB_PER_GIB if name in rows else math.nan
    else:
        return []
    sizes = rows.groupby(["arm", "rank"], sort=False).agg(
        format=("format", "last"), base=("baseline", "last"), weights=("weights", "last"), peak=("peak", "max")
    ).reset_index()  # fmt: skip
    dense = sizes.loc[(sizes["format"] == "bf16") & sizes["base"], "weights"]
    model, made, ranks = result["options"]["model"], [], sizes["rank"].nunique()
    for row in sizes.to_dict("records"):
        made.append([
            f"{model}, {row['format']}", _short_arm(row["arm"]) + f", rank {row['rank']}" * (ranks > 1),
            result["benchmark"], _gb(row["weights"]), _ratio(row["weights"] / dense.iloc[0] if len(dense) else None),
            *_printed_size(model, row["format"]), _gb(row["peak"]), *_made_by(result),
        ])  # fmt: skip
    return made


def _printed_size(model: str, name: str) -> list[str]:
    """Return the paper's size of a model in GB, and its ratio to BF16."""
    mine, dense = (
        reference.numbers(metric="model size", weight_format=FORMATS.get(each, "")).get(MODELS.get(model, ""))
        for each in (name, "bf16")
    )
    return [_gb(mine), _ratio(mine / dense if mine and dense else None)]


def _dead(result: Result, batch: str) -> Rows:
    """Return a row for each arm that died."""
    return [
        [f"{result['options']['model']}, {batch}", _short_arm(row["arm"]), "died", *7 * [NONE], _lengths(result),
         *_made_by(result)]
        for row in result["rows"] if "died" in row
    ]  # fmt: skip


def _lengths(result: Result) -> str:
    """Describe the settings that determine the time of a call or step, as files may differ only in these."""
    options = result["options"]
    ragged = f", mean_tokens={options['mean_tokens']:g}" if options.get("mean_tokens") else ""
    return f"prompt {options['prompt']}, new {options['new']:,}{ragged}"


def _made_by(result: Result) -> list[str]:
    about = result["environment"]
    return [gpu_of(result), version(about["git_sha"], about["dirty"])]


def _ratio(value: float | None) -> str:
    return NONE if value is None or pd.isna(value) else f"{value:.2f}"


def _gb(value: float | None) -> str:
    return NONE if value is None or pd.isna(value) else f"{value:.1f}"
