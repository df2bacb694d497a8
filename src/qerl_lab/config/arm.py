"""Decide which keys define an arm: two runs belong to one arm if these keys agree."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, NamedTuple

from qerl_lab.config.schema import RunConfig

OF_SWEEPS = ("jobs", "jobs_per_gpu", "launcher", "slurm")  # how a sweep runs its jobs, not what a job does
PREREGISTRATION = ("preregistration", "preregistration_sha256")  # a preregistration does not change the run
NOT_OF_ARM = (
    "seed",
    "run_dir", "resume", "dry_run", *OF_SWEEPS,  # how the run is started; `is_of_arm` excludes tracking.* too
    "checkpoint.every", "checkpoint.keep",
    "eval.samples_before",  # how precisely the untrained model is measured
    "device", "gpus", "cpu_threads",  # where it ran; reports read this from the record
    "rollout.vllm_server.url", "rollout.vllm_server.adapter_dir", "rollout.vllm_server.patience_seconds",
    "rollout.vllm_server.tensor_parallel",
    "lora.start_from",  # lora.start_hash stands for its content
    "task.module",  # task.module_hash stands for its content
    *PREREGISTRATION,
    "experiment", "differs_in", "scale", "model.name",  # labels, which set nothing
)  # fmt: skip
# Of arms with rollout.vllm_server.overlap after all: the step after a checkpoint is not sampled ahead.
OF_OVERLAP = ("checkpoint.every",)

# Keys added after runs were recorded, with the value that older runs used. A record without the key has that value,
# so a new key neither invalidates older runs nor splits them into other arms.
ADDED: Mapping[str, Any] = {
    "task.gsm8k.max_steps": None,
    "task.format_reward_for": "any",
    "rollout.vllm.max_num_batched_tokens": None,
    "rollout.vllm.dense_rows": None,
    "rollout.vllm.dense_dtype": "auto",
    "rollout.vllm.share_base": False,
    "format.activations": "auto",
    "rollout.vllm_server.overlap": False,
    "rollout.vllm_server.tensor_parallel": 1,
}
ADDED_BESIDE_ARMS = ("eval.samples_before",)  # likewise, keys that define no arm; older runs had the schema's default
# Keys deleted after runs were recorded. They are ignored in records; none of the runs that are kept used them.
REMOVED = (
    "task.code_io.min_level", "task.code_io.max_level", "task.code_io.tests", "rollout.vllm.sleep",
    "rollout.vllm.fp4_linear", "rerun",
)  # fmt: skip

# Key, or prefix of keys -> the engines that use it. A run with another engine ignores these keys.
ENGINE_KEYS = {
    "rollout.vllm.": ("vllm", "vllm_server"),
    "rollout.vllm_server.": ("vllm_server",),
    # A server uses the other keys of rollout.vllm.*, but not these.
    **{f"rollout.vllm.{key}": ("vllm",) for key in ("lora", "share_base", "dense_rows", "dense_dtype")},
}


class Leaf(NamedTuple):
    """A key of a configuration: its dotted name, its dataclass field (see `option.option`) and its value."""

    name: str
    field: Field[Any]
    value: Any

    @property
    def section(self) -> str:
        """Return the dotted name of the section that the key is in: `aqn.solver` for aqn.solver.draws, "" for seed."""
        return self.name.rpartition(".")[0]


def leaves(node: Any, prefix: str = "") -> list[Leaf]:
    """List every key in `node`, a configuration or one of its sections.

    `prefix` is put before each name: pass `aqn.` for the section `cfg.aqn`.
    """
    found: list[Leaf] = []
    for field in fields(node):
        value, name = getattr(node, field.name), prefix + field.name
        found += leaves(value, name + ".") if is_dataclass(value) else [Leaf(name, field, value)]
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value in nested dictionaries. `prefix` is put before each key."""
    for key, value in values.items():
        yield from flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def values_of(cfg: Any) -> dict[str, Any]:
    """Map the dotted name of every key of a configuration to its value."""
    return {leaf.name: leaf.value for leaf in leaves(cfg)}


def as_recorded(cfg: Any) -> dict[str, str]:
    """Map the dotted name of every key of a configuration to its value as text, as run records have it."""
    return {name: str(value) for name, value in values_of(cfg).items()}


def is_of_arm(name: str) -> bool:
    """Tell whether a dotted key defines an arm in every run. `keys_of_arm` adds `OF_OVERLAP` for some runs.

    True for model.path and also for model.hash; `model_by_content` drops one of the two.
    """
    return name not in NOT_OF_ARM and not name.startswith("tracking.")


def keys_of_arm(values: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that define a run's arm. `values` maps the keys of the run to values, or to their text.

    With rollout.vllm_server.overlap they include `OF_OVERLAP`.
    """
    engine, overlap = values.get("rollout.engine"), values.get("rollout.vllm_server.overlap")
    also = OF_OVERLAP if engine == "vllm_server" and str(overlap) == "True" else ()
    return {name for name in values if is_of_arm(name) or name in also}


def settings_of_arm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that define a run's arm. `values` maps the keys of the run to values, or to their text."""
    used = drop_idle_options(values)
    keys = keys_of_arm(used)
    return model_by_content({name: value for name, value in used.items() if name in keys})


def drop_idle_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings (value by dotted key) without the options of rollout engines that the run does not use.

    Also drops format.activations unless it is fp8, because it then changes nothing. Options of formats that the run
    does not use stay, because the hashes of older runs include them.
    """
    idle = [prefix for prefix, engines in ENGINE_KEYS.items() if values.get("rollout.engine") not in engines]
    idle += [] if values.get("format.activations") == "fp8" else ["format.activations"]
    return {name: value for name, value in values.items() if not name.startswith(tuple(idle))}


def fill_added_keys(settings: Mapping[str, str]) -> dict[str, str]:
    """Complete the settings (text by dotted key) of an older record.

    Adds missing keys of `ADDED` and drops keys of `REMOVED`.
    """
    complete = {name: str(value) for name, value in ADDED.items()} | dict(settings)
    return {name: value for name, value in complete.items() if name not in REMOVED}


def model_by_content(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings (value by dotted key) without model.path if they have model.hash, else without model.hash.

    So copies of a model in two folders count as one model.
    """
    idle = "model.hash" if values.get("model.hash") in (None, "None") else "model.path"
    return {name: value for name, value in values.items() if name != idle}


def settings_of_run(cfg: RunConfig) -> dict[str, Any]:
    """Return the settings (value by dotted key) that all sessions of a run must share.

    These are the keys of its arm, seed and gpus.
    """
    values = values_of(cfg)
    keys = keys_of_arm(values) | {"seed", "gpus"}
    return model_by_content({name: value for name, value in values.items() if name in keys})


def config_hash(cfg: RunConfig) -> str:
    """Return the first 12 hex digits of the SHA-256 of a run's `settings_of_arm`, equal for all runs of an arm."""
    values = settings_of_arm(values_of(cfg))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
