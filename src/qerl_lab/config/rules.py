"""Build and check a RunConfig from plain values, with every rule that spans several keys. Imports no torch.

Each function `_check_*` raises ConfigError for the first rule that a configuration breaks. `NEEDS` is the table of
values that exclude each other.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from qerl_lab.config.arm import REMOVED, leaves, values_of
from qerl_lab.config.conf_folder import choices_of, default_option_by_group
from qerl_lab.config.keys import check_type, is_met, parse_condition, settings_of, spell_value, unknown_key_error
from qerl_lab.config.option import ConfigError, check_bounds, did_you_mean
from qerl_lab.config.redact import url_without_secrets
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig, VllmServerConfig
from qerl_lab.config.spelling import shell_override

TILES_RANKS, TILES_MAX_RANK = 8, 128  # the kernel fp4_tiles takes ranks 8, 16 ... 128


class Needs(NamedTuple):
    """A value of one key that works only with certain values of another key.

    `given` and `allowed` are conditions for `keys.is_met`: if `given` holds, `allowed` must hold.
    """

    given: str
    allowed: str
    why: str
    remedy: str


TILES, SHARED = "rollout.vllm.linear_backend=fp4_tiles", "rollout.vllm.share_base=true"
OVERLAP, LOCKSTEP = "rollout.vllm_server.overlap=true", "rollout.vllm_server.overlap=false"
NO_KERNEL = "rollout.vllm.linear_backend=auto"
VLLM_FORMATS = "bf16|fp8|mxfp4|nf4|nvfp4"  # vLLM reads their checkpoints and has kernels for them
NEEDS = (
    Needs("optim.name=adamw_8bit", "device!=cpu", "it computes on a GPU", "optim=adamw, or device=cuda"),
    Needs("optim.packing=on", "model.attention=sdpa", "it trains by an attention of its own",
          "model.attention=sdpa, or optim.packing=off"),
    Needs("algorithm.name=cispo", "algorithm.epsilon_low=1",
          "it bounds the weight of a token from above alone", "algorithm.epsilon_low=1, or leave that key out"),
    Needs("aqn.schedule=adaptive", "aqn.unit=kl", "it adapts the noise to a KL", "aqn.unit=kl"),
    Needs("aqn.schedule=adaptive", "aqn.probe_prompts!=0", "they measure the KL that it adapts to",
          "aqn.probe_prompts=4, or leave that key out"),
    Needs("format.activations=fp8", "format.name=fp8", "no other format quantizes activations",
          "format=fp8, or leave format.activations out"),
    Needs("format.activations=fp8", "rollout.engine=vllm", "only vLLM in this process quantizes activations",
          "rollout=vllm, or format.activations=auto"),
    Needs("format.activations=fp8", "rollout.vllm.linear_backend=auto|vllm", "the others compute in 16 bits",
          f"{NO_KERNEL}, or format.activations=auto"),
    Needs("jobs_per_gpu!=1", "gpus=1", "a job of several GPUs shares none of them",
          "gpus=1, or leave jobs_per_gpu out"),
    Needs(f"format.name!={VLLM_FORMATS}", "rollout.engine!=vllm|vllm_server", "vLLM has no kernel for it",
          "rollout=transformers, or format=nvfp4"),
    Needs("rollout.vllm.linear_backend=marlin|humming", "format.name=nvfp4|mxfp4|fp8",
          "it has no kernel for other formats", NO_KERNEL),
    Needs(TILES, "rollout.engine!=vllm_server", "it is a kernel of the lab's, which no server has",
          f"rollout=vllm, or {NO_KERNEL}"),
    Needs(TILES, "model.dtype!=float32", "it computes in bfloat16 alone", f"model.dtype=bfloat16, or {NO_KERNEL}"),
    Needs(TILES, "format.name=nvfp4", "it has no kernel for other formats", f"{NO_KERNEL}, or format=nvfp4"),
    Needs(TILES, f"lora.rank={'|'.join(map(str, range(TILES_RANKS, TILES_MAX_RANK + 1, TILES_RANKS)))}",
          "it has no product for other ranks", NO_KERNEL),
    Needs(TILES, "rollout.vllm.lora=dense", "it computes the adapter too", f"{NO_KERNEL}, or rollout.vllm.lora=dense"),
    Needs("rollout.vllm.dense_rows!=null", "format.name=nvfp4", "the layers of the dense adapter implement it",
          "rollout.vllm.dense_rows=null, or format=nvfp4"),
    Needs("rollout.vllm.dense_rows!=null", "rollout.vllm.lora=dense", "the layers of the dense adapter implement it",
          "rollout.vllm.dense_rows=null, or rollout.vllm.lora=dense"),
    Needs("rollout.vllm.dense_dtype=fp8", "rollout.vllm.dense_rows!=null", "it is the dtype of the copy for dense_rows",
          "rollout.vllm.dense_rows=192, or leave rollout.vllm.dense_dtype out"),
    Needs("rollout.vllm.dense_dtype=fp8", "model.dtype!=float32", "the FP8 product gives 16 bits",
          "model.dtype=bfloat16, or leave rollout.vllm.dense_dtype out"),
    Needs(SHARED, "format.name=nvfp4", "the trainer reads NVFP4's layouts alone",
          "rollout.vllm.share_base=false, or format=nvfp4"),
    Needs(SHARED, "rollout.vllm.linear_backend!=humming", "the trainer cannot read its layout",
          f"rollout.vllm.share_base=false, or {NO_KERNEL}"),
    *(Needs("lora.rank=0", allowed, why, f"{remedy}, or lora=rank32") for allowed, why, remedy in (
        ("format.name=bf16", "it trains the weights themselves, and packed ones cannot move", "format=bf16"),
        ("algorithm.beta=0", "the reference is the policy with its adapter off, and there is none",
         "algorithm.beta=0"),
        ("rollout.engine!=vllm_server", "a server takes an adapter only", "rollout=vllm"),
        ("gpus=1", "weights, gradients and moments of a model are not split over GPUs", "gpus=1"),
        ("lora.start_from=null", "it has no adapter", "model.path=RUN_DIR/model to begin with a trained model"),
    )),
    Needs("rollout.engine=vllm_server", "gpus=1", "a server has one trainer",
          "gpus=1 and rollout.vllm_server.tensor_parallel=2 for a server on two GPUs, or type rollout=vllm"),
    Needs(OVERLAP, "rollout.importance_correction!=off", "its completions come from an older adapter",
          f"rollout.importance_correction=token_truncate, or {LOCKSTEP}"),
    Needs(OVERLAP, "aqn.schedule!=adaptive", "sigma of a step follows from the KL measured in the step before",
          f"{LOCKSTEP}, or aqn=kl"),
    *(needs for unit, start, end in (("sigma", "0.01", "5e-4"), ("kl", "3e-3", "1e-4")) for needs in (
        Needs(f"aqn.schedule!=off and aqn.unit={unit}", f"aqn.{unit}_start!=0", "it adds no noise",
              f"for example aqn.{unit}_start={start}, or aqn=off"),
        Needs(f"aqn.schedule=exponential and aqn.unit={unit}", f"aqn.{unit}_end!=0",
              "Eq. 8 takes the ratio of end and start, so the noise never reaches 0",
              f"for example aqn.{unit}_end={end}, or aqn=linear"),
    )),
    Needs("aqn.stages=1 and aqn.schedule!=off|adaptive", "aqn.reading=equation",
          "it keeps stage 1 clean, and so never adds noise",
          "aqn.reading=equation, or aqn.stages=2 for two steps or more"),
    Needs("algorithm.name=gspo and algorithm.beta!=0", "algorithm.kl_estimator=k3",
          "k3_ratio multiplies the KL of a token by its ratio, and there is one of the whole completion only",
          "algorithm.kl_estimator=k3, or algorithm.beta=0"),
)  # fmt: skip
EXPERIMENT_WITH = {  # noise -> what to type for it in a run with +experiment
    "aqn=exponential": "+experiment=nvfp4_aqn",
    "aqn=kl": "+experiment=nvfp4_aqn_kl",
    "aqn=adaptive": "+experiment=nvfp4_aqn_adaptive",
}


def from_dict(values: dict[str, Any]) -> RunConfig:
    """Build and check a RunConfig from nested plain values, such as a run's resolved.yaml.

    Raises ConfigError for an unknown key, a value of a wrong type, or a configuration that cannot run.
    """
    cfg: RunConfig = build_config(values)
    validate(cfg)
    return cfg


def build_config(values: Any, kind: Any = RunConfig, prefix: str = "") -> Any:
    """Build a RunConfig from nested plain values. Drops keys in `REMOVED`. Rules across keys are left to `validate`.

    For a section of it, `kind` is the section's dataclass and `prefix` its dotted name, such as `aqn.`. Raises
    ConfigError for an unknown key, or a value of a wrong type or out of bounds.
    """
    if not isinstance(values, dict):
        raise unknown_key_error(prefix.rstrip("."))
    known, arguments = {field.name: field for field in fields(kind)}, {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in REMOVED:
            continue
        if key not in known:
            raise unknown_key_error(name)
        field = known[key]
        if is_dataclass(field.type):
            value = build_config(value, field.type, f"{name}.")
        else:
            check_type(name, field, value)
            check_bounds(name, field.metadata, value)
        arguments[key] = value
    return kind(**arguments)


def validate(cfg: RunConfig) -> None:
    """Raise ConfigError for the first value out of bounds, or the first combination of values that cannot run."""
    for name, field, value in leaves(cfg):
        check_bounds(name, field.metadata, value)
    for check in (_check_addresses, _check_names, _check_order, _check_batch, _check_needs, _check_learning,
                  _check_engine_options):  # fmt: skip
        check(cfg)


def check_engine(cfg: RunConfig) -> None:
    """Raise ConfigError if a setting of `cfg` excludes its rollout engine.

    Evaluations call this. They can replace only the engine of a run, so the error names only the first remedy of
    `NEEDS`, an engine.
    """
    rows = [needs for needs in NEEDS if needs.allowed.startswith("rollout.engine")]
    _check_needs(cfg, [needs._replace(remedy=needs.remedy.partition(",")[0]) for needs in rows])


def _check_needs(cfg: RunConfig, rows: Sequence[Needs] = NEEDS) -> None:
    """Raise ConfigError for the first of `rows` that the configuration breaks."""
    values = values_of(cfg)
    for needs in rows:
        if not is_met(needs.given, values) or is_met(needs.allowed, values):
            continue
        other, allowed, is_excluded = parse_condition(needs.allowed)
        given = " and ".join(f"{key}={value}" for key, value in settings_of(needs.given, values).items())
        but = "anything but " if is_excluded else ""
        raise ConfigError(
            f"{given} with {other}={spell_value(values[other])} is not allowed, "
            f"because {needs.why}; allowed with it: {but}{', '.join(allowed)}. "
            f"Type {remedy_in_arm(cfg, needs.remedy)}."
        )


def remedy_in_arm(cfg: RunConfig, remedy: str) -> str:
    """Rewrite `remedy`, overrides to type, if the run has +experiment, which fixes format and noise.

    `format=X` becomes `+experiment=X`. `aqn=X` becomes the experiment with this noise (`EXPERIMENT_WITH`) or, if no
    experiment has it, `aqn=X without +experiment`.
    """
    if cfg.experiment == RunConfig().experiment:
        return remedy
    for noise, experiment in EXPERIMENT_WITH.items():
        remedy = remedy.replace(noise, experiment)
    return re.sub(r"\baqn=\w+", r"\g<0> without +experiment", remedy.replace("format=", "+experiment="))


def _check_addresses(cfg: RunConfig) -> None:
    """Raise ConfigError if a URL or path contains a user, password or token."""
    # Do not write NAME=VALUE into the message: `redact` would hide VALUE.
    store = "MLFLOW_TRACKING_PASSWORD (a user into MLFLOW_TRACKING_USERNAME), or the address into MLFLOW_TRACKING_URI"
    for key, url, variable in (
        ("tracking.uri", cfg.tracking.uri, store),
        ("model.path", cfg.model.path, "HF_TOKEN"),
        ("task.path", cfg.task.path, "HF_TOKEN"),
        ("rollout.vllm_server.url", cfg.rollout.vllm_server.url, "VLLM_API_KEY"),
    ):
        if url and (shown := url_without_secrets(url)) != url:
            raise ConfigError(
                f"{key}={shown} has a user, a password or a token in it, which every record of the run would keep; "
                f"allowed: an address without. Type it into the environment variable {variable}."
            )


def _check_names(cfg: RunConfig) -> None:
    """Raise ConfigError for an empty name or path, for an unknown format or task, and if tracking.uri is no address."""
    if cfg.tracking.mlflow and cfg.tracking.uri:
        check_store("tracking.uri", cfg.tracking.uri)
    if cfg.tracking.mlflow and not cfg.tracking.experiment.strip():
        raise ConfigError("tracking.experiment= is empty; allowed: a name. Leave tracking.experiment out.")
    if not cfg.model.path.strip():
        raise ConfigError(
            "model.path= is empty; allowed: pocket, a directory, FILE.gguf, or a hub id. Type model=pocket."
        )
    for group, name in (("format", cfg.format.name), ("task", cfg.task.name)):
        if name not in (options := choices_of(group)):
            raise ConfigError(
                f"{group}.name={name} is not allowed; allowed: {', '.join(options)}.{did_you_mean(name, options)} "
                f"Type for example {group}={default_option_by_group()[group]}."
            )


def _check_order(cfg: RunConfig) -> None:
    """Raise ConfigError if a key exceeds the key that limits it, e.g. aqn.sigma_end exceeds aqn.sigma_start."""
    pairs = [
        ("task.arithmetic.min_steps", "task.arithmetic.max_steps"),
        ("algorithm.overlong_buffer_tokens", "rollout.max_completion_tokens"),
        ("rollout.batch_size", "rollout.vllm.max_num_batched_tokens"),  # a token of each completion at once
    ]
    if cfg.algorithm.entropy_target is not None:
        pairs.append(("algorithm.entropy_coef", "algorithm.entropy_coef_max"))
    if cfg.aqn.schedule not in ("off", "adaptive") and getattr(cfg.aqn, f"{cfg.aqn.unit}_start"):  # 0 adds no noise
        pairs.append((f"aqn.{cfg.aqn.unit}_end", f"aqn.{cfg.aqn.unit}_start"))
    if cfg.aqn.schedule != "off" and cfg.aqn.unit == "kl":  # the search for sigma begins at sigma_start
        pairs += [("aqn.sigma_min", "aqn.sigma_start"), ("aqn.sigma_start", "aqn.sigma_max")]
    values = values_of(cfg)
    for lower, upper in pairs:
        low, high = values[lower], values[upper]
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{lower}={low} is above {upper}={high}. Type for example {lower}={high}.")


def check_store(key: str, uri: str) -> None:
    """Raise ConfigError if `uri`, the value of `key`, is no address of an MLflow store, e.g. is a plain folder."""
    if "://" not in uri and uri != "databricks":
        is_host = re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri)
        meant = f"http://{uri}" if is_host else f"sqlite:///{uri.removesuffix('.db')}.db"
        raise ConfigError(
            f"{key}={uri} is no address of an MLflow store; allowed: sqlite:///FILE.db, https://HOST, and databricks. "
            f"Type for example {shell_override(key, meant)}."
        )


def _check_batch(cfg: RunConfig) -> None:
    """Raise ConfigError if prompts cannot be split over GPUs, or completions into updates and micro-batches."""
    prompts, gpus = cfg.rollout.prompts_per_step, cfg.gpus
    if prompts % gpus:
        raise ConfigError(
            f"rollout.prompts_per_step={prompts} cannot be split over gpus={gpus}, each of which samples whole groups; "
            f"allowed: a multiple of {gpus}. Type for example gpus={largest_divisor(prompts, gpus)}, or "
            f"rollout.prompts_per_step={-(-prompts // gpus) * gpus}."
        )
    batch, updates, micro = cfg.completions_per_gpu, cfg.algorithm.updates_per_rollout, cfg.optim.micro_batch_size
    of_gpus, over = (" / gpus", f" / {gpus}") if gpus > 1 else ("", "")
    problem = (
        f"rollout.prompts_per_step x rollout.group_size{of_gpus} = {prompts} x {cfg.rollout.group_size}{over} = "
        f"{batch} completions cannot be split into algorithm.updates_per_rollout={updates} updates"
    )
    if batch % updates:
        raise ConfigError(f"{problem}. Type for example algorithm.updates_per_rollout=1.")
    elif micro and batch % (updates * micro):  # for null a run chooses a divisor
        raise ConfigError(
            f"{problem} of optim.micro_batch_size={micro}; {batch} must be a multiple of {updates * micro}. "
            f"Type for example optim.micro_batch_size={largest_divisor(batch // updates, micro)}."
        )


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is at most `at_most`; both are at least 1."""
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


def _check_learning(cfg: RunConfig) -> None:
    """Raise ConfigError if a setting of noise, adapters or evaluation cannot work."""
    if not cfg.aqn.norms and cfg.aqn.schedule != "off":
        raise ConfigError(
            "aqn.norms=[] names no layer for the noise; allowed: one norm or more. "
            "Type aqn=off, or for example aqn.norms=[input_layernorm]."
        )
    if not cfg.lora.target_modules or "lm_head" in cfg.lora.target_modules:
        raise ConfigError(
            f"lora.target_modules={spell_value(cfg.lora.target_modules)} is not allowed; allowed: a non-empty list "
            "without lm_head (the loss reads lm_head.weight itself, so an adapter there would never train). "
            "Type for example lora.target_modules=[q_proj,v_proj]."
        )
    check_patterns("format.ignore", cfg.format.ignore)
    if cfg.eval.questions == 1:
        raise ConfigError(
            "eval.questions=1 is not allowed, because the interval of the accuracy's gain needs two questions; "
            "allowed: 0 (no evaluation), or 2 and more. Type for example eval.questions=256."
        )


def check_patterns(name: str, entries: list[str]) -> None:
    """Raise ConfigError if an `re:PATTERN` in `entries`, the value of the key `name`, is not a regular expression."""
    for entry in entries:
        if not entry.startswith("re:"):
            continue
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error as error:
            raise ConfigError(
                f"{name}={entries}: {entry!r} is no regular expression ({error}); allowed: a layer's full name, its "
                f"last parts, a module that it is in, or re:PATTERN. Type for example \"{name}=['re:.*[.]0[.].*']\"."
            ) from None


def _check_engine_options(cfg: RunConfig) -> None:
    """Raise ConfigError if an option of a rollout engine cannot work, where no row of `NEEDS` says so."""
    if cfg.device == "cpu":
        check_engine_on_cpu(cfg, "device=cpu was given")
    if cfg.rollout.engine == "vllm_server":
        _check_server(cfg.rollout.vllm_server)


def _check_server(server: VllmServerConfig) -> None:
    """Raise ConfigError if `server.url` is no address, or names another host while `server.adapter_dir` is null."""
    address = re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?/?", server.url)
    if address is None:
        raise ConfigError(
            f"rollout.vllm_server.url={server.url} is no address of a server; allowed: http://HOST:PORT. "
            f"Type for example rollout.vllm_server.url={VllmServerConfig().url}."
        )
    is_here = address[1] in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", address[1]) is not None
    if not is_here and server.adapter_dir is None:  # the server reads the adapter from a shared folder
        raise ConfigError(
            f"rollout.vllm_server.url={server.url} is another host, and the server reads the adapter's files itself. "
            "Type rollout.vllm_server.adapter_dir=DIR, a folder that both hosts see under one path."
        )


def fp4_tiles_takes_rank(lora_rank: int) -> bool:
    """Tell whether the kernel `fp4_tiles` supports this LoRA rank. `fp4_tiles.supports` checks shapes too."""
    return lora_rank % TILES_RANKS == 0 and 0 < lora_rank <= TILES_MAX_RANK


def check_engine_on_cpu(cfg: RunConfig, why: str) -> None:
    """Raise ConfigError if rollout.engine=vllm needs a GPU for this run, which has only a CPU.

    `why` goes into the message and says why there is only a CPU, e.g. `device=cpu was given`. The remedy is an engine
    alone, because an evaluation of a run has the run's format.
    """
    if cfg.rollout.engine == "vllm" and cfg.format.name != DENSE_FORMAT:
        raise ConfigError(
            f"rollout.engine=vllm computes format.name={cfg.format.name} on a GPU only, and {why}; "
            f"allowed there: {DENSE_FORMAT}. Type rollout=transformers."
        )
    if cfg.rollout.engine == "vllm" and cfg.trains_all:
        raise ConfigError(
            f"rollout.engine=vllm with lora.rank=0 needs a GPU, and {why}: on a CPU vLLM reorders the weights, which "
            "then cannot be replaced. Type rollout=transformers."
        )
