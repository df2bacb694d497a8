"""Tabulate benchmark results beside the paper's speed and memory (Tables 3 and 5 to 9, Figure 11)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB
from qerl_lab.report import bench_arms, bench_results, reference
from qerl_lab.report.arms import version
from qerl_lab.report.bench import Result, gpu_of
from qerl_lab.report.bench_results import NO_RESULT, load, origin
from qerl_lab.report.numbers import number
from qerl_lab.report.table import NONE, Rows, Table, filled, unlike
from qerl_lab.terminal import near

GB_PER_GIB = GIB / 1e9
FORMATS = {"bf16": "BF16", "nf4": "NF4", "nvfp4": "NVFP4"}  # our format -> the paper's name
MODELS = {f"qwen2.5-{size}b": f"Qwen2.5-{size}B-Instruct" for size in (3, 7, 14, 32)}  # our model -> the paper's name
PRINTED_RANK = 16  # not stated in Tables 5 to 8, but their numbers equal Table 9's at this rank
OF_MODEL = dict(zip(MODELS, ("Table 5", "Table 6", "Table 7", "Table 8"), strict=True))
WITHOUT = "No benchmarks on this page: add results of python -m qerl_lab.bench with bench=FILE.json,... in its command."
ABOUT = "Ratios are to the baseline of the same file. The paper used one H100 with 80 GB: compare ratios, not tokens/s."


@dataclass(frozen=True)
class Speed:
    """The speed section of the page: tables, and notes on the files."""

    tables: list[Table]
    notes: list[str]


@dataclass(frozen=True)
class Printed:
    """Rollout speeds printed in the paper: tokens/s by format, and the table they are from."""

    where: str
    tokens: Mapping[str, float]

    def cells(self, name: str) -> list[str]:
        """Return the cells of a format: tokens/s, ratio to BF16, ratio to NF4, and the source."""
        mine = self.tokens.get(name)
        ratios = (mine / base if mine and base else None for base in map(self.tokens.get, ("bf16", "nf4")))
        return [number(mine) if mine else NONE, *map(_ratio, ratios), self.where if mine else NONE]


def of_files(paths: Sequence[Path]) -> Speed:
    """Tabulate result files and folders of them. Raises ConfigError for a missing path.

    Invalid and incomplete files are left out with a note.
    """
    if not paths:
        return Speed([], [WITHOUT])
    results, rows, notes = list[Result](), [Rows(), Rows(), Rows()], list[str]()
    for file in _files(paths):
        try:
            result = load(file)
            made = [make(result) for make in (_rollouts, _steps, _memory)]
            notes.append(f"{near(file)}: {_about(result)}")
        except (*NO_RESULT, OSError) as error:
            notes.append(f"{near(file)} is left out: no complete result of python -m qerl_lab.bench ({error!r}).")
            continue
        results.append(result)
        for table, more in zip(rows, made, strict=True):
            table.extend(more)
    notes += [f"{near(path)} holds no result." for path in paths if path.is_dir() and not any(path.glob("*.json"))]
    return Speed(_tables(rows, results), notes)


def _files(paths: Iterable[Path]) -> list[Path]:
    files = []
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"bench={path} is not there. Type a result of python -m qerl_lab.bench, or a folder of them."
            )
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return list(dict.fromkeys(files))


def _about(result: Result) -> str:
    """Describe a result: what was measured where, which arms died, and what makes it doubtful."""
    options, parts = result["options"], [f"{result['benchmark']}, {origin(result)}"]
    if result["benchmark"] in bench_results.OF_ARMS:
        parts[0] += f"; prompts of {options['prompt']} tokens, completions of {options['new']}"
        parts += [f"{row['arm']}, rank {row['rank']}, died: {row['died']}" for row in result["rows"] if "died" in row]
        parts += [*_unfinished(result), *bench_arms.notes(bench_arms.alive(result))]
    elif result["benchmark"] != "train_step":
        parts.append("the paper has no such table")
    return "; ".join(parts) + "."


def _unfinished(result: Result) -> list[str]:
    """Say how many of the requested rows exist, if not all."""
    options, have = result["options"], len(bench_arms.alive(result))
    asked = len(options["arms"]) * (len(options["ranks"]) * len(options["batches"]) if "batches" in options else 1)
    return [f"it has {have} of {asked} requested rows"] if have < asked else []


def _tables(rows: Sequence[Rows], results: Sequence[Result]) -> list[Table]:
    """Build the three tables; below each, list the paper's settings that we did not measure."""
    rollouts, steps, memory = rows
    return [
        _table(
            "Rollouts, as in the paper's Tables 5 to 9 and Figure 11",
            f"Completion tokens per second with prefill: median of the repeats [least, most]. {ABOUT} Its completions "
            "have at most 2,048 tokens. Tables 5 to 8 state no rank; Table 9 (batch 1) has the same numbers at rank "
            "16. Where the paper lacks our rank, its number at its own rank is shown.",
            [["model, batch, rank", "arm", "tokens/s", "of BF16", "of QLoRA", "paper: tokens/s", "paper: of BF16",
              "paper: of QLoRA", "paper: where", "repeats", "lengths", "GPU", "commit"], *rollouts],
            "rollout", "batch at rank", _rollouts_missing(results),
        ),
        _table(
            "Steps end to end, as in the paper's Tables 3 and 5 to 8",
            "Medians of the steps after the first, with gradient checkpointing unless the arm says otherwise; "
            f"baselines are TRL's. {ABOUT} Its batch is assumed to count completions. For 7B, Table 3 "
            "contradicts Table 6.",
            [["model, completions", "arm", "seconds", "tokens/s", "of BF16", "of QLoRA", "paper: Table 3, of BF16",
              "paper: Tables 5 to 8, checkpointing", "paper: without", "steps", "lengths", "GPU", "commit"], *steps],
            "step", "completions", _steps_missing(results),
        ),
        _table(
            "Memory, as in the paper's Tables 3 and 5 to 8",
            "GB are 1e9 bytes. Weights: vLLM's in rollouts, the trainer's base in steps, the frozen model in "
            "train_step. Peak: torch's maximum; in rollouts it includes the key-value cache and, in the lab's arms, "
            "the trainer's base. The paper prints model sizes, but no peak.",
            [["model, format", "arm", "benchmark", "weights, GB", "of BF16", "paper: GB", "paper: of BF16", "peak, GB",
              "GPU", "commit"], *memory],
            "rollout, step or train_step", "format", _memory_missing(memory),
        ),
    ]  # fmt: skip


Missing = list[tuple[str, str]]  # model, and the setting at which only the paper has a number


def _table(title: str, about: str, rows: Rows, made_by: str, where: str, missing: Missing) -> Table:
    """Build a table sorted by model and batch, without empty columns, with a line on what only the paper has."""
    head, *body = rows
    if not body:
        return Table(title, "", [head], f"Left out: none of these files is a result of {made_by}.")
    rows, empty = filled([head, *sorted(body, key=lambda row: _natural(row[0]))], 2)
    rows, alike = unlike(rows, ("repeats", "steps", "lengths", "GPU"))
    of_model: dict[str, list[str]] = {}
    for model, place in missing:
        of_model.setdefault(model, []).append(place)
    printed = "; ".join(f"{model} {', '.join(places)}" for model, places in of_model.items())
    left_out = [f"Left out: {', '.join(empty)}, empty in every row."] if empty else []
    left_out += [f"In the paper, but not measured here ({where}): {printed}."] if printed else []
    return Table(title, about + alike, rows, " ".join(left_out))


def _natural(text: str) -> list[str | int]:
    """Return a sort key that puts 7b before 32b."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _short(arm: str) -> str:
    """Shorten an arm by dropping the groups of its keys: `nvfp4 rollout.vllm.lora=dense` becomes `nvfp4 lora=dense`."""
    return re.sub(r"(?<= )[\w.]+\.(?=\w+=)", "", arm)


def _rollouts(result: Result) -> Rows:
    if result["benchmark"] != "rollout":
        return []
    model, made = result["options"]["model"], _dead(result, "batch not reached")
    if not bench_arms.alive(result):
        return made
    for row in _rows(bench_arms.ratios(result, ("rank", "batch"))):
        speed = number(row["tokens_per_second"])
        if row["repeats"] > 1:
            speed += f" [{number(row['tokens_per_second_min'])}, {number(row['tokens_per_second_max'])}]"
        there = _printed_rollouts(model, row["batch"], row["rank"])
        made.append([
            f"{model}, {row['batch']}, {row['rank']}", _short(row["arm"]), speed, _ratio(row["of_bf16"]),
            _ratio(row["of_qlora"]), *there.cells(row["format"]), str(row["repeats"]), _lengths(result),
            *_made_by(result),
        ])  # fmt: skip
    return made


def _printed_rollouts(model: str, batch: int, rank: int) -> Printed:
    """Return the paper's rollout speeds of a model and batch, at `rank` for batch 1, else at the only printed rank."""
    if batch == 1:
        found, where = _tokens(model, "Table 9", f"LoRA rank {rank};"), f"Table 9, rank {rank}"
        quantized = _tokens(model, "Figure 11", f"LoRA rank {rank};")
        return Printed(f"{where}; Figure 11" if quantized else where, {**quantized, **found})
    found = _tokens(model, OF_MODEL.get(model, ""), f"BS {batch};")
    nf4 = _tokens(model, "Figure 1", f"batch={batch},").get("nf4")
    where = f"{OF_MODEL.get(model, '')}{', Figure 1' if nf4 else ''}, rank {PRINTED_RANK}"
    return Printed(where, {**found, **({"nf4": nf4} if nf4 else {})})


def _tokens(model: str, table: str, setting: str) -> dict[str, float]:
    """Return the paper's tokens/s by format in one table and setting."""
    rows = reference.printed()
    rows = rows[
        (rows["table"] == table) & (rows["model"] == MODELS.get(model)) & (rows["metric"] == "rollout throughput")
    ]
    rows = rows[rows["setting"].str.contains(setting, regex=False)].set_index("weight_format")
    return {name: float(rows.loc[theirs, "number"]) for name, theirs in FORMATS.items() if theirs in rows.index}


def _rollouts_missing(results: Sequence[Result]) -> Missing:
    """List where the paper has NVFP4 and we do not: every batch, and every rank at batch 1."""
    rows = [row for result in results if result["benchmark"] == "rollout" for row in bench_arms.alive(result)]
    have = {(row["model"], row["batch"], row["rank"] if row["batch"] == 1 else PRINTED_RANK)
            for row in rows if row["format"] == "nvfp4"}  # fmt: skip
    wanted = [(model, batch, rank) for model in MODELS for batch, rank in PRINTED_AT]
    return [(model, f"{batch} at {rank}") for model, batch, rank in wanted if (model, batch, rank) not in have]


PRINTED_AT = ((1, 16), (1, 32), (1, 64), (2, PRINTED_RANK), (8, PRINTED_RANK))  # (batch, rank)


def _steps(result: Result) -> Rows:
    if result["benchmark"] != "step":
        return []
    options = result["options"]
    model, completions = options["model"], options["groups"] * options["group_size"]
    made = _dead(result, str(completions))
    if not bench_arms.alive(result):
        return made
    for row in _rows(bench_arms.ratios(result, ("rank",))):
        made.append([
            f"{model}, {completions}", _short(row["arm"]), f"{row['step_seconds']:.2f}",
            number(row["tokens_per_second"]),
            _ratio(row["of_bf16"]), _ratio(row["of_qlora"]), *_printed_steps(model, completions, row["format"]),
            str(options["steps"]), _lengths(result), *_made_by(result),
        ])  # fmt: skip
    return made


def _printed_steps(model: str, batch: int, name: str) -> list[str]:
    """Return the paper's speedup over BF16: Table 3, and Tables 5 to 8 with and without gradient checkpointing."""
    row = {"model": MODELS.get(model, ""), "weight_format": FORMATS.get(name, "")}
    of_model = {"table": OF_MODEL.get(model, ""), "setting": f"BS {batch};"}
    return [
        reference.said(table="Table 3", metric="end-to-end training speedup vs BF16 LoRA",
                       setting=f"batch size {batch};", **row),
        reference.said(metric="E2E RL w/ gradient checkpointing", **of_model, **row),
        reference.said(metric="E2E RL speedup w/o gradient checkpointing", **of_model, **row),
    ]  # fmt: skip


def _steps_missing(results: Sequence[Result]) -> Missing:
    have = set()
    for result in results:
        if result["benchmark"] == "step" and any(row["format"] == "nvfp4" for row in bench_arms.alive(result)):
            have.add((result["options"]["model"], result["options"]["groups"] * result["options"]["group_size"]))
    wanted = [(model, batch) for model in MODELS for batch in (2, 4, 8)]
    return [
        (model, str(batch)) for model, batch in wanted
        if (model, batch) not in have and set(_printed_steps(model, batch, "nvfp4")) != {NONE}
    ]  # fmt: skip


def _memory(result: Result) -> Rows:
    """Return a row per arm and rank: weight size, and the peak memory over its batches."""
    sizes = {"rollout": _of_arms, "step": _of_arms, "train_step": _of_training}.get(result["benchmark"])
    if sizes is None:
        return []
    rows = sizes(result)
    dense = next((size for _, name, is_base, size, _ in rows if name == "bf16" and is_base), None)
    model, made = result["options"]["model"], []
    for arm, name, _, size, peak in rows:
        made.append([
            f"{model}, {name}", _short(arm), result["benchmark"], _gb(size),
            _ratio(size / dense if size and dense else None),
            *_printed_size(model, name), _gb(peak), *_made_by(result),
        ])  # fmt: skip
    return made


Size = tuple[str, str, bool, float | None, float | None]  # arm, format, is the base of ratios, weights and peak in GB


def _of_arms(result: Result) -> list[Size]:
    """Return weights and largest peak of each arm and rank; the arm names the rank if there are several."""
    name = {"rollout": "weights_gib", "step": "policy_gib"}[result["benchmark"]]
    found: dict[tuple[str, int], Size] = {}
    ranks = {row["rank"] for row in bench_arms.alive(result)}
    for row in bench_arms.alive(result):
        arm = f"{row['arm']}, rank {row['rank']}" if len(ranks) > 1 else row["arm"]
        size, peak = row.get(name), row.get("peak_gib")
        earlier = found.get((row["arm"], row["rank"]))
        most = max((value for value in (peak and peak * GB_PER_GIB, earlier and earlier[4]) if value), default=None)
        found[row["arm"], row["rank"]] = (arm, row["format"], row["baseline"], size and size * GB_PER_GIB, most)
    return list(found.values())


def _of_training(result: Result) -> list[Size]:
    rows = pd.DataFrame(result["steps"])
    rows = rows[rows["loss"] == "chunked"].groupby("arm", sort=False)[["base_gb", "peak_gb"]].max()
    formats = {"bf16_peft": "bf16", "qlora": "nf4"}
    return [
        (str(arm), formats.get(str(arm), str(arm)), arm == "bf16", float(row["base_gb"]), float(row["peak_gb"]))
        for arm, row in rows.iterrows()
    ]


def _printed_size(model: str, name: str) -> list[str]:
    """Return the paper's size of a model in GB, and its ratio to BF16."""
    mine, dense = (
        reference.numbers(metric="model size", weight_format=FORMATS.get(each, "")).get(MODELS.get(model, ""))
        for each in (name, "bf16")
    )
    return [_gb(mine), _ratio(mine / dense if mine and dense else None)]


def _memory_missing(rows: Rows) -> Missing:
    have = {row[0] for row in rows}
    return [
        (model, FORMATS[name]) for model in MODELS for name in FORMATS
        if f"{model}, {name}" not in have and _printed_size(model, name) != [NONE, NONE]
    ]  # fmt: skip


def _dead(result: Result, batch: str) -> Rows:
    """Return a row for each arm that died."""
    return [
        [f"{result['options']['model']}, {batch}", _short(row["arm"]), "died", *7 * [NONE], _lengths(result),
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


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def _ratio(value: float | None) -> str:
    return NONE if value is None or pd.isna(value) else f"{value:.2f}"


def _gb(value: float | None) -> str:
    return NONE if value is None or pd.isna(value) else f"{value:.1f}"
