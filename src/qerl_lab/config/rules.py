"""Build and check a RunConfig from plain values, with every rule that spans several keys. Imports no torch.

A check yields the message of each rule that a configuration breaks. Rules of engines are in `engine_rules`.
"""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from qerl_lab.config import engine_rules
from qerl_lab.config.arm import REMOVED, leaves, values_of
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.keys import check_type, unknown_key_error
from qerl_lab.config.option import ConfigError, check_bounds, did_you_mean
from qerl_lab.config.redact import url_without_secrets
from qerl_lab.config.schema import RunConfig


def from_dict(values: dict[str, Any]) -> RunConfig:
    """Build and check a RunConfig from nested plain values, such as a run's resolved.yaml. Raises ConfigError."""
    cfg = build_config(values)
    validate(cfg)
    return cfg


def build_config(values: dict[str, Any]) -> RunConfig:
    """Build a RunConfig from nested plain values; check names and types, but no bounds. Raises ConfigError.

    Drops deleted keys, which older runs recorded. Raises ConfigError for an unknown key and a value of another type.
    """
    return _build_section(RunConfig, values, "")


def _build_section(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise unknown_key_error(prefix.rstrip("."))
    types, arguments = get_type_hints(kind), {}
    for key, value in values.items():
        if f"{prefix}{key}" in REMOVED:
            continue
        if key not in types:
            raise unknown_key_error(f"{prefix}{key}")
        if is_dataclass(types[key]):
            value = _build_section(types[key], value, f"{prefix}{key}.")
        else:
            check_type(f"{prefix}{key}", types[key], value)
        arguments[key] = value
    return kind(**arguments)


def validate(cfg: RunConfig) -> None:
    """Raise ConfigError for the first value out of bounds, or combination of values that cannot run."""
    for name, f, value in leaves(cfg):
        check_bounds(name, f.metadata, value)
    for check in (
        _check_secrets,
        _check_names,
        _check_order,
        _check_batch,
        _check_algorithm,
        _check_aqn,
        _check_learning,
        _check_device,
        engine_rules.check,
    ):
        for message in check(cfg):
            raise ConfigError(message)


def _check_secrets(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each address in the configuration, which is recorded, that holds a secret."""
    store = "MLFLOW_TRACKING_URI=URL, or MLFLOW_TRACKING_USERNAME=NAME MLFLOW_TRACKING_PASSWORD=PASSWORD,"
    for key, url, remedy in (
        ("tracking.uri", cfg.tracking.uri, store),
        ("model.path", cfg.model.path, "HF_TOKEN=TOKEN"),
        ("task.path", cfg.task.path, "HF_TOKEN=TOKEN"),
        ("rollout.vllm_server.url", cfg.rollout.vllm_server.url, "VLLM_API_KEY=KEY"),
    ):
        if url and (shown := url_without_secrets(url)) != url:
            yield (
                f"{key}={shown} has a user, a password or a token in it, which every record of the run would keep; "
                f"allowed: an address without. Type {remedy} in front of the command."
            )


def _check_names(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each name or path that is empty or unknown."""
    if cfg.tracking.mlflow and cfg.tracking.uri:
        check_store("tracking.uri", cfg.tracking.uri)
    for name, value, allowed, example in (
        ("model.path", cfg.model.path, "hub id, directory, pocket", "model=pocket"),
        ("model.name", cfg.model.name, "a name", "model.name=mine"),
        ("tracking.experiment", cfg.tracking.experiment, "a name", "tracking.experiment=qerl-lab"),
    ):
        if not value.strip():
            yield f"{name}= is empty; allowed: {allowed}. Type for example {example}."
    for group, name in (("format", cfg.format.name), ("task", cfg.task.name)):
        if name not in (options := choices_of(group)):
            yield (
                f"{group}.name={name} is not allowed; allowed: {', '.join(options)}.{did_you_mean(name, options)} "
                f"Type for example {group}={options[0]}."
            )


def _check_order(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each pair of keys, such as a minimum and a maximum, that is in the wrong order."""
    pairs = [("task.arithmetic.min_steps", "task.arithmetic.max_steps")]
    if cfg.algorithm.entropy_target is not None:
        pairs.append(("algorithm.entropy_coef", "algorithm.entropy_coef_max"))
    if cfg.aqn.schedule not in ("off", "adaptive"):
        pairs.append((f"aqn.{cfg.aqn.unit}_end", f"aqn.{cfg.aqn.unit}_start"))
    if cfg.aqn.schedule != "off" and cfg.aqn.unit == "kl":  # the search for sigma begins at sigma_start
        pairs += [("aqn.sigma_min", "aqn.sigma_start"), ("aqn.sigma_start", "aqn.sigma_max")]
    values = values_of(cfg)
    for lower, upper in pairs:
        if values[lower] > values[upper]:
            yield (
                f"{lower}={values[lower]} is above {upper}={values[upper]}. Type for example {lower}={values[upper]}."
            )


def check_store(key: str, uri: str) -> None:
    """Raise ConfigError for an address that is no MLflow store, such as a folder."""
    if "://" not in uri and uri != "databricks":
        raise ConfigError(
            f"{key}={uri} is no address of an MLflow store; allowed: sqlite:///FILE.db, https://HOST, and databricks. "
            f"Type for example {key}=sqlite:///{uri}.db."
        )


def _check_batch(cfg: RunConfig) -> Iterator[str]:
    """Yield a message if a step's completions cannot be split over GPUs, updates and micro-batches."""
    prompts, gpus = cfg.rollout.prompts_per_step, cfg.gpus
    if prompts % gpus:
        yield (
            f"rollout.prompts_per_step={prompts} cannot be split over gpus={gpus}, each of which samples whole groups; "
            f"allowed: a multiple of {gpus}. Type for example gpus={largest_divisor(prompts, gpus)}, or "
            f"rollout.prompts_per_step={-(-prompts // gpus) * gpus}."
        )
    batch, updates, micro = cfg.completions_per_gpu, cfg.algorithm.updates_per_rollout, cfg.optim.micro_batch_size
    if batch % (updates * micro):
        over = f" / {gpus}" if gpus > 1 else ""
        kept = updates if batch % updates == 0 else 1
        remedy = f"optim.micro_batch_size={largest_divisor(batch // kept, micro)}"
        yield (
            f"rollout.prompts_per_step x rollout.group_size{over and ' / gpus'} = "
            f"{prompts} x {cfg.rollout.group_size}{over} = "
            f"{batch} completions cannot be split into algorithm.updates_per_rollout={updates} updates of "
            f"optim.micro_batch_size={micro}; {batch} must be a multiple of {updates * micro}. "
            f"Type for example {remedy}{'' if kept == updates else f' algorithm.updates_per_rollout={kept}'}."
        )


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is at most `at_most`; both are at least 1."""
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


def _check_algorithm(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each setting of the algorithm that has no effect or cannot work."""
    algorithm, longest = cfg.algorithm, cfg.rollout.max_completion_tokens
    if cfg.overlong_buffer > longest:
        yield (
            f"algorithm.overlong_buffer_tokens={cfg.overlong_buffer} is more than "
            f"rollout.max_completion_tokens={longest}, so that every completion would be punished; allowed: 0 (none) "
            f"to {longest}. Type for example algorithm.overlong_buffer_tokens={max(1, longest // 5)}."
        )
    if algorithm.name == "cispo" and algorithm.epsilon_low < 1:
        yield (
            f"algorithm.epsilon_low={algorithm.epsilon_low} does nothing in a run with algorithm.name=cispo, which "
            "bounds the weight of a token from above alone; allowed: 1 (no lower bound). "
            "Leave algorithm.epsilon_low out of algorithm=cispo, or type algorithm.epsilon_low=1."
        )
    # The KL of a token times the ratio of its completion estimates no KL.
    if algorithm.name == "gspo" and algorithm.beta > 0 and algorithm.kl_estimator != "k3":
        yield (
            f"algorithm.kl_estimator={algorithm.kl_estimator} multiplies the KL of a token by its ratio, and with "
            "algorithm.name=gspo there is one of the whole completion only; allowed: k3. "
            "Type algorithm.kl_estimator=k3, or algorithm.beta=0."
        )


def _check_aqn(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each setting with which the quantization noise (AQN) could not be added."""
    aqn, unit = cfg.aqn, cfg.aqn.unit
    if not aqn.norms:
        yield (
            "aqn.norms=[] names no layer for the noise; allowed: one norm or more. "
            "Leave aqn.norms out (aqn=off is no noise), or type for example aqn.norms=[input_layernorm]."
        )
    if aqn.schedule == "off":
        return
    start, end, example = ("kl_start", "kl_end", "3e-3") if unit == "kl" else ("sigma_start", "sigma_end", "0.01")
    first, last = getattr(aqn, start), getattr(aqn, end)
    if first == 0:
        yield (
            f"aqn.schedule={aqn.schedule} with aqn.{start}=0 adds no noise; allowed: above 0. "
            f"Type aqn=off, or for example aqn.{start}={example}."
        )
    if aqn.schedule == "adaptive":
        if unit != "kl":
            yield f"aqn.schedule=adaptive with aqn.unit={unit} has nothing to adapt to; allowed: kl. Type aqn=adaptive."
        if aqn.probe_prompts == 0:
            yield (
                "aqn.probe_prompts=0 with aqn.schedule=adaptive measures no KL to adapt to; allowed: 1 or more. "
                "Leave aqn.probe_prompts out, or type for example aqn.probe_prompts=4."
            )
        return
    if aqn.schedule == "exponential" and last == 0:
        yield (
            f"aqn.schedule=exponential never reaches aqn.{end}=0 (Eq. 8 takes the ratio {end} / {start}); "
            f"allowed: above 0. Type for example aqn.{end}={'1e-4' if unit == 'kl' else '5e-4'} or aqn=linear."
        )
    if aqn.stages == 1 and aqn.reading != "equation":
        yield (
            f"aqn.stages=1 with aqn.reading={aqn.reading} never adds noise, because that reading keeps stage 1 clean. "
            "Type for example aqn.stages=2 or aqn.reading=equation."
        )


def _check_learning(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each value of task, LoRA or evaluation with which nothing could be learned or measured."""
    task = cfg.task
    further = task.module is not None or (task.name == "code_io" and task.code_io.tests_reward > 0)
    if task.format_reward == task.answer_reward == 0 and not further:
        yield (
            "task.format_reward=0 and task.answer_reward=0 reward nothing, so that nothing can be learned; "
            "allowed: one of them above 0. Type for example task.answer_reward=1."
        )
    if not cfg.lora.target_modules or "lm_head" in cfg.lora.target_modules:
        yield (
            f"lora.target_modules={cfg.lora.target_modules} is not allowed; allowed: a non-empty list without lm_head "
            "(the loss reads lm_head.weight itself, so an adapter there would never train). "
            "Type for example lora.target_modules=[q_proj,v_proj]."
        )
    check_patterns("format.ignore", cfg.format.ignore)
    if cfg.eval.questions == 1:
        yield (
            "eval.questions=1 is not allowed, because the interval of the accuracy's gain needs two questions; "
            "allowed: 0 (no evaluation), or 2 and more. Type for example eval.questions=256."
        )


def check_patterns(name: str, entries: list[str]) -> None:
    """Raise ConfigError for an entry `re:PATTERN` of a list of layers whose pattern is no regular expression."""
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(
                f"{name}={entries}: {entry!r} is no regular expression ({error}); allowed: a layer's full name, its "
                f"last parts, a module that it is in, or re:PATTERN. Type for example \"{name}=['re:.*[.]0[.].*']\"."
            ) from None


def _check_device(cfg: RunConfig) -> Iterator[str]:
    """Yield a message for each setting that cannot work on the chosen device."""
    model = cfg.model
    if cfg.optim.name == "adamw_8bit" and cfg.device == "cpu":
        yield "optim.name=adamw_8bit needs a GPU, and device=cpu was given. Type optim=adamw, or device=cuda."
    if cfg.format.dense_cache == "on" and cfg.device == "cuda":
        yield (
            "format.dense_cache=on with device=cuda would hold the dense weights that the format is there to save; "
            "allowed on a GPU: auto, off. Type format.dense_cache=off, or format=bf16."
        )
    if model.attention == "flash_attention_2" and (cfg.device == "cpu" or model.dtype == "float32"):
        given = "device=cpu" if cfg.device == "cpu" else "model.dtype=float32"
        yield (
            f"model.attention=flash_attention_2 computes in bfloat16 on a GPU, and {given} was given. "
            f"Type model.attention=sdpa, or leave {given} out."
        )
    if model.attention != "sdpa" and cfg.optim.packing == "on":
        yield (
            f"optim.packing=on trains by an attention of its own, and model.attention={model.attention} was given; "
            "allowed with it: sdpa. Type model.attention=sdpa, or optim.packing=off."
        )
