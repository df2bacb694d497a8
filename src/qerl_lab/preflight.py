"""Check a run's model, questions and machine before it starts. Imports no torch.

Composing a command checks the words; this module checks files and hardware. It downloads and writes nothing. If a limit
is an estimate, the error names the word that lifts it (`device=cpu`).
"""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from qerl_lab import tasks
from qerl_lab.config.arm import values_of
from qerl_lab.config.engine_rules import check_engine_on_cpu
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import build
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig, TaskConfig
from qerl_lab.config.units import GIB
from qerl_lab.disk import cache_folder, hub_home
from qerl_lab.model import adapter_files, gguf, on_disk
from qerl_lab.tasks import arithmetic, data

VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")  # NVIDIA, WSL, ROCm, Jetson
TOO_MANY_FOR_A_CPU = 1_000_000_000  # parameters; a rollout of 128 x 256 tokens would take hours on a few cores
ALLOCATOR, EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
RECORD_BYTES = 64 * 2**20  # metrics, figures and logs of a run, rounded up
NEEDS_GPU = (  # key, value, package, what to type instead
    ("optim.name", "adamw_8bit", "bitsandbytes", "optim=adamw"),
    ("model.attention", "flash_attention_2", "flash_attn", "model.attention=sdpa"),
)


def check(cfg: RunConfig, run_dir: Path, here: bool = True) -> list[str]:
    """Raise ConfigError for a run that would fail at its start; return notes on what it cuts.

    Args:
        here: the run will use this machine. False for a launcher that sends jobs elsewhere; the run then checks its own
        machine.
    """
    on_disk.check_content(cfg)
    folder = on_disk.local(cfg.model.path)
    if folder is not None:
        on_disk.check(folder, cfg)
    if cfg.lora.start_from is not None:
        adapter_files.check(cfg)
    check_directory(run_dir)
    if here:
        check_machine(cfg, run_dir)
    return _check_questions(cfg)


def check_machine(cfg: RunConfig, run_dir: Path) -> None:
    """Raise ConfigError if this machine lacks what the run needs: device, packages, memory, disk space."""
    folder = on_disk.local(cfg.model.path)
    _check_device(cfg)
    _check_size(cfg, folder)
    _check_gpu_only(cfg)
    check_engine(cfg)
    if cfg.tracking.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "tracking.wandb=true needs the package wandb, which is not installed. Type pip install 'qerl-lab[wandb]', "
            "or tracking=mlflow."
        )
    _check_disk(cfg, folder, run_dir)


def check_directory(run_dir: Path) -> None:
    """Raise ConfigError if the run's directory could not be created or written."""
    above = next(path for path in (run_dir, *run_dir.parents) if os.path.lexists(path))
    longest = os.pathconf(above, "PC_NAME_MAX")
    if not above.is_dir():
        wrong = f"made: {above} is a file"
    elif os.statvfs(above).f_flag & os.ST_RDONLY or not os.access(above, os.W_OK | os.X_OK):
        wrong = f"written: {above} is read-only for you"
    elif not _is_text(run_dir):
        wrong = "made: its name is no UTF-8, in which the record is written"
    elif any(len(os.fsencode(part)) > longest for part in run_dir.parts):
        wrong = f"made: a part of its name has over {longest} bytes"
    else:
        return
    raise ConfigError(
        f"the run directory {run_dir} cannot be {wrong}. Type another: run_dir=DIR, for a sweep hydra.sweep.dir=DIR."
    )


def _is_text(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def _check_device(cfg: RunConfig) -> None:
    if cfg.device == "cuda" and not has_gpu():
        raise ConfigError("device=cuda was given, and this machine shows no GPU. Type device=cpu, or device=auto.")
    if cfg.gpus > 1 and cfg.device != "cpu" and not has_gpu():
        raise ConfigError(
            f"gpus={cfg.gpus}, and this machine shows none. Type gpus=1, or device=cpu for processes on the CPU."
        )
    names = visible_gpus() if cfg.device != "cpu" and has_gpu() else None
    if names is not None and cfg.gpus > len(names):
        raise ConfigError(f"gpus={cfg.gpus}, and this machine shows {len(names)}. Type gpus={len(names)} or less.")
    cores = os.cpu_count() or 1
    if cfg.cpu_threads > max(cores, RunConfig().cpu_threads):
        raise ConfigError(
            f"cpu_threads={cfg.cpu_threads} is more than the {cores} cores of this machine, which makes a run many "
            f"times slower. Type cpu_threads={cores}."
        )
    if cfg.format.dense_cache == "on" and cfg.device == "auto" and has_gpu():
        raise ConfigError(
            "format.dense_cache=on is refused on a GPU, which device=auto takes here; allowed there: auto, off. "
            "Type format.dense_cache=off, or device=cpu."
        )


def _check_gpu_only(cfg: RunConfig) -> None:
    values = values_of(cfg)
    for key, value, package, remedy in NEEDS_GPU:
        if values[key] == value and not has_gpu():
            raise ConfigError(f"{key}={value} needs a GPU, and this machine shows none. Type {remedy}.")
        if values[key] == value and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key}={value} needs the package {package}, which is not installed. Type {remedy}.")


def check_engine(cfg: RunConfig) -> None:
    """Raise ConfigError if the engine's package or device is missing."""
    if cfg.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine=vllm needs the package vllm, which is not installed. Type pip install 'qerl-lab[vllm]', "
            "or rollout=transformers."
        )
    if cfg.rollout.engine == "vllm" and cfg.rollout.vllm.sleep and EXPANDABLE in os.environ.get(ALLOCATOR, ""):
        raise ConfigError(
            f"rollout.vllm.sleep=true with {ALLOCATOR}={os.environ[ALLOCATOR]} is not allowed: memory that sleeps "
            "cannot lie in expandable segments, and vLLM turns them off for it only where it finds them in "
            "PYTORCH_CUDA_ALLOC_CONF. Set that variable in its place, or type rollout.vllm.sleep=false."
        )
    if not has_gpu():
        check_engine_on_cpu(cfg, "this machine shows none")


def has_gpu() -> bool:
    """Tell whether the system shows a GPU to this process; the installed torch may still be a CPU build."""
    hidden = os.environ.get(VISIBLE)
    return hidden not in ("", "-1") and any(Path(node).exists() for node in GPU_NODES)


@cache
def visible_gpus() -> list[str] | None:
    """List the GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES; None if unknown."""
    if given := os.environ.get(VISIBLE):
        return given.split(",")
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [str(index) for index, _ in enumerate(line for line in out.splitlines() if line.startswith("GPU "))]


def _check_size(cfg: RunConfig, folder: Path | None) -> None:
    """Raise ConfigError for a model too large for this machine's memory, or one that would take days on it."""
    count = _parameters(cfg.model.path, folder)
    on_gpu = cfg.device != "cpu" and has_gpu()
    if count is None:
        return
    said = f"model.path={cfg.model.path} has {count:,} parameters"
    if not on_gpu and cfg.device == "auto" and count >= TOO_MANY_FOR_A_CPU:
        raise ConfigError(
            f"{said}, and this machine shows no GPU: a step would take hours. Type model=qwen2_5_0_5b or another "
            f"small model, or device=cpu to run it all the same."
        )
    needed, held = count * _bytes_a_parameter(cfg, on_gpu), gpu_memory() if on_gpu else memory()
    if held is not None and needed > held:
        raise ConfigError(
            f"{said}, which take {needed / GIB:.1f} GiB with format={cfg.format.name}, and "
            f"{'the GPU' if on_gpu else 'this machine'} has {held / GIB:.1f} GiB. Type a smaller model"
            f"{'.' if cfg.format.name != DENSE_FORMAT and on_gpu else ', or format=nvfp4 with format.dense_cache=off.'}"
        )


def _parameters(path: str, folder: Path | None) -> int | None:
    """Count a model's weights from its files, or from its name on the hub; None if unknown."""
    if folder:
        return on_disk.parameters(folder)
    return _header(path).parameters if gguf.is_gguf(path) else named_parameters(path)


@cache
def _header(path: str) -> gguf.Header:
    """Read a GGUF file's header; its vocabulary takes a second or two."""
    return gguf.header(Path(path).expanduser())


def named_parameters(hub_id: str) -> int | None:
    """Read the parameter count from a hub id such as Qwen2.5-7B or SmolLM2-135M; None if it has none."""
    found = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", hub_id.rpartition("/")[2], re.IGNORECASE)
    return int(max(float(number) * {"b": 1e9, "m": 1e6}[unit.lower()] for number, unit in found)) if found else None


def _bytes_a_parameter(cfg: RunConfig, on_gpu: bool) -> float:
    """Return the least bytes per weight in training: the dtype's size if dense, half a byte if packed."""
    dense = 2 if cfg.model.dtype == "bfloat16" or (on_gpu and cfg.model.dtype == "auto") else 4
    cached = not on_gpu and cfg.format.dense_cache != "off"
    return dense if cfg.format.name == DENSE_FORMAT or cached else 0.5


def memory() -> int | None:
    """Return the bytes of memory and swap, or the control group's limit if lower; None if unknown."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    found = dict(re.findall(r"^(MemTotal|SwapTotal):\s+(\d+) kB", info.read_text(), re.MULTILINE))
    total, limit = sum(map(int, found.values())) * 1024, Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


@cache
def gpu_memory() -> int | None:
    """Return the bytes of the largest NVIDIA GPU; None if nvidia-smi gives none within ten seconds."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        return max(int(line) for line in out.splitlines()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _check_disk(cfg: RunConfig, folder: Path | None, run_dir: Path) -> None:
    """Raise ConfigError if the disk lacks room for a download, or for checkpoints (adapter, two moments, one extra)."""
    adapter = on_disk.adapter_parameters(folder, cfg) if folder else 0
    moments = 2 if cfg.optim.name == "adamw_8bit" else 8
    written = cfg.steps // cfg.checkpoint.every + 1 if cfg.checkpoint.every else 1
    needed = RECORD_BYTES + adapter * (4 + moments) * (min(cfg.checkpoint.kept, written) + 1)
    _refuse_full(run_dir, needed, "its checkpoints", "Type run_dir=DIR on another disk, or checkpoint.keep=1.")
    store, remedy = hub_cache(), "Set HF_HOME to a directory on another."
    if folder is None and gguf.is_gguf(cfg.model.path):
        needed = gguf.BYTES * _header(cfg.model.path).parameters
        _refuse_full(cache_folder(), needed, f"the weights of {cfg.model.path}", remedy)
    elif folder is None and not (store / f"models--{cfg.model.path.replace('/', '--')}").is_dir():
        count = named_parameters(cfg.model.path) or 0
        _refuse_full(store, 2 * count, f"the download of {cfg.model.path}", remedy)


def _refuse_full(place: Path, needed: int, what: str, remedy: str) -> None:
    above = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(above).free
    if needed > free:
        raise ConfigError(
            f"{above} has {free / GIB:.2f} GiB free, and {what} take {math.ceil(needed / 2**20) / 1024:.2f} GiB. "
            f"{remedy}"
        )


def hub_cache() -> Path:
    """Return the folder of models from the hub, by huggingface_hub's rules."""
    return Path(os.environ.get("HF_HUB_CACHE", hub_home() / "hub")).expanduser()


def _check_questions(cfg: RunConfig) -> list[str]:
    tasks.check_trains(cfg.task)
    if cfg.task.path is not None and not cfg.task.path.strip():
        raise ConfigError("task.path= is empty; allowed: a directory, a file or a hub id. Leave task.path out.")
    if not has_questions(cfg):
        return []
    if cfg.task == replace(TaskConfig(), instruction=cfg.task.instruction):  # skips a count that takes half a second
        return cut_questions(cfg, arithmetic.TRAIN_QUESTIONS, arithmetic.HELDOUT_QUESTIONS)
    found = _questions(json.dumps(asdict(cfg.task)))
    return [*found.warnings, *cut_questions(cfg, found.train, found.heldout)]


def questions(cfg: RunConfig) -> Mapping[str, Any]:
    """Return what a run records of question files on this machine; empty for other questions, which never change.

    Raises ConfigError if the files cannot be read.
    """
    lie_here = cfg.task.path is not None and data.is_local(cfg.task.path)
    return _questions(json.dumps(asdict(cfg.task))).data if lie_here else {}


def has_questions(cfg: RunConfig) -> bool:
    """Tell whether the questions are on this machine, so that the command can count those left out."""
    path = cfg.task.path
    return not tasks.is_on_the_hub(cfg.task) if path is None else data.is_local(path)


class _Questions(NamedTuple):
    """Number of training and held-out questions of a task, and fields of `tasks.Task` that describe them."""

    train: int
    heldout: int
    warnings: tuple[str, ...]
    data: Mapping[str, Any]


@cache
def _questions(task: str) -> _Questions:
    """Count a task's questions on this machine. Its configuration is passed as JSON, to be a cache key."""
    loaded = tasks.load(build({"task": json.loads(task)}).task)
    return _Questions(len(loaded.train), len(loaded.heldout), loaded.warnings, loaded.data)


def cut_questions(cfg: RunConfig, train: int, heldout: int) -> list[str]:
    """Note requests beyond the available questions. Raises ConfigError if there are too few."""
    source, more = _questions_come_from(cfg.task)
    if train == 0:
        raise ConfigError(f"{source} has no training question. Type {more}.")
    if (unasked := no_evaluation(cfg)) and heldout < 2:
        remedy = "Add some to test.jsonl, or type" if cfg.task.path else f"Type {more}, or"
        raise ConfigError(
            f"{source} has {heldout} held-out questions, and an evaluation needs two. {remedy} {unasked}."
        )
    said = []
    if cfg.eval.questions > heldout:
        said.append(f"eval.questions={cfg.eval.questions}: there are {heldout:,}, all of them are asked")
    if cfg.task.train_questions > train:
        said.append(f"task.train_questions={cfg.task.train_questions}: there are {train:,}, all of them are used")
    return said


def _questions_come_from(task: TaskConfig) -> tuple[str, str]:
    """Return the word that selects the source of the questions, and what to type for more of them."""
    more = "another task.path"
    if task.path is None:
        more = {"arithmetic": "a larger task.arithmetic.max_operand", "code_io": "task.code_io.max_level=3"}.get(
            task.name, more
        )
    if task.module:
        return f"task.module={task.module}", more
    return f"task.path={task.path}" if task.path else f"task={task.name} at this difficulty", more


def no_evaluation(cfg: RunConfig) -> str:
    """Return what to type to disable held-out evaluation; empty if the run has none."""
    return " ".join(f"eval.{key}=0" for key in ("questions", "every") if getattr(cfg.eval, key))
