"""Tabulate benchmark results beside the paper's speed and memory (Tables 3 and 5 to 9, Figure 11)."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB
from qerl_lab.report import bench, reference
from qerl_lab.report.bench import Columns, Result, table_rows, with_ratios
from qerl_lab.report.table import Table, format_number, without_constant_columns, without_empty_columns
from qerl_lab.system.terminal import by_numbers, format_path

PAPER_PROMPT = 256  # tokens of a prompt in all speed tables of the paper
PAPER_RANK = 16  # not stated in Tables 5 to 8, but their numbers equal Table 9's at this rank
STEP_METRICS = {  # metric in paper.csv -> column of `paper_steps`
    "end-to-end training speedup vs BF16 LoRA": "table_3",
    "E2E RL w/ gradient checkpointing": "checkpointed",
    "E2E RL speedup w/o gradient checkpointing": "plain",
}
ORIGIN = (("GPU", "{gpu}"), ("commit", "{commit}"))
WITHOUT = "No benchmarks on this page: add results of python -m qerl_lab.bench with bench=FILE.json,... in its command."
ABOUT = "Ratios are to the baseline of the same file. The paper used one H100 with 80 GB: compare ratios, not tokens/s."


class SpeedSection(NamedTuple):
    """The speed section of the page: tables, and notes on the files."""

    tables: list[Table]
    notes: list[str]


def tabulate_files(paths: Sequence[Path]) -> SpeedSection:
    """Tabulate benchmark results beside the paper's speed and memory; `paths` are result files, or folders of them.

    Invalid and incomplete files are left out with a note. Raises ConfigError for a path that does not exist or has no
    file.
    """
    if not paths:
        return SpeedSection([], [WITHOUT])
    files = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found or not path.exists():
            why = "holds no result" if path.is_dir() else "is not there"
            raise ConfigError(f"bench={path} {why}. Type a result of python -m qerl_lab.bench, or a folder of them.")
        files += found
    notes, sizes = list[str](), list[pd.DataFrame]()
    ours = defaultdict[str, list[pd.DataFrame]](list)  # by benchmark
    for file in dict.fromkeys(files):
        try:
            result = bench.load(file)
            rows = bench.measured(result) if result["benchmark"] in bench.TABLES else pd.DataFrame()
            about = _describe_result(result, rows)
            if len(rows):
                rows = _with_columns(rows, result)
                sizes.append(_sizes(rows))
                ours[result["benchmark"]].append(rows)
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:  # invalid or incomplete
            about = f"left out, no complete result of python -m qerl_lab.bench ({error!r})."
        notes.append(f"{format_path(file)}: {about}")
    return SpeedSection([_rollout_table(ours["rollout"]), _step_table(ours["step"]), _memory_table(sizes)], notes)


def _describe_result(result: Result, rows: pd.DataFrame) -> str:
    """Describe a result in one line: benchmark, origin, arms that died, missing rows, what makes arms incomparable.

    `rows` come from `bench.measured`.
    """
    options, about = result["options"], f"{result['benchmark']}, {bench.origin(result)}"
    if result["benchmark"] not in bench.TABLES:
        return f"{about}; the paper has no such table."
    if "prompt" in options:
        about += f"; prompts of {options['prompt']} tokens, completions of {options['new']}"
    micro_batches = {1, options.get("sequences", 1)}  # of train_step
    lists = (options[name] for name in ("arms", "ranks", "batches") if name in options)
    asked = math.prod(map(len, (micro_batches, *lists)))
    missing = [f"it has {len(rows)} of {asked} requested rows"] if len(rows) < asked else []
    return "; ".join([about, *bench.list_deaths(result), *missing, *bench.notes(rows)]) + "."


def _with_columns(rows: pd.DataFrame, result: Result) -> pd.DataFrame:
    """Add to the measured rows of a result the columns that the tables show; `weights` and `peak` are in GB.

    `arm` is shortened: `nvfp4 rollout.vllm.lora=dense` becomes `nvfp4 lora=dense`.
    """
    kind, options = result["benchmark"], result["options"]
    rows = rows.assign(
        benchmark=kind, model=options["model"], gpu=bench.gpu_of(result), commit=bench.code_of(result),
        arm=rows["arm"].str.replace(r"(?<= )[\w.]+\.(?=\w+=)", "", regex=True),
        speed=rows["tokens_per_second"].map(format_number),
    )  # fmt: skip
    if kind == "train_step":
        formats, is_base = rows["arm"].replace(bench.OTHER_LIBRARIES), rows["arm"] == "bf16"
        return rows.assign(format=formats, baseline=is_base, weights=rows["base_gb"], peak=rows["peak_gb"])
    recorded = {"weights": "weights_gib" if kind == "rollout" else "policy_gib", "peak": "peak_gib"}
    for column, gib in recorded.items():
        rows[column] = pd.to_numeric(rows.get(gib, math.nan)) * GIB / 1e9
    ragged = f", mean_tokens={options['mean_tokens']:g}" if options.get("mean_tokens") else ""
    rows["prompt"], rows["lengths"] = options["prompt"], f"prompt {options['prompt']}, new {options['new']:,}{ragged}"
    base = rows["base_bf16"].iloc[0]
    if base and "=" in base:  # other files of the table have another BF16
        rows["lengths"] += f"; BF16 is {base}"
    if kind == "step":
        return rows.assign(batch=options["groups"] * options["group_size"], steps=options["steps"])
    least, most = (rows[f"tokens_per_second_{end}"].map(format_number) for end in ("min", "max"))
    rows["speed"] += (" [" + least + ", " + most + "]").where(rows["repeats"] > 1, "")
    return rows.assign(paper_rank=rows["rank"].where(rows["batch"] == 1, PAPER_RANK))


def _sizes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return weights and peak memory in GB, and the ratio of weights to BF16, a row per arm and LoRA rank.

    The peak is the largest over the rows of an arm and rank, such as batches.
    """
    same = dict.fromkeys(("weights", "format", "baseline", "benchmark", "model", "gpu", "commit"), "last")
    sizes = rows.groupby(["arm", "rank"], sort=False).agg(same | {"peak": "max"}).reset_index()
    is_bf16 = bench.mark_baseline(sizes["arm"], (sizes["format"] == "bf16") & sizes["baseline"])
    if sizes["rank"].nunique() > 1:
        sizes["arm"] += ", rank " + sizes["rank"].astype(str)
    return with_ratios(sizes, "weights", ["model"], {"bf16": is_bf16})


def paper_rollouts() -> pd.DataFrame:
    """Tabulate the paper's tokens/s of rollouts (`number`), a row per model, batch, LoRA rank and format.

    `of_bf16` and `of_nf4` are ratios to these formats. `where` names the paper's tables and the rank.
    """
    key = ["model", "batch", "rank"]
    rows = _paper_rows("rollout throughput").sort_values("table", ascending=False)  # figures repeat tables, rounded
    where = rows.groupby(key)["table"].agg(lambda tables: ", ".join(tables.unique())).rename("where")
    rows = rows.drop_duplicates([*key, "format"])[[*key, "format", "number"]].merge(where, on=key)
    rows["where"] += ", rank " + rows["rank"].astype(str)
    return with_ratios(rows, "number", key, {base: rows["format"] == base for base in ("bf16", "nf4")})


def paper_steps() -> pd.DataFrame:
    """Tabulate the paper's speeds of whole steps as text: a row per model, batch and format.

    The columns of speeds are the values of `STEP_METRICS`.
    """
    rows = _paper_rows(*STEP_METRICS)
    rows["text"] = (rows["value"] + " " + rows["unit"]).str.strip().str.replace(" x", "x")
    wide = rows.pivot(index=["model", "batch", "format"], columns="metric", values="text")
    return wide.rename(columns=STEP_METRICS).reset_index()


def _paper_rows(*metrics: str) -> pd.DataFrame:
    """Return the paper's rows of the given metrics for BF16, NF4 and NVFP4, with our names of models and formats.

    Adds `batch` (0 if the paper states none) and `rank` (`PAPER_RANK` if it states none).
    """
    rows = reference.paper_numbers()
    rows = rows[rows["metric"].isin(metrics) & rows["weight_format"].isin(["BF16", "NF4", "NVFP4"])]
    batch = rows["setting"].str.extract(r"(?:BS |batch=|batch size )(\d+)", expand=False)
    rank = rows["setting"].str.extract(r"LoRA rank (\d+)", expand=False)
    return rows.assign(
        model=rows["model"].str.lower().str.removesuffix("-instruct"), format=rows["weight_format"].str.lower(),
        batch=batch.fillna("0").astype(int), rank=rank.fillna(str(PAPER_RANK)).astype(int),
    )  # fmt: skip


def _rollout_table(ours: Sequence[pd.DataFrame]) -> Table:
    """Build the table of rollouts: our tokens/s beside the paper's at the same model, format and batch.

    At batch 1 the LoRA ranks must be equal too. At other batches our row, whatever its rank, stands beside the paper's
    row at `PAPER_RANK`. Our row stands alone if its prompts do not have the paper's length. `ours` has a frame per
    result.
    """
    papers = paper_rollouts().rename(columns={"rank": "paper_rank"})
    place = papers["batch"].astype(str) + " at " + papers["paper_rank"].astype(str)
    papers = papers.assign(
        speed=papers["number"].map(format_number), place=place.where(papers["format"] == "nvfp4"), prompt=PAPER_PROMPT
    )  # fmt: skip
    return _join_with_paper(
        "Rollouts, as in the paper's Tables 5 to 9 and Figure 11",
        f"Completion tokens per second with prefill: median of the repeats [least, most]. {ABOUT} Its completions "
        "have at most 2,048 tokens. Tables 5 to 8 state no rank; Table 9 (batch 1) has the same numbers at rank "
        "16. Where the paper lacks our rank, its number at its own rank is shown.",
        (("model, batch, rank", "{model}, {batch}, {rank}"), ("arm", "{arm}"), ("tokens/s", "{speed}"),
         *bench.OF_BASES, ("paper: tokens/s", "{paper_speed}"), ("paper: of BF16", "{paper_of_bf16:.2f}"),
         ("paper: of QLoRA", "{paper_of_nf4:.2f}"), ("paper: where", "{paper_where}"), ("repeats", "{repeats}"),
         ("lengths", "{lengths}"), *ORIGIN),
        ours, papers, key=["model", "format", "batch", "paper_rank", "prompt"], benchmarks="rollout",
        setting="batch at rank",
    )  # fmt: skip


def _step_table(ours: Sequence[pd.DataFrame]) -> Table:
    """Build the table of whole steps: our speed beside the paper's speedups at the same model, format and batch.

    Our row stands alone if its prompts do not have the paper's length. `ours` has a frame per result.
    """
    papers = paper_steps().assign(prompt=PAPER_PROMPT)
    papers["place"] = papers["batch"].astype(str).where(papers["format"] == "nvfp4")
    return _join_with_paper(
        "Steps end to end, as in the paper's Tables 3 and 5 to 8",
        "Medians of the steps after the first, with gradient checkpointing unless the arm says otherwise; "
        f"baselines are TRL's. {ABOUT} Its batch is assumed to count completions. For 7B, Table 3 "
        "contradicts Table 6.",
        (("model, completions", "{model}, {batch}"), ("arm", "{arm}"), ("seconds", "{step_seconds:.2f}"),
         ("tokens/s", "{speed}"), *bench.OF_BASES, ("paper: Table 3, of BF16", "{paper_table_3}"),
         ("paper: Tables 5 to 8, checkpointing", "{paper_checkpointed}"), ("paper: without", "{paper_plain}"),
         ("steps", "{steps}"), ("lengths", "{lengths}"), *ORIGIN),
        ours, papers, key=["model", "format", "batch", "prompt"], benchmarks="step", setting="completions",
    )  # fmt: skip


def _memory_table(ours: Sequence[pd.DataFrame]) -> Table:
    """Build the table of memory: measured weights and peaks beside the paper's model sizes in GB (1e9 bytes).

    `ours` has a frame per result.
    """
    papers = _paper_rows("model size").drop_duplicates(["model", "format"])[["model", "format", "number"]]
    papers = with_ratios(papers, "number", ["model"], {"bf16": papers["format"] == "bf16"})
    papers["place"] = papers["format"].str.upper()
    return _join_with_paper(
        "Memory, as in the paper's Tables 3 and 5 to 8",
        "GB are 1e9 bytes. Weights: vLLM's in rollouts, the trainer's base in steps, the frozen model in "
        "train_step. Peak: torch's maximum; in rollouts it includes the key-value cache and, in the lab's arms, "
        "the trainer's base. The paper prints model sizes, but no peak.",
        (("model, format", "{model}, {format}"), ("arm", "{arm}"), ("benchmark", "{benchmark}"),
         ("weights, GB", "{weights:.1f}"), ("of BF16", "{of_bf16:.2f}"), ("paper: GB", "{paper_number:.1f}"),
         ("paper: of BF16", "{paper_of_bf16:.2f}"), ("peak, GB", "{peak:.1f}"), *ORIGIN),
        ours, papers, key=["model", "format"], benchmarks="rollout, step or train_step", setting="format",
    )  # fmt: skip


def _join_with_paper(
    title: str, about: str, columns: Columns, ours: Sequence[pd.DataFrame], papers: pd.DataFrame, *,
    key: list[str], benchmarks: str, setting: str,
) -> Table:  # fmt: skip
    """Build a table of our rows, each beside the paper's row with an equal `key`; a note lists rows only the paper has.

    Args:
        columns: head and format of each column; names of the paper's columns get the prefix `paper_`.
        ours: our rows, a frame per result.
        papers: the paper's rows. Column `place` names a row in the note, such as "8 at 16"; with nan it is not listed.
        benchmarks: names of the benchmarks that make such rows; a note gives them if `ours` is empty.
        setting: what `place` means, such as "batch at rank".
    """
    if not ours:
        why = f"Left out: none of these files is a result of {benchmarks}."
        return Table(title, "", [[head for head, _ in columns]], why)
    rows = pd.concat(ours, ignore_index=True)
    beside = papers.rename(columns={name: f"paper_{name}" for name in papers if name not in key})
    head, *body = table_rows(rows.merge(beside, on=key, how="left"), columns)
    cells, empty = without_empty_columns([head, *sorted(body, key=lambda row: by_numbers(row[0]))], 2)
    cells, alike = without_constant_columns(cells, ("repeats", "steps", "lengths", "GPU"))
    left_out = [f"Left out: {', '.join(empty)}, empty in every row."] if empty else []
    is_measured = pd.MultiIndex.from_frame(papers[key]).isin(pd.MultiIndex.from_frame(rows[key]))
    missing = papers[~is_measured].dropna(subset="place")
    if len(missing):
        listed = sorted(missing["model"] + " " + missing["place"], key=by_numbers)
        of_models = groupby(listed, lambda text: text.partition(" ")[0])
        places = (f"{model} {', '.join(text.removeprefix(f'{model} ') for text in own)}" for model, own in of_models)
        left_out.append(f"In the paper, but not measured here ({setting}): {'; '.join(places)}.")
    return Table(title, about + alike, cells, " ".join(left_out))
