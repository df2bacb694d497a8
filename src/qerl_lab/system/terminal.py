"""Terminal output: progress bars, columns, short paths, and silencing of third parties."""

import atexit
import gc
import logging
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tqdm import tqdm

from qerl_lab.system.processes import LIBRARY_VARIABLES

SHOWN = {  # metric -> label and format on the bar
    "reward/mean": ("reward", "{:.2f}"),
    "policy/entropy_nats": ("entropy", "{:.3f}"),
    "noise/sigma": ("sigma", "{:.2g}"),
    "rollout/tokens_per_second": ("tokens/s", "{:,.0f}"),
}
LINES = 10  # lines printed per run if there is no terminal
SLOW_SECONDS = 10.0  # after which `say_if_slow` prints


class ProgressBar:
    """Context manager that shows progress and ETA: on a terminal a bar, elsewhere a printed line at each tenth.

    The work has `total` units, of which `done` were complete before. `unit` names one unit; `B` stands for bytes.
    """

    def __init__(self, label: str, total: int, done: int = 0, unit: str = "B") -> None:
        self.label, self.total, self.first, self.now, self.unit = label, total, done, done, unit
        self.started = self.printed = time.monotonic()
        self.bar: tqdm | None = None  # then lines are printed
        if sys.stderr.isatty():
            width, height = shutil.get_terminal_size((100, 24))  # tqdm draws nothing if the terminal reports 0 x 0
            self.bar = tqdm(
                desc=label, total=total, initial=done, unit=unit, unit_scale=unit == "B", ncols=width, nrows=height
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def advance(self, count: int, status: str = "") -> None:
        """Count `count` more units as done, and show `status` behind the amount."""
        before, self.now = self.now, self.now + count
        is_due = self.now * LINES // self.total > before * LINES // self.total
        if self.bar is not None:
            self.bar.set_postfix_str(status, refresh=False)
            self.bar.update(count)
        elif is_due and time.monotonic() > self.printed + 1:  # at most a line a second; a fast task prints none
            self.printed = time.monotonic()
            amount = f"{self.now:,}/{self.total:,} {self.unit}s"
            if self.unit == "B":
                amount = "/".join(tqdm.format_sizeof(size, "B") for size in (self.now, self.total))
            self._print_line(f"{self.label}: {amount}", status)

    def _print_line(self, amount: str, status: str) -> None:
        """Print `amount`, the ETA and `status` as one line to standard error."""
        eta = estimate_time_left(time.monotonic() - self.started, self.now - self.first, self.total - self.now)
        print(", ".join(filter(None, (amount, f"ETA {eta}", status))), file=sys.stderr, flush=True)


class TrainingProgress(ProgressBar):
    """Progress bar of a training run: show step, ETA, reward, entropy, sigma and rollout tokens/s.

    `steps` is the number of steps of the whole run, `done` how many of them earlier sessions completed.
    """

    def __init__(self, steps: int, done: int) -> None:
        super().__init__("", steps, done, "step")

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show the step and its metrics on the bar; without a terminal print a line at some steps.

        These are every tenth of the run, its last step, and this session's first. `metrics` must have a value for each
        name in `SHOWN`.
        """
        shown = ", ".join(f"{label} {form.format(metrics[name])}" for name, (label, form) in SHOWN.items())
        if self.bar is not None:
            self.advance(step - self.now, shown)
            return
        self.now = step
        if step % max(1, self.total // LINES) == 0 or step in (self.first + 1, self.total):
            self._print_line(f"step {step}/{self.total}", shown)


def estimate_time_left(seconds: float, done: int, left: int) -> str:
    """Format the time that `left` units will take if `done` units took `seconds`; `-` if `done` is 0."""
    return str(tqdm.format_interval(seconds / done * left)) if done > 0 else "-"


def quiet_third_parties() -> None:
    """Silence loading bars, deprecation warnings and advice of third-party libraries, but not their errors."""
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging as transformers_logging

    disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("trl", "peft", "accelerate", "datasets", "bitsandbytes", "matplotlib", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "mlflow"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Context manager around imports of large packages: silence the packages for good, and pause garbage collection.

    Before the imports it sets the LIBRARY_VARIABLES that the user has not set. Scanning the packages' million objects
    takes a sixth of the import time. Later collections leave these objects out too.
    """
    for name, value in LIBRARY_VARIABLES.items():
        os.environ.setdefault(name, value)
    gc.disable()
    try:
        quiet_third_parties()  # some packages print during import
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
        gc.enable()


def say(text: str) -> None:
    """Print a line to standard error, above any progress bar."""
    tqdm.write(text, file=sys.stderr)


@contextmanager
def say_if_slow(text: str) -> Iterator[None]:
    """Context manager: print the line `text` to standard error if the body takes longer than SLOW_SECONDS.

    It is for a single call that cannot tell how far it is, so that a `ProgressBar` would have nothing to show.
    """
    timer = threading.Timer(SLOW_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def format_path(path: Path) -> str:
    """Format a path for a message: relative if it lies in the current directory, else unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def python_command() -> str:
    """Return what to type for the Python of this process: `python` if the shell finds the same, else its path."""
    return "python" if shutil.which("python") == sys.executable else format_path(Path(sys.executable))


def by_numbers(text: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the numbers in them: rank16 before rank128."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def aligned(rows: list[tuple[str, str]]) -> str:
    """Format rows of (name, value) as indented lines with the values in one column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def columns(rows: list[list[str]]) -> str:
    """Format rows of cells as lines of text; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
