"""Format a finished run for the terminal."""

import shlex
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.config.message import first_and_last
from qerl_lab.config.redact import HIDDEN
from qerl_lab.config.spelling import shell_override
from qerl_lab.record.directory import RunDirectory
from qerl_lab.report import runs
from qerl_lab.report.stats import format_interval
from qerl_lab.system import terminal

OF_FEW_RUNS = {"reward": "grading", "probe": "measuring noise"}  # phase that most runs spend little in -> its text
LEAST_SHARE = 0.05  # smallest share of the time at which such a phase is named


def closing_table(result: dict[str, Any], steps: pd.DataFrame) -> str:
    """Format the table that a run prints at its end.

    `result` comes from `runs.summarize`, and `steps`, the metrics of each step, from `runs.read_steps`.
    """
    rows: list[tuple[str, str]] = []
    if "accuracy_gain" in result:
        interval = format_interval(*result["accuracy_gain_interval"])
        rows += [
            ("held-out accuracy", f"{result['accuracy_before']:.3f} -> {result['accuracy_after']:.3f}"),
            ("  gain, paired 95% CI",
             f"{result['accuracy_gain']:+.3f} {interval}, {result['questions']} questions, this seed"),
        ]  # fmt: skip
    cut = [result.get(f"truncated_{phase}", 0.0) for phase in ("before", "after")]
    if any(cut):
        rows.append(("  cut at the token limit", f"{cut[0]:.1%} -> {cut[1]:.1%} of the answers"))
    share = {name: runs.share_of_time(steps, name) for name in runs.SHARES}
    for phase, words in OF_FEW_RUNS.items():
        if (part := runs.share_of_time(steps, phase)) >= LEAST_SHARE:
            share[words] = part
    if (rest := 1 - sum(share.values())) >= LEAST_SHARE:
        share["other (seconds/* in metrics.jsonl)"] = rest
    shares = ", ".join(f"{part:.0%} {name}" for name, part in share.items())
    gpu = f", {result['memory_gpu_peak_gib']:.2f} GiB on the GPU" if "memory_gpu_peak_gib" in result else ""
    end_to_end, rollout = result["tokens_per_second"], result["rollout_tokens_per_second"]
    reward, entropy = (
        first_and_last(result[f"{name}_first"], result[f"{name}_last"], result["steps"])
        for name in ("reward", "entropy")
    )
    tenths = (" (first and last tenth of the steps)", " (likewise)") if result["steps"] > 1 else ("", "")
    rows += [
        ("reward", f"{reward}{tenths[0]}"),
        ("policy entropy", f"{entropy} nats{tenths[1]}"),
        ("throughput", f"{end_to_end:,.0f} tokens/s end to end, {rollout:,.0f} in rollouts"),
        ("time", f"{shares}; {result['seconds']:.0f} s in all"),
        ("memory", f"{result['memory_rss_gib']:.2f} GiB peak resident{gpu}"),
    ]
    return terminal.aligned(rows)


def location(run_dir: Path, is_mirrored: bool | None) -> str:
    """Return the lines that say where the run's record is and how to open the run in MLflow.

    If MLflow lacks a part of the record (`is_mirrored` is False), a further line says how to fill it. `is_mirrored` is
    None for a run without MLflow.
    """
    names = ("curves.png", "metrics.jsonl", "eval.parquet", "adapter/", "model/")
    path, python = terminal.format_path(run_dir), terminal.python_command()
    lines = [f"run directory: {path}  ({', '.join(name for name in names if (run_dir / name).exists())})"]
    noted = {} if is_mirrored is None else RunDirectory(run_dir).mirror()
    uri = str(noted.get("uri"))
    if noted.get("experiment_id"):
        page = f"#/experiments/{noted['experiment_id']}/runs"
        if uri.startswith(("http://", "https://")):
            lines.append(f"open MLflow:   {uri.replace(f'{HIDDEN}@', '').rstrip('/')}/{page}")
        else:
            store = '"$MLFLOW_TRACKING_URI"' if HIDDEN in uri else shlex.quote(uri)
            lines.append(f"open MLflow:   {python} -m mlflow ui --backend-store-uri {store}")
            lines.append(f"  then:        http://127.0.0.1:5000/{page}")
    if is_mirrored is False:
        lines.append(f"MLflow at {uri} lacks a part of this run; metrics.jsonl has all. To fill it:")
        lines.append(f"  {python} -m qerl_lab.tracking resync {shlex.quote(path)}")
    return "\n".join(lines)


def next_steps(run_dir: Path) -> str:
    """Format the commands to type after a finished run, a line each: show samples, make a report, export the adapter.

    A model trained with lora=full needs no export.
    """
    here, line = shlex.quote(terminal.format_path(run_dir)), f"next: {terminal.python_command()} -m qerl_lab"
    lines = [
        f"{line}.tools.samples {here}",
        f"{line}.report {here} {shell_override('out', f'results/{run_dir.name}')}",
    ]
    if not (run_dir / "model").is_dir():
        lines.append(f"{line}.tools.export {here} {shell_override('out', f'exports/{run_dir.name}')}")
    return "\n".join(lines)
