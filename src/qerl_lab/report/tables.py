"""Text for the terminal."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any


def near(path: Path) -> str:
    """A path as short as it can be typed from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def python() -> str:
    """This Python as it can be typed from here: `python` where that is the one, else its path (.venv/bin/python)."""
    return "python" if shutil.which("python") == sys.executable else near(Path(sys.executable))


def closing(result: dict[str, Any]) -> str:
    """The table at the end of a run, from `runs.summarize`."""
    rows: list[tuple[str, str]] = []
    if "accuracy_gain" in result:
        low, high = result["accuracy_gain_interval"]
        rows += [
            ("held-out accuracy", f"{result['accuracy_before']:.3f} -> {result['accuracy_after']:.3f}"),
            (
                "  gain, paired 95% CI",
                f"{result['accuracy_gain']:+.3f} [{low:+.3f}, {high:+.3f}], {result['questions']} questions",
            ),
        ]
    shares = ", ".join(f"{result[f'share_{name}']:.0%} {name}" for name in ("rollout", "train", "sync"))
    end_to_end, rollout = result["tokens_per_second"], result["rollout_tokens_per_second"]
    rows += [
        ("reward", f"{result['reward_first']:.3f} -> {result['reward_last']:.3f}"),
        ("policy entropy", f"{result['entropy_first']:.3f} -> {result['entropy_last']:.3f} nats"),
        ("throughput", f"{end_to_end:,.0f} tokens/s end to end, {rollout:,.0f} in rollouts"),
        ("time", f"{shares}; {result['seconds']:.0f} s in all"),
        ("memory", _memory(result)),
    ]
    return aligned(rows)


def aligned(rows: list[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _memory(result: dict[str, Any]) -> str:
    gpu = f", {result['memory_gpu_peak_gib']:.2f} GiB on the GPU" if "memory_gpu_peak_gib" in result else ""
    return f"{result['memory_rss_gib']:.2f} GiB peak resident{gpu}"


def where(run_dir: Path, mlflow_uri: str | None) -> str:
    """Where the record is, and the one command that opens MLflow."""
    lines = [f"run directory: {near(run_dir)}  (curves.png, metrics.jsonl, eval.parquet, adapter/)"]
    if mlflow_uri:
        lines.append(f"open MLflow:   {python()} -m mlflow ui --backend-store-uri {shlex.quote(mlflow_uri)}")
    return "\n".join(lines)
