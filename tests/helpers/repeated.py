"""Read the parts of a record that a repeated or resumed run must reproduce bit for bit."""

from pathlib import Path

from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared_metrics

# Times, speeds and memory are never the same.
VARYING = {
    name for name, metric in declared_metrics(("format", "answer")).items() if metric.unit in ("s", "tokens/s", "GiB")
}
FILES = ("adapter/adapter_model.safetensors", "eval.parquet", "samples.jsonl")


def lines_of(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Return step and metrics of each line of metrics.jsonl, without VARYING metrics."""
    return [
        (line["step"], {name: value for name, value in line["metrics"].items() if name not in VARYING})
        for line in RunDirectory(run_dir).metrics()
    ]


def last_step(run_dir: Path) -> int:
    """Return the last step that is logged; -1 before any."""
    return max((line["step"] for line in RunDirectory(run_dir).metrics()), default=-1)


def files_of(run_dir: Path) -> list[bytes]:
    return [(run_dir / name).read_bytes() for name in FILES]
