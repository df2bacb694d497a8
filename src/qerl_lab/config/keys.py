"""Check keys, types of values and conditions such as `aqn.schedule!=off` against the schema; build the errors."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import Any, get_args, get_origin

from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.option import ConfigError, check_bounds, did_you_mean
from qerl_lab.config.schema import RunConfig

FIELDS: Mapping[str, Field[Any]] = {leaf.name: leaf.field for leaf in leaves(RunConfig())}  # by dotted key
TYPES: Mapping[str, Any] = {name: field.type for name, field in FIELDS.items()}
# How an error names each type, and an example value for a key whose default is null or empty.
TYPE_WORDS: dict[Any, tuple[str, Any]] = {
    str: ("text", "NAME"),
    int: ("a whole number", 1),
    float: ("a number", 1.0),
    bool: ("true or false", True),
    list[str]: ("a list of names", ["q_proj", "v_proj"]),
    list[int]: ("a list of whole numbers", [1, 2]),
    list[float]: ("a list of numbers", [0.1, 0.2]),
}
# The last parts of a name in TRL, PEFT, transformers, verl or vLLM -> what the lab calls it: a key, a group, or a whole
# override (`key=value`).
FOREIGN_NAMES: Mapping[str, str] = {
    # TRL, transformers, PEFT
    "max_steps": "steps", "num_train_epochs": "steps", "num_generations": "rollout.group_size",
    "per_device_train_batch_size": "optim.micro_batch_size", "gradient_accumulation_steps": "optim.micro_batch_size",
    "generation_batch_size": "rollout.prompts_per_step", "scale_rewards": "algorithm.normalize_std",
    "max_completion_length": "rollout.max_completion_tokens", "max_prompt_length": "rollout.max_prompt_tokens",
    "epsilon": "algorithm.epsilon_low", "loss_type": "algorithm", "lr_scheduler_type": "optim.schedule",
    "r": "lora.rank", "lora_r": "lora.rank", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "model_name_or_path": "model.path", "attn_implementation": "model.attention", "load_in_4bit": "format=nf4",
    "bf16": "model.dtype", "fp16": "model.dtype", "torch_dtype": "model.dtype", "dataset_name": "task",
    "output_dir": "run_dir", "report_to": "tracking", "use_vllm": "rollout=vllm", "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "eval_steps": "eval.every", "resume_from_checkpoint": "resume",
    "vllm_gpu_memory_utilization": "rollout.vllm.kv_cache_gib",
    # verl, vLLM
    "n": "rollout.group_size", "train_batch_size": "rollout.prompts_per_step", "total_training_steps": "steps",
    "total_epochs": "steps", "max_response_length": "rollout.max_completion_tokens",
    "max_tokens": "rollout.max_completion_tokens", "max_new_tokens": "rollout.max_completion_tokens",
    "gpu_memory_utilization": "rollout.vllm.kv_cache_gib", "rollout.name": "rollout", "adv_estimator": "algorithm",
    "clip_ratio_low": "algorithm.epsilon_low", "clip_ratio_high": "algorithm.epsilon_high",
    "kl_coef": "algorithm.beta", "kl_loss_coef": "algorithm.beta", "use_kl_loss": "algorithm.beta",
    "entropy_coeff": "algorithm.entropy_coef", "ppo_epochs": "algorithm.num_iterations",
    "ppo_mini_batch_size": "algorithm.updates_per_rollout", "ppo_micro_batch_size_per_gpu": "optim.micro_batch_size",
    "grad_clip": "optim.max_grad_norm", "lora_rank": "lora.rank", "n_gpus_per_node": "gpus", "train_files": "task.path",
    "save_freq": "checkpoint.every", "test_freq": "eval.every", "project_name": "tracking.experiment",
    "logger": "tracking",
    # as people say it
    "epochs": "steps", "lr": "optim.learning_rate", "vllm": "rollout=vllm", "wandb": "tracking=wandb",
    "dataset": "task", "quantization": "format",
}  # fmt: skip
SET_BY_LAB = ("differs_in", "extended")  # the command refuses them
# Keys that no error proposes: the lab sets them, or the option of a group sets them with others.
NOT_PROPOSED = {
    *SET_BY_LAB, "preregistration_sha256", "model.hash", "lora.start_hash", "task.module_hash", "task.name",
    "algorithm.name",
}  # fmt: skip
TEXT = (str, str | None)
NUMBERS = (int, float, int | None, float | None)


def field_of_key(name: str) -> Field[Any]:
    """Return the dataclass field of a key (see `option`). Raises ConfigError if there is no such key."""
    if name not in FIELDS:
        raise unknown_key_error(name)
    return FIELDS[name]


def unknown_key_error(name: str) -> ConfigError:
    """Return the error for a dotted name that is no key. The message says what to type, or lists the allowed keys.

    Lists the keys of the section that `name` is in or, if no such section exists, the top-level names. Leaves out keys
    in `NOT_PROPOSED`.
    """
    known = [key for key in TYPES if key not in NOT_PROPOSED]
    if inside := [key for key in known if key.startswith(name + ".")]:
        return ConfigError(f"{name} is a node, not a key. Allowed: {', '.join(inside)}.")
    node, _, last = name.rpartition(".")
    beside = [key for key in known if key.startswith(node + ".")]  # empty for a name without a dot
    same_last = [key for key in known if key.rpartition(".")[2] == last]
    meant = [key for key in same_last if key in beside]
    if not meant and (theirs := translate_foreign_name(name)):
        return ConfigError(f"{name} is not a known key. Type {what_to_type(theirs)}.")
    allowed = beside or [*dict.fromkeys(key.split(".")[0] for key in known), "sweeps"]
    meant = meant or [key for key in allowed if key.startswith(name)] or same_last
    hint = f" Did you mean {' or '.join(meant)}?" if meant else did_you_mean(name, [*allowed, *known])
    return unknown_name_error(name, allowed, hint)


def translate_foreign_name(name: str) -> str | None:
    """Translate a name from TRL, verl, vLLM and others to our key, group or override; None if unknown.

    Compares the ends of the dotted name, longest first: `actor.optim.lr` is `optim.learning_rate`.
    """
    meant, parts = {**{key: key for key in TYPES}, **FOREIGN_NAMES}, name.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    return next((meant[end] for end in ends if end in meant), None)


def what_to_type(target: str) -> str:
    """Return what to type for `target`: `steps=VALUE` for a key, `task=OPTION (gsm8k, ...)` for a group.

    An override (`format=nf4`) is returned unchanged.
    """
    if "=" in target:
        return target
    if target in TYPES:
        return f"{target}=VALUE"
    path = f", or {target}.path=PATH" if f"{target}.path" in TYPES else ""
    return f"{target}=OPTION ({', '.join(choices_of(target))}){path}"


def unknown_name_error(name: str, allowed: Sequence[str], hint: str) -> ConfigError:
    """Return the error for a name that is not in `allowed`; `hint` is ` Did you mean x?` or an empty text.

    The message lists `allowed` with the names that are most like `name` first.
    """
    nearest = sorted(allowed, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())
    return ConfigError(f"{name} is not a known key.{hint} Allowed: {', '.join(nearest) or 'none'}.")


def check_type(name: str, field: Field[Any], value: Any) -> None:
    """Raise ConfigError unless `value` has the type of the key `name`. An int is accepted for a float.

    `field` is the dataclass field of the key (see `option`). The message suggests the default, or an example of the
    type if the default is empty or a long text. For a bool it suggests both values, because a user may type `no` for
    either default. For 1e3 in place of a whole number it suggests 1000. If 1000 is out of bounds, the message says so
    instead.
    """
    kind: Any = field.type
    if has_type(value, kind):
        return
    default = field.metadata["default"]
    plain = _strip_optional(kind)
    has_example = default not in (None, "", []) and (kind is not str or len(default) <= 40)
    example = default if has_example else TYPE_WORDS[plain][1]
    if plain is int and isinstance(value, float) and value.is_integer():
        example = int(value)
        check_bounds(name, field.metadata, example)
    choices = field.metadata["choices"]
    allowed = ", ".join(choices) if plain is str and choices else describe_type(kind)
    remedy = f"{name}=true, or {name}=false" if plain is bool else f"for example {name}={spell_value(example)}"
    raise ConfigError(f"{name}={spell_value(value)} is not allowed; allowed: {allowed}. Type {remedy}.")


def has_type(value: Any, kind: Any) -> bool:
    """Tell whether a value has the type `kind`, which may be a list or optional. An int is accepted for a float."""
    if value is None:
        return type(None) in get_args(kind)
    kind = _strip_optional(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(has_type(item, get_args(kind)[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


def describe_type(kind: Any) -> str:
    """Describe a key's type in words, such as `a whole number or null`."""
    return TYPE_WORDS[_strip_optional(kind)][0] + (" or null" if type(None) in get_args(kind) else "")


def _strip_optional(kind: Any) -> Any:
    """Return X for the type `X | None`, and any other type unchanged."""
    return get_args(kind)[0] if type(None) in get_args(kind) else kind


def spell_value(value: Any) -> str:
    """Format a Python value as it is typed in an override (`key=value`): null, true, [a,b]."""
    if isinstance(value, list):
        return f"[{','.join(spell_value(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "''"


def parse_condition(text: str) -> tuple[str, list[str], bool]:
    """Parse `KEY=A|B` (the key has one of these values) or `KEY!=A|B` (it has none of these).

    Returns key, values as text, and whether they are excluded.
    """
    key, _, listed = text.partition("=")
    return key.removesuffix("!"), listed.split("|"), key.endswith("!")


def settings_of(condition: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Map each key in a condition (see `is_met`) to its value in `values`, spelled as in an override."""
    keys = [parse_condition(part)[0] for part in re.split(" and | or ", condition)]
    return {key: spell_value(values[key]) for key in keys}


def is_met(condition: str, values: Mapping[str, Any]) -> bool:
    """Tell whether a condition holds: a single one (see `parse_condition`), `A and B`, or `A or B`.

    `values` maps every dotted key to its value.
    """
    for word, joined in ((" and ", all), (" or ", any)):
        if word in condition:
            return joined(is_met(part, values) for part in condition.split(word))
    key, listed, is_excluded = parse_condition(condition)
    value = values[key]
    text = f"{value:g}" if isinstance(value, float) else spell_value(value)
    return (text in listed) != is_excluded
