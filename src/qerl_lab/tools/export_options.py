"""Options of `python -m qerl_lab.tools.export`, and their check. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from qerl_lab.config.option import ConfigError, option
from qerl_lab.config.out import Writes, check_free
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.config.records import EXPORT
from qerl_lab.config.spelling import resume_word
from qerl_lab.record.directory import RunDirectory


@dataclass
class ExportOptions(Writes):
    run: str = option("", "directory of a finished run; required, its key may be left out")
    out: str = option("", "directory to write; required")
    merged: bool = option(False, "write a whole model, base and adapter in one; else the adapter alone")
    base: bool = option(False, "beside the adapter write the base that it was trained on, dequantized, to OUT/base")
    dtype: str = option(
        "bfloat16", "of what merged=true and base=true write; float32 has the run's own numbers, in twice the bytes",
        choices=("bfloat16", "float32"),
    )  # fmt: skip
    overwrite: bool = option(False, "replace what is at `out`")

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.run).expanduser().absolute())


def check(options: ExportOptions) -> None:
    """Raise ConfigError unless the run is done, has an adapter, and OUT is free. Loads no weights."""
    run = options.directory
    run.config()
    if run.status != "done":
        raise ConfigError(
            f"run={options.run} is {run.status_in_words}, and what it learned is whole when it is done. "
            f"Type python -m qerl_lab {resume_word(options.run)} first."
        )
    if not (run.adapter / WEIGHTS).is_file():
        raise ConfigError(f"run={options.run} has no adapter/{WEIGHTS}. Type another run.")
    if options.merged and options.base:
        raise ConfigError("base=true is for the adapter alone, and merged=true holds the base. Leave base out.")
    if options.dtype != ExportOptions().dtype and not (options.merged or options.base):
        raise ConfigError(
            f"dtype={options.dtype} is of dense weights, and the adapter alone has none. Type merged=true."
        )
    check_free(options, options.overwrite, lambda folder: (folder / EXPORT).is_file())
