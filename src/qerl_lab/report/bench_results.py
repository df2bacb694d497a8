"""Every result of `python -m qerl_lab.bench` in a folder: text and figure of each."""

import json
from pathlib import Path

from matplotlib.figure import Figure

from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_word
from qerl_lab.report import bench, bench_arms
from qerl_lab.report.arms import version
from qerl_lab.report.bench import Result

OF_ARMS = ("rollout", "step")  # benchmarks whose arms are processes of their own
NO_RESULT = (ValueError, LookupError, TypeError, AttributeError)  # what a file that is none, or a part of one, raises


def read(folder: Path) -> dict[str, Result]:
    """The results by the names of their files. Raises ConfigError for a folder without one, and a file that is none."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = load(file)
        except NO_RESULT as error:
            raise ConfigError(f"{file} is no result of python -m qerl_lab.bench ({error!r}). Move it away.") from None
    if not found:
        out = shell_word("out", folder / "linear")
        raise ConfigError(f"{folder} holds no result. Make one: python -m qerl_lab.bench linear {out}.")
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
