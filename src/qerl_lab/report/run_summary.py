"""Format a finished run for the terminal."""

import shlex
from pathlib import Path
from typing import Any

from qerl_lab.config.redact import HIDDEN
from qerl_lab.config.spelling import shell_override
from qerl_lab.report.stats import format_interval
from qerl_lab.system import terminal
from qerl_lab.tracking.tracker import Mirrored


def closing(result: dict[str, Any]) -> str:
    """Format the table that a run prints at its end, from the result of `runs.summarize`."""
    rows: list[tuple[str, str]] = []
    if "accuracy_gain" in result:
        interval = format_interval(*result["accuracy_gain_interval"])
        rows += [
            ("held-out accuracy", f"{result['accuracy_before']:.3f} -> {result['accuracy_after']:.3f}"),
            (
                "  gain, paired 95% CI",
                f"{result['accuracy_gain']:+.3f} {interval}, {result['questions']} questions, this seed",
            ),
        ]
    cut = [result.get(f"truncated_{phase}", 0.0) for phase in ("before", "after")]
    if any(cut):
        rows.append(("  cut at the token limit", f"{cut[0]:.1%} -> {cut[1]:.1%} of the answers"))
    shares = ", ".join(f"{result[f'share_{name}']:.0%} {name}" for name in ("rollout", "train", "sync"))
    gpu = f", {result['memory_gpu_peak_gib']:.2f} GiB on the GPU" if "memory_gpu_peak_gib" in result else ""
    end_to_end, rollout = result["tokens_per_second"], result["rollout_tokens_per_second"]
    rows += [
        ("reward", f"{result['reward_first']:.3f} -> {result['reward_last']:.3f}"),
        ("policy entropy", f"{result['entropy_first']:.3f} -> {result['entropy_last']:.3f} nats"),
        ("throughput", f"{end_to_end:,.0f} tokens/s end to end, {rollout:,.0f} in rollouts"),
        ("time", f"{shares}; {result['seconds']:.0f} s in all"),
        ("memory", f"{result['memory_rss_gib']:.2f} GiB peak resident{gpu}"),
    ]
    return terminal.aligned(rows)


def where(run_dir: Path, mirror: Mirrored | None) -> str:
    """Format where a run's record is, and how to open the run in MLflow.

    `mirror` tells what MLflow has of the run; None if it is not used. If it lacks a part, the command to fill it is
    added.
    """
    trained = "model" if (run_dir / "model").is_dir() else "adapter"
    lines = [f"run directory: {terminal.format_path(run_dir)}  (curves.png, metrics.jsonl, eval.parquet, {trained}/)"]
    if mirror and mirror.experiment_id:
        lines += _explain_opening(mirror.uri, f"#/experiments/{mirror.experiment_id}/runs")
    if mirror and not mirror.is_whole:
        what = f"MLflow at {mirror.uri} lacks a part of this run; metrics.jsonl has all. To fill it:"
        lines += [
            what,
            f"  {terminal.python_command()} -m qerl_lab.tracking resync {shlex.quote(terminal.format_path(run_dir))}",
        ]
    return "\n".join(lines)


def next_steps(run_dir: Path) -> str:
    """Return the commands that show and report a finished run, and export its adapter, a line each."""
    here, line = shlex.quote(terminal.format_path(run_dir)), f"next: {terminal.python_command()} -m qerl_lab"
    lines = [
        f"{line}.tools.samples {here}",
        f"{line}.report {here} {shell_override('out', f'results/{run_dir.name}')}",
    ]
    if not (run_dir / "model").is_dir():  # a model trained with lora=full needs no export
        lines.append(f"{line}.tools.export {here} {shell_override('out', f'exports/{run_dir.name}')}")
    return "\n".join(lines)


def _explain_opening(uri: str, page: str) -> list[str]:
    """Return lines that say how to open a page of MLflow: at a server's own address, else through `mlflow ui`.

    `uri` is the tracking URI, and `page` the end of the address (`#/experiments/...`).
    """
    if uri.startswith(("http://", "https://")):
        return [f"open MLflow:   {uri.replace(f'{HIDDEN}@', '').rstrip('/')}/{page}"]
    store = '"$MLFLOW_TRACKING_URI"' if HIDDEN in uri else shlex.quote(uri)
    start = f"{terminal.python_command()} -m mlflow ui --backend-store-uri {store}"
    return [f"open MLflow:   {start}", f"  then:        http://127.0.0.1:5000/{page}"]
