"""Summarize the answers of an evaluation by benchmark and engine, as data and as a table.

The engine "own" loads the base as the run does. The engine "common", alike for all arms, loads the base dequantized to
bfloat16.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from qerl_lab.report.stats import pass_at, share_interval, values_of_k
from qerl_lab.system.terminal import columns
from qerl_lab.tasks.grading import answer_entropy

Summary = dict[str, Any]
OWN, COMMON = "own", "common"
SCHEMA = 2  # version of the files ROWS and ABOUT
ROWS, ABOUT = "eval.parquet", "evaluation.json"
GROUP = ["benchmark", "engine", "sampling"]  # columns of `rows` that say which answers are summarized together


def accuracies(rows: pd.DataFrame) -> pd.Series:
    """Return the mean accuracy of each question over its samples, by question id, in the order asked."""
    return rows.groupby("id", sort=False)["accuracy"].mean()


def pass_rates(rows: pd.DataFrame, k: int) -> pd.Series:
    """Return pass@k of each question, by question id, estimated from all samples of the question.

    `rows` is as in `accuracy.ask_questions`. A sample is right if its accuracy is 1.
    """
    right = (rows["accuracy"] >= 1).groupby(rows["id"], sort=False).sum()
    return pd.Series(pass_at(k, right.to_numpy(), int(rows["draw"].max()) + 1), right.index)


def answer_entropies(rows: pd.DataFrame) -> pd.Series:
    """Return `answer_entropy` of each question over its samples, by question id."""
    return rows.groupby("id", sort=False)["completion"].agg(answer_entropy)


def summarize(rows: pd.DataFrame) -> Summary:
    """Summarize the answers to one benchmark by one engine as a dict. `rows` is as in `accuracy.ask_questions`.

    `accuracy` is the mean over questions and samples (avg@k), `low` and `high` its 95% interval. `standard_error`
    covers variation between questions and draws; `standard_error_of_draws`, with two or more samples, covers asking the
    same questions again. `answer_entropy`, in nats, is null with one sample.
    """
    samples, of_questions = int(rows["draw"].max()) + 1, accuracies(rows)
    mean, low, high = share_interval(of_questions.to_numpy(), samples)
    passes = {k: share_interval(pass_rates(rows, k).to_numpy(), samples) for k in values_of_k(samples)}
    draws = rows.groupby("id", sort=False)["accuracy"].var(ddof=1) if samples > 1 else None
    count = len(of_questions)
    return {
        "questions": count,
        "samples": samples,
        "accuracy": mean,
        "low": low,
        "high": high,
        "standard_error": float(of_questions.std(ddof=1) / math.sqrt(count)) if count > 1 else None,
        "standard_error_of_draws": None if draws is None else float(np.sqrt((draws / samples).sum()) / count),
        "pass_at": {str(k): dict(zip(("mean", "low", "high"), found, strict=True)) for k, found in passes.items()},
        "answer_entropy": float(answer_entropies(rows).mean()) if samples > 1 else None,
        "format": float(rows["format"].mean()),
        "completion_tokens": float(rows["tokens"].mean()),
        "truncated": float(rows["truncated"].mean()),
    }


def summarize_each(rows: pd.DataFrame) -> list[Summary]:
    """Return a summary (see `summarize`) for each benchmark, engine and sampling in `rows`, with these as keys too."""
    groups = rows.groupby(GROUP, sort=False)
    return [dict(zip(GROUP, group, strict=True)) | summarize(part) for group, part in groups]


def table(results: Sequence[Summary]) -> str:
    """Format the printed table: a row per benchmark and engine.

    The column pass@k reads `@2 0.500  @4 0.625`. It omits pass@1, which equals accuracy for right-or-wrong scores.
    """
    is_sampled = any(result["samples"] > 1 for result in results)
    head = ["benchmark", "engine", "questions", "samples", "accuracy, 95% interval", "standard error"]
    rows = [[*head, *(["pass@k", "answer entropy"] if is_sampled else []), "format", "tokens", "cut"]]
    for result in results:
        error = result["standard_error"]
        cells = [result["benchmark"], result["engine"], f"{result['questions']:,}", str(result["samples"])]
        cells += [f"{result['accuracy']:.3f} [{result['low']:.3f}, {result['high']:.3f}]"]
        cells += ["-" if error is None else f"{error:.3f}"]
        if is_sampled:
            passes = (f"@{k} {estimate['mean']:.3f}" for k, estimate in result["pass_at"].items() if k != "1")
            answers = result.get("answer_entropy")  # unknown in an older evaluation
            cells += ["  ".join(passes) or "-", "-" if answers is None else f"{answers:.3f}"]
        cells += [f"{result['format']:.3f}", f"{result['completion_tokens']:.1f}", f"{result['truncated']:.3f}"]
        rows.append(cells)
    return columns(rows)
