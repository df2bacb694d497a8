"""What makes an arm: the keys in which two runs must agree to count as runs of one."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from qerl_lab.config.schema import RunConfig

OF_SWEEPS = ("rerun", "jobs", "jobs_per_gpu", "launcher", "slurm")  # how a sweep runs its jobs; no part of any job
REGISTERED = ("preregistration", "preregistration_sha256")  # what is asked of a run does not change it
NOT_OF_ARM = (
    "seed",
    "run_dir", "resume", "dry_run", *OF_SWEEPS,  # how it is run; and all of tracking
    "checkpoint.every", "checkpoint.keep",
    "device", "gpus", "cpu_threads",  # reports read from the record where a run ran
    "rollout.vllm_server.url", "rollout.vllm_server.adapter_dir", "rollout.vllm_server.patience_seconds",
    "lora.start_from",  # its content counts, as lora.start_hash
    "task.module",  # its content counts, as task.module_hash
    *REGISTERED,
    "experiment", "differs_in", "scale", "model.name",  # labels: an arm is what its other keys say
)  # fmt: skip

# Keys that came after runs were recorded, with what every run did until then. A record that lacks one means that: so a
# new key neither ends the use of older runs nor makes arms of them.
ADDED: Mapping[str, Any] = {
    "task.gsm8k.max_steps": None,
    "task.format_reward_for": "any",
    "rollout.vllm.dense_rows": None,
    "rollout.vllm.share_base": False,
    "rollout.vllm.sleep": False,
}


OF_VLLM_HERE = (  # in the trainer's process: a server has no use for them
    "rollout.vllm.lora", "rollout.vllm.sleep", "rollout.vllm.share_base", "rollout.vllm.dense_rows",
)  # fmt: skip
# Keys of an engine, by what they begin with, say nothing of a run that samples by another.
ENGINE_KEYS = {
    "rollout.vllm.": ("vllm", "vllm_server"),
    "rollout.vllm_server.": ("vllm_server",),
    **dict.fromkeys(OF_VLLM_HERE, ("vllm",)),
}


def leaves(node: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every (dotted name, dataclass field, value) of a configuration, depth first in schema order."""
    found: list[tuple[str, Any, Any]] = []
    for f in fields(node):
        value, name = getattr(node, f.name), prefix + f.name
        found += leaves(value, name + ".") if is_dataclass(value) else [(name, f, value)]
    return found


def values_of(cfg: Any) -> dict[str, Any]:
    """Every value of a configuration, by dotted name."""
    return {name: value for name, _, value in leaves(cfg)}


def as_recorded(cfg: Any) -> dict[str, str]:
    """The same as text, as `RunDirectory.settings` has those of a run."""
    return {name: str(value) for name, value in values_of(cfg).items()}


def is_of_arm(name: str) -> bool:
    """Whether two runs that differ in this dotted key are runs of two arms. Every key is, but for `NOT_OF_ARM`.

    Of model.path and model.hash `by_content` says which counts.
    """
    return name not in NOT_OF_ARM and not name.startswith("tracking.")


def of_arm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's values, by dotted name, that make its arm. They may be text, as records have them."""
    return by_content({name: value for name, value in acting(values).items() if is_of_arm(name)})


def acting(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those of engines that do not run."""
    idle = [prefix for prefix, engines in ENGINE_KEYS.items() if values.get("rollout.engine") not in engines]
    return {name: value for name, value in values.items() if not name.startswith(tuple(idle))}


def completed(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of a record, as text, with those of `ADDED` that it lacks."""
    return {name: str(value) for name, value in ADDED.items()} | dict(settings)


def by_content(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without model.path where model.hash says what was there, and else without model.hash."""
    idle = "model.hash" if values.get("model.hash") in (None, "None") else "model.path"
    return {name: value for name, value in values.items() if name != idle}


def of_run(cfg: RunConfig) -> dict[str, Any]:
    """The values that two sessions of one run must share, by dotted name: those of its arm, seed and gpus."""
    shared = {name: value for name, value in values_of(cfg).items() if name in ("seed", "gpus") or is_of_arm(name)}
    return by_content(shared)


def config_hash(cfg: RunConfig) -> str:
    """12 hex digits that agree for two runs of one arm on one kind of device."""
    values = of_arm(values_of(cfg))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
