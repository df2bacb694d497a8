"""Which of vLLM's kernels computes the products of 4-bit weights: the fastest here, timed once.

vLLM takes the first of a list. Which is fastest depends on the GPU, the shapes of the model and the rows of a batch.
They are timed in a process of their own (`backend_times`), which leaves nothing behind: no memory, no kernels, no
random numbers.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import FormatConfig, RunConfig
from qerl_lab.disk import cache_folder, lock, replace_file
from qerl_lab.model.linear import fused_groups, packed_layers

TIMED = ("nvfp4", "mxfp4")  # formats for which vLLM has several kernels
TIMER = "qerl_lab.rollout.vllm.backend_times"
LONGEST = 600  # seconds; both kernels of a model took 67, most of it compiling
# The first humming-kernels that waits for stores on Hopper before it loads into the same shared memory, and on both
# blocks of a cluster. 0.1.10, which vLLM 0.26 requires, does neither: read, not measured.
ORDERED_HUMMING = Version("0.1.13")
RACES = "the installed Humming has races on this GPU (docs/running.md)"
Shape = tuple[tuple[int, ...], int]  # columns of y by part, columns of x


def chosen(cfg: RunConfig, model: nn.Module) -> str:
    """Return `rollout.vllm.linear_backend` in vLLM's words: for `auto` the fastest for the layers of `model`.

    vLLM's own choice, which it calls auto, for formats whose kernels are not timed. Times are kept beside unpacked GGUF
    files, by GPU, versions of vLLM and Humming, format, shapes and rows. Raises ConfigError where the kernels cannot be
    timed.
    """
    asked = cfg.rollout.vllm.linear_backend
    if asked in ("humming", "tuned") and torch.cuda.is_available() and humming_races():
        print(f"warning: {RACES}; watch sampler/logprob_gap_max, or type rollout.vllm.linear_backend=marlin")
    if asked in ("marlin", "humming"):
        return asked
    if asked == "tuned":
        return "humming"
    if asked == "vllm" or cfg.format.name not in TIMED or not torch.cuda.is_available():
        return "auto"
    if humming_races():
        print(f"linear_backend=marlin: {RACES}; nothing is timed")
        return "marlin"
    shapes, rows = shapes_of(model), rows_while_emptying(cfg)
    kernels = [version(package) for package in ("vllm", "humming-kernels")]
    about = [torch.cuda.get_device_name(), *kernels, cfg.format.name, sorted(shapes.items()), rows]
    with remembered("linear_backend.json") as known:
        if (key := json.dumps(about)) not in known:
            known[key] = milliseconds(cfg.format, shapes, rows)
    times = known[key]
    fastest = min(times, key=lambda name: times[name])
    said = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
    print(f"linear_backend={fastest}: the model's products at {', '.join(map(str, rows))} rows take {said}")
    return fastest


@contextmanager
def remembered(name: str) -> Iterator[dict[str, Any]]:
    """What this machine has timed, to read and to add to, in a file beside unpacked GGUF files.

    A run that would time the same waits for the first one, and then reads it.
    """
    file = cache_folder() / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as guard:
        lock(guard)
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        before = len(known)
        yield known
        if len(known) > before:
            replace_file(file, json.dumps(known, indent=1).encode(), aside=str(os.getpid()))


def humming_races() -> bool:
    """Whether this GPU is a Hopper, and the installed Humming older than `ORDERED_HUMMING`."""
    return torch.cuda.get_device_capability()[0] == 9 and Version(version("humming-kernels")) < ORDERED_HUMMING


def shapes_of(model: nn.Module) -> Counter[Shape]:
    """How often each shape of packed layer comes, as engines fuse them."""
    layers = packed_layers(model)
    groups = ([layers[name] for name in group] for group in fused_groups(list(layers)))
    return Counter((tuple(layer.out_features for layer in group), group[0].in_features) for group in groups)


def rows_while_emptying(cfg: RunConfig) -> list[int]:
    """Rows of decoding: a full batch, and what is left of it when half and three quarters of the completions ended."""
    full = min(cfg.rollout.batch_size, cfg.completions_per_gpu)
    return sorted({full, -(-full // 2), -(-full // 4)}, reverse=True)


def milliseconds(weight_format: FormatConfig, shapes: Mapping[Shape, int], rows: Sequence[int]) -> dict[str, float]:
    """Time of the model's products by each kernel, the sum over `rows`, as another process measures it on this GPU.

    Raises ConfigError where that process fails or takes longer than `LONGEST`.
    """
    asked = {"format": asdict(weight_format), "shapes": list(shapes.items()), "rows": rows}
    found: dict[str, float] = measured("auto", TIMER, asked, LONGEST)
    return found


def measured(backend: str, timer: str, asked: Mapping[str, Any], longest: float) -> Any:
    """What the module `timer` measures on this GPU, in a process of its own, where `linear_backend` is `backend`.

    Raises ConfigError where that process fails or takes longer than `longest` seconds.
    """
    here = {"device": torch.cuda.current_device(), "parent": os.getpid()}
    with tempfile.TemporaryDirectory(prefix="qerl-lab-") as folder:
        times = Path(folder) / "times.json"
        command = [sys.executable, "-m", timer, str(times)]
        try:
            done = subprocess.run(
                command, input=json.dumps({**asked, **here}), capture_output=True, text=True, timeout=longest
            )
        except subprocess.TimeoutExpired:
            raise not_timed(backend, f"took longer than {longest} s") from None
        if done.returncode:
            *_, last = ["said nothing", *done.stderr.strip().splitlines()]
            raise not_timed(backend, f"ended with {done.returncode}: {last}")
        return json.loads(times.read_text(encoding="utf-8"))


def not_timed(backend: str, why: str) -> ConfigError:
    """The error of a measurement that failed."""
    return ConfigError(
        f"rollout.vllm.linear_backend={backend} times kernels in a process of its own, and that process {why}. Type "
        "rollout.vllm.linear_backend=vllm."
    )
