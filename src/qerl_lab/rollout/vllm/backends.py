"""Choose the kernel for 4-bit products by timing the candidates on this GPU once.

vLLM takes the first of a list, but the fastest depends on the GPU, the model's shapes and the rows of a batch. The
candidates are vLLM's kernels followed by the adapter's product, and the lab's kernel, which includes it. They run in a
separate process (`backend_times`), so that no memory, compiled kernel or random state is left behind.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from qerl_lab.config.schema import RunConfig
from qerl_lab.disk import cache_folder, lock, replace_file
from qerl_lab.formats.marlin import DIVISOR
from qerl_lab.model.linear import PackedLinear, fused_groups, packed_layers
from qerl_lab.rollout.vllm import fp4_tiles

TIMED = ("nvfp4", "mxfp4")  # formats for which vLLM has several kernels
TIMER = "qerl_lab.rollout.vllm.backend_times"
LONGEST = 600  # seconds; Marlin and Humming took 67 for a model, mostly to compile
FP4_TILES = fp4_tiles.SOURCE.stem
IN_VLLM = {"vllm": "auto", FP4_TILES: "auto"}  # vLLM's name by ours; fp4_tiles bypasses vLLM's kernels
# First humming-kernels version that on Hopper waits for stores before it reloads the same shared memory, on both blocks
# of a cluster. 0.1.10, which vLLM 0.26 requires, does not (read in its source, not measured).
ORDERED_HUMMING = Version("0.1.13")
RACES = "the installed Humming has races on this GPU (docs/running.md)"
Shape = tuple[tuple[int, ...], int]  # columns of y by part, columns of x


class NotTimed(Exception):
    """The timing failed; the message says why."""


def chosen(cfg: RunConfig, model: nn.Module) -> str:
    """Return the kernel name for `rollout.vllm.linear_backend`; for `auto` the fastest for the layers of `model`.

    `auto` leaves the choice to vLLM on a CPU, for formats that are not timed, and, with a warning, if the timing fails.
    Times are cached beside unpacked GGUF files, by GPU, versions of torch, vLLM, Humming and the lab's kernel, format,
    shapes, rows and rank.
    """
    asked = cfg.rollout.vllm.linear_backend
    if asked == "humming" and torch.cuda.is_available() and humming_races():
        print(f"warning: {RACES}; watch sampler/logprob_gap_max, or type rollout.vllm.linear_backend=marlin")
    if asked != "auto":
        return asked
    if cfg.format.name not in TIMED or not torch.cuda.is_available():
        return "vllm"
    kernels = candidates(cfg, model)
    if len(kernels) == 1:
        print(f"linear_backend={kernels[0]}: the one that fits here; nothing is timed")
        return kernels[0]
    shapes, rows = shapes_of(model), rows_while_emptying(cfg)
    versions = [torch.__version__, version("vllm"), version("humming-kernels"), hash_of_tiles()]
    about = [torch.cuda.get_device_name(), *versions, kernels, cfg.format.name, sorted(shapes.items()), rows,
             cfg.lora.rank]  # fmt: skip
    try:
        with remembered() as known:
            if (key := json.dumps(about)) not in known:
                known[key] = milliseconds(kernels, cfg, shapes, rows)
    except NotTimed as error:
        print(f"warning: linear_backend=auto timed nothing ({error}), so that vLLM chooses")
        return "vllm"
    times = known[key]
    fastest = min(times, key=lambda name: times[name])
    said = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
    print(f"linear_backend={fastest}: products and adapter at {', '.join(map(str, rows))} rows take {said}")
    return fastest


def candidates(cfg: RunConfig, model: nn.Module) -> list[str]:
    """List the kernels that this run can use on this GPU. A Humming with races must be asked for by name."""
    own, found = cfg.rollout.vllm, ["marlin"]
    if humming_races():
        print(f"linear_backend=auto leaves out humming: {RACES}")
    elif not own.share_base:
        found.append("humming")
    if cfg.format.name == "nvfp4" and own.lora == "dense":
        if why := fp4_tiles.refusal():
            print(f"linear_backend=auto leaves out fp4_tiles: it {why}")
        elif tiles_fit(model, cfg.lora.rank):
            found.append(FP4_TILES)
    return found


def tiles_fit(model: nn.Module, lora_rank: int) -> bool:
    """Return whether the lab's bfloat16 kernel supports the packed layers of `model`, fused as in engines."""
    return all(
        fp4_tiles.takes([layer.out_features for layer in group], group[0].in_features, lora_rank)
        and {layer.compute_dtype for layer in group} == {torch.bfloat16}
        and len({layer.packed()[DIVISOR].item() for layer in group}) == 1
        for group in fused(model)
    )


def hash_of_tiles() -> str:
    """Hash the lab's kernel and its launch code, as a version."""
    source = fp4_tiles.SOURCE
    files = [source, source.with_suffix(".py"), *sorted(source.parent.glob("*.cuh"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@contextmanager
def remembered() -> Iterator[dict[str, Any]]:
    """Yield this machine's cached times, read from a file beside unpacked GGUF files; save additions.

    A concurrent run waits for the lock and then reads the first one's times.
    """
    file = cache_folder() / "linear_backend.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as guard:
        lock(guard)
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        before = len(known)
        yield known
        if len(known) > before:
            replace_file(file, json.dumps(known, indent=1).encode(), aside=str(os.getpid()))


def humming_races() -> bool:
    """Return whether this GPU is a Hopper and the installed Humming is older than `ORDERED_HUMMING`."""
    return torch.cuda.get_device_capability()[0] == 9 and Version(version("humming-kernels")) < ORDERED_HUMMING


def shapes_of(model: nn.Module) -> Counter[Shape]:
    """Count the packed layers of each shape, fused as in engines."""
    return Counter((tuple(layer.out_features for layer in group), group[0].in_features) for group in fused(model))


def fused(model: nn.Module) -> Iterable[list[PackedLinear]]:
    """Return the packed layers in the groups that engines fuse."""
    layers = packed_layers(model)
    return ([layers[name] for name in group] for group in fused_groups(list(layers)))


def rows_while_emptying(cfg: RunConfig) -> list[int]:
    """Return batch sizes of decoding: a full batch, and what is left after half and three quarters have finished.

    Sizes from `dense_rows` on use another kernel and are left out, unless none would remain.
    """
    full = min(cfg.rollout.batch_size, cfg.completions_per_gpu)
    rows = sorted({full, -(-full // 2), -(-full // 4)}, reverse=True)
    return [number for number in rows if number < (cfg.rollout.vllm.dense_rows or full + 1)] or rows[-1:]


def milliseconds(
    kernels: Sequence[str], cfg: RunConfig, shapes: Mapping[Shape, int], rows: Sequence[int]
) -> dict[str, float]:
    """Time the model's products with adapter by each kernel, summed over `rows`, in another process on this GPU.

    Raises NotTimed if that process fails or takes longer than `LONGEST`.
    """
    asked = {
        "kernels": kernels, "format": asdict(cfg.format), "rank": cfg.lora.rank, "shapes": list(shapes.items()),
        "rows": rows, "device": torch.cuda.current_device(), "parent": os.getpid(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="qerl-lab-") as folder:
        times = Path(folder) / "times.json"
        command = [sys.executable, "-m", TIMER, str(times)]
        try:
            done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            raise NotTimed(f"its process took longer than {LONGEST} s") from None
        if done.returncode:
            *_, last = ["said nothing", *done.stderr.strip().splitlines()]
            raise NotTimed(f"its process ended with {done.returncode}: {last}")
        found: dict[str, float] = json.loads(times.read_text(encoding="utf-8"))
        return found
