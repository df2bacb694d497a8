"""Read every result of `python -m qerl_lab.bench` in a folder, and give its text and figure."""

from pathlib import Path

from matplotlib.figure import Figure

from qerl_lab.config.option import ConfigError, parse_json
from qerl_lab.config.spelling import shell_word
from qerl_lab.report import bench, bench_arms
from qerl_lab.report.arms import version
from qerl_lab.report.bench import Result

OF_ARMS = ("rollout", "step")  # benchmarks that run each arm in its own process
NO_RESULT = (ValueError, LookupError, TypeError, AttributeError)  # raised by reading an invalid or incomplete file


def read(folder: Path) -> dict[str, Result]:
    """Read the results of a folder by file name. Raises ConfigError if there is none or a file is invalid."""
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
    """Read one result. Raises one of `NO_RESULT`, or OSError."""
    result: Result = parse_json(file.read_bytes())
    result["benchmark"], result["environment"]
    return result


def text(result: Result) -> str:
    """Format a result as a table."""
    return (bench_arms if result["benchmark"] in OF_ARMS else bench).table(result)


def figure(result: Result) -> Figure | None:
    """Draw a result; the caller closes the figure. None for a clock, or if every arm died."""
    if result["benchmark"] in OF_ARMS:
        return bench_arms.figure_of(result) if bench_arms.alive(result) else None
    return None if result["benchmark"] == "clock" else bench.figure_of(result)


def origin(result: Result) -> str:
    """Say when, on which GPU and by which code a result was measured."""
    about = result["environment"]
    versions = [f"{name} {about['packages'][name]}" for name in ("torch", "vllm") if about["packages"].get(name)]
    code = version(about["git_sha"], about["dirty"])
    return ", ".join([about["time"][:10], bench.gpu_of(result), *versions, f"commit {code}"])
