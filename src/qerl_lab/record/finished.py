"""Check without pandas that a finished run's files are complete, before a sweep or a report uses it."""

from collections.abc import Mapping
from pathlib import Path

from qerl_lab.config.option import ConfigError
from qerl_lab.disk import read_json
from qerl_lab.record import evaluations
from qerl_lab.record.metrics import steps_recorded
from qerl_lab.record.sessions import Sessions


def refuse_damaged(run_dir: Path, settings: Mapping[str, str]) -> None:
    """Raise ConfigError for the first file that is missing, truncated or not a run's.

    Args:
        settings: values of resolved.yaml as text, by dotted key.
    """
    for path in (run_dir / "DONE", *run_dir.glob("env*.json")):
        read_json(path, dict)
    Sessions(run_dir)
    last, why = steps_recorded(run_dir)
    if last < int(settings["steps"]):
        raise _damaged(run_dir, "metrics.jsonl", why)
    if settings["eval.questions"] != "0" and not (run_dir / evaluations.NAME).exists():
        raise _damaged(run_dir, evaluations.NAME, "is missing")
    if not evaluations.is_whole(run_dir):
        raise _damaged(run_dir, evaluations.NAME, "is no Parquet file")


def _damaged(run_dir: Path, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{run_dir / name} {why}, and the run is finished. Put it back as it was, or move {run_dir} away and type the "
        "same line: it has the run anew."
    )
