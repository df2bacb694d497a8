"""Every result of `python -m qerl_lab.bench` in a folder: text and figure of each, and all of them beside the paper."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from qerl_lab.config.option import ConfigError
from qerl_lab.report import bench, bench_arms, reference
from qerl_lab.report.arms import version
from qerl_lab.report.bench import Result

OF_ARMS = ("rollout", "step")  # benchmarks whose arms are processes of their own
MODELS = {f"qwen2.5-{size}b": f"Qwen2.5-{size}B-Instruct" for size in (3, 7, 14, 32)}  # the paper's name of each
SIZES = {"bf16": "BF16", "nvfp4": "NVFP4", "qlora": "NF4"}  # arms of the training step by the paper's weight format
PRINTED_RANK = 16  # Tables 5 to 8 do not say it; their numbers are those of Table 9 at this rank
NO_RESULT = (ValueError, LookupError, TypeError, AttributeError)  # what a file that is none, or a part of one, raises
COLUMNS = ("what", "model", "format", "batch", "rank", "paper, H100", "here", "from")


def read(folder: Path) -> dict[str, Result]:
    """The results by the names of their files. Raises ConfigError for a folder without one, and a file that is none."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = load(file)
        except NO_RESULT as error:
            raise ConfigError(f"{file} is no result of python -m qerl_lab.bench ({error!r}). Move it away.") from None
    if not found:
        raise ConfigError(f"{folder} holds no result. Make one: python -m qerl_lab.bench linear out={folder}/linear.")
    return found


def load(file: Path) -> Result:
    """The result of one file. Raises one of `NO_RESULT`, or OSError."""
    result: Result = json.loads(file.read_bytes())
    result["benchmark"], result["environment"]
    return result


def text(result: Result) -> str:
    """The table of a result."""
    return (bench_arms if result["benchmark"] in OF_ARMS else bench).table(result)


def figure(result: Result) -> Figure | None:
    """The figure of a result, to be closed by the caller; None where every arm died, and of a clock."""
    if result["benchmark"] in OF_ARMS:
        return bench_arms.figure_of(result) if bench_arms.alive(result) else None
    return None if result["benchmark"] == "clock" else bench.figure_of(result)


def origin(result: Result) -> str:
    """When, on what and by which code a result was measured."""
    about = result["environment"]
    versions = [f"{name} {about['packages'][name]}" for name in ("torch", "vllm") if about["packages"].get(name)]
    code = version(about["git_sha"], about["dirty"])
    return ", ".join([about["time"][:10], bench.gpu_of(result), *versions, f"commit {code}"])


def beside_the_paper(results: Mapping[str, Result]) -> pd.DataFrame:
    """A row a number that both have: size of the model, rollouts over BF16's, seconds of a step."""
    rows = [row for name, result in results.items() for row in _rows(name, result)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(name: str, result: Result) -> Iterator[tuple[Any, ...]]:
    model = result["options"].get("model", "")
    if result["benchmark"] == "train_step" and model in MODELS:
        for arm, theirs in SIZES.items():
            sizes = {row["base_gb"] for row in result["steps"] if row["arm"] == arm}
            printed = printed_number(MODELS[model], theirs, "model size", "")
            if sizes and printed:
                yield ("model, GB", model, arm, "", "", printed, max(sizes), name)
    elif result["benchmark"] == "rollout" and model in MODELS and bench_arms.alive(result):
        yield from _rollouts(name, result, model)


def _rollouts(name: str, result: Result, model: str) -> Iterator[tuple[Any, ...]]:
    """NVFP4's rollouts over stock BF16's at the batch sizes and at the rank of the paper's."""
    rows = bench_arms.ratios(result, ("rank", "batch"))
    rows = rows[rows["rank"] == PRINTED_RANK]
    for batch in (2, 8):
        nvfp4, bf16 = (
            printed_number(MODELS[model], theirs, "rollout throughput", f"BS {batch};") for theirs in ("NVFP4", "BF16")
        )
        for _, row in rows[(rows["format"] == "nvfp4") & (rows["batch"] == batch)].iterrows():
            if nvfp4 and bf16 and row["of_bf16"] == row["of_bf16"]:
                yield ("rollouts / BF16", model, row["arm"], batch, row["rank"], nvfp4 / bf16, row["of_bf16"], name)


def printed_number(model: str, weight_format: str, metric: str, setting: str) -> float | None:
    """The paper's number in Table 3, or 5 to 8; None where it has none, or prints several."""
    rows = reference.printed()
    rows = rows[rows["table"].str.fullmatch(r"Table [35678]") & rows["setting"].str.contains(re.escape(setting))]
    rows = rows[(rows["model"] == model) & (rows["weight_format"] == weight_format) & (rows["metric"] == metric)]
    values = set(rows["number"].dropna())
    return values.pop() if len(values) == 1 else None
