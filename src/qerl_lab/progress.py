"""What a run prints while it goes: a bar on a terminal, a line now and then elsewhere. And what it keeps silent."""

import logging
import shutil
import sys
import time
import warnings

from tqdm import tqdm

SHOWN = {  # metric -> label and format on the bar
    "reward/mean": ("reward", "{:.2f}"),
    "policy/entropy_nats": ("entropy", "{:.3f}"),
    "noise/sigma": ("sigma", "{:.2g}"),
    "rollout/tokens_per_second": ("tok/s", "{:,.0f}"),
}
LINES = 10  # without a terminal, so many lines a run


class Progress:
    """Step, ETA, reward, entropy, sigma and rollout tokens/s of a run of `steps`, `done` of which are behind it."""

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self.first, self.started = steps, done, time.monotonic()
        # Asked here, because tqdm draws nothing on a terminal that gives its size as 0 x 0.
        columns, lines = shutil.get_terminal_size((100, 24))
        self.bar = (
            tqdm(total=steps, initial=done, unit="step", ncols=columns, nrows=lines) if sys.stderr.isatty() else None
        )

    def show(self, step: int, metrics: dict[str, float]) -> None:
        shown = ", ".join(f"{label} {form.format(metrics[name])}" for name, (label, form) in SHOWN.items())
        if self.bar is not None:
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step % max(1, self.steps // LINES) == 0 or step in (self.first + 1, self.steps):
            seconds = (time.monotonic() - self.started) / (step - self.first) * (self.steps - step)
            print(
                f"step {step}/{self.steps}, ETA {tqdm.format_interval(seconds)}, {shown}", file=sys.stderr, flush=True
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def quiet_third_parties() -> None:
    """Silence what is noise to the user of a run: loading bars, deprecations between libraries, adapter advice.

    Errors, and warnings of our own, still show.
    """
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging as transformers_logging

    disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("trl", "peft", "accelerate", "datasets", "bitsandbytes", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "mlflow"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
