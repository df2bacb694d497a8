"""The typed schema of a run: every default, its unit and its meaning, and every rule that spans fields.

YAML options under `conf/` state only what differs from here. Imports no torch, so that composing, checking and
listing configurations is instant. A wrong value ends in `ConfigError`, whose text says what was given, what is
allowed and what to type.
"""

import difflib
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

# The suffix of the paper's prompt (App. E): without it the format reward is unreachable, as in the released code.
PAPER_INSTRUCTION = (
    "Solve the following math problem step by step. The reasoning process and direct answer are enclosed within "
    "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>."
)
DTYPES = ("auto", "float32", "bfloat16")
READINGS = ("released", "equation", "algorithm")
EXPONENT_RULES = ("round", "floor", "ceil")
SCALE_RULES = ("max", "four_over_six")
SCHEDULES = ("off", "exponential", "linear", "cosine", "logarithmic")
CORRECTIONS = ("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class ConfigError(ValueError):
    """A configuration that cannot run. The message is for the user: given, allowed, what to type."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field with its meaning and its bounds; `validate` and the generated docs read them from the metadata."""
    metadata = {"help": help, "choices": choices, "at_least": at_least, "above": above, "at_most": at_most}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    name: str = option("pocket", "label of the policy in tables and run names")
    path: str = option("pocket", "hub id or directory, dense or packed in the run's format, or `pocket` (embedded)")
    revision: str | None = option(None, "branch, tag or commit on the hub; null is the newest")
    dtype: str = option("auto", "compute dtype; auto is bfloat16 on a GPU, float32 on a CPU", choices=DTYPES)
    attention: str = option("sdpa", "attention implementation of transformers: sdpa, eager, flash_attention_2 ...")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")


@dataclass
class FormatConfig:
    name: str = option("nvfp4", "weight format of the frozen base: a module of qerl_lab.formats")
    ignore: list[str] = option(["lm_head"], "Linear layers left dense: full name, its last parts, or re:PATTERN")
    dense_cache: str = option(
        "auto", "keep dequantized weights too: auto is on for a CPU; a GPU refuses on", choices=("auto", "on", "off")
    )
    double_quant: bool = option(True, "NF4 only: quantize the block scales too, as QLoRA does")
    scale_rule: str = option(
        "max", "NVFP4 only: a block's maximum becomes 6, or the better of 6 and 4 (2512.02010)", choices=SCALE_RULES
    )
    exponent_rule: str = option(
        "round", "MXFP4 only: compressed-tensors' rounding, OCP's floor, or ceil (no clipping)", choices=EXPONENT_RULES
    )


@dataclass
class LoraConfig:
    rank: int = option(32, "rank r of the adapters (paper, Sec. 4.1: 32)", at_least=1)
    alpha: float | None = option(None, "scaling is alpha / rank; null: alpha = rank (the paper states none)", above=0)
    dropout: float = option(0.0, "dropout before the adapters", at_least=0, at_most=0.99)
    target_modules: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Linear layers that get an adapter (paper, Eq. 2)",
    )


@dataclass
class AqnConfig:
    schedule: str = option("off", "shape of sigma over the stages; off adds no noise", choices=SCHEDULES)
    sigma_start: float = option(1e-2, "noise standard deviation in the first noisy stage (Table 4)", at_least=0)
    sigma_end: float = option(5e-4, "noise standard deviation in the last stage (Table 4)", at_least=0)
    stages: int = option(10, "number of equal stages K (Sec. 3.3)", at_least=1)
    reading: str = option(
        "released",
        "the paper's stage rules: released (its code: stage 1 has quantization noise only, the others run from "
        "sigma_start to sigma_end), equation (Eq. 8: all K stages noisy), algorithm (Algorithm 1: stage 1 clean, "
        "sigma_end never reached)",
        choices=READINGS,
    )
    scope: str = option(
        "rollout",
        "where the noise lives: in the sampler only, or in the trainer's forward too",
        choices=("rollout", "rollout_and_train"),
    )
    norms: list[str] = option(
        ["input_layernorm", "post_attention_layernorm"], "RMSNorm layers that get noise, by the last part of their name"
    )
    probe_prompts: int = option(4, "completions per step that measure KL(noisy || clean sampler); 0: none", at_least=0)


@dataclass
class AlgorithmConfig:
    name: str = option("grpo", "advantage and loss averaging", choices=("grpo", "dapo"))
    epsilon_low: float = option(0.2, "lower clip of the probability ratio (Table 4)", above=0, at_most=1)
    epsilon_high: float = option(0.28, "upper clip of the probability ratio, clip-higher (Table 4)", above=0)
    beta: float = option(0.0, "weight of the KL to the reference policy (App. E: none)", at_least=0)
    normalize_std: bool = option(True, "divide advantages by the group's standard deviation (Eq. 4)")
    updates_per_rollout: int = option(
        1, "optimizer updates per rollout, each on its own share of the completions (Table 4: 4 on GSM8K)", at_least=1
    )
    num_iterations: int = option(1, "passes over one rollout's completions (mu of the GRPO paper)", at_least=1)
    mask_truncated: bool = option(False, "leave completions without an end token out of the loss")


@dataclass
class TaskConfig:
    name: str = option("arithmetic", "the task: a module of qerl_lab.tasks")
    path: str | None = option(None, "local directory with train.jsonl and test.jsonl, or hub id; null: the task's own")
    instruction: str = option(PAPER_INSTRUCTION, "system message sent with every question; empty sends none")
    format_reward: float = option(0.2, "reward for <think>..</think><answer>..</answer>", at_least=0)
    answer_reward: float = option(1.0, "reward for an exact final answer", at_least=0)
    train_questions: int = option(0, "size of the training set; 0 is all (arithmetic: 0 is 4096)", at_least=0)
    min_steps: int = option(2, "arithmetic: fewest operations of a problem", at_least=1, at_most=6)
    max_steps: int = option(3, "arithmetic: most operations of a problem", at_least=1, at_most=6)
    max_operand: int = option(9, "arithmetic: largest number that a problem states", at_least=2, at_most=1000)


@dataclass
class RolloutConfig:
    engine: str = option("transformers", "what turns prompts into completions", choices=("transformers",))
    prompts_per_step: int = option(16, "questions per step", at_least=1)
    group_size: int = option(8, "completions per question, G (Table 4: 8 on GSM8K, 16 on BigMath)", at_least=2)
    max_prompt_tokens: int = option(1024, "longer questions are left out of the data, and counted", at_least=1)
    max_completion_tokens: int = option(4096, "longest completion (Table 4: 4096 GSM8K, 8192 BigMath)", at_least=1)
    temperature: float = option(1.0, "sampling temperature (Table 4)", above=0)
    batch_size: int = option(512, "most completions generated at once, here and in evaluation", at_least=1)
    importance_correction: str = option(
        "token_truncate", "TRL's correction for the gap between sampler and trainer; off: ratio 1", choices=CORRECTIONS
    )
    importance_clip_max: float = option(3.0, "upper bound of that ratio (TRL's default)", above=0)


@dataclass
class OptimConfig:
    name: str = option("adamw", "adamw_8bit is the paper's (bitsandbytes, GPU)", choices=("adamw", "adamw_8bit"))
    learning_rate: float = option(1e-5, "peak learning rate (Table 4: 1e-5; its BF16 arm: 5e-6)", at_least=0)
    schedule: str = option("constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_ratio: float = option(0.0, "share of the updates with linear warm-up", at_least=0, at_most=1)
    weight_decay: float = option(0.0, "decoupled weight decay", at_least=0)
    beta1: float = option(0.9, "first moment decay of Adam", at_least=0, at_most=0.9999)
    beta2: float = option(0.99, "second moment decay of Adam", at_least=0, at_most=0.99999)
    max_grad_norm: float = option(1.0, "gradient clipping norm", above=0)
    micro_batch_size: int = option(8, "completions per forward and backward pass", at_least=1)


@dataclass
class TrackingConfig:
    mlflow: bool = option(True, "mirror metrics.jsonl to MLflow")
    uri: str | None = option(None, "MLflow store; null is MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here")
    experiment: str = option("qerl-lab", "MLflow experiment name")


@dataclass
class EvalConfig:
    questions: int = option(256, "held-out questions before and after training; 0 is no evaluation", at_least=0)
    samples: int = option(4, "sampled completions per question; accuracy is their mean", at_least=1)
    temperature: float = option(0.6, "sampling temperature (Sec. 4.1: 0.6)", above=0)
    top_p: float = option(0.95, "nucleus sampling (Sec. 4.1: 0.95)", above=0, at_most=1)


@dataclass
class CheckpointConfig:
    every: int = option(25, "steps between checkpoints; 0 saves only on interruption and at the end", at_least=0)
    keep: int = option(2, "newest checkpoints kept", at_least=1)


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    format: FormatConfig = field(default_factory=FormatConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    aqn: AqnConfig = field(default_factory=AqnConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    experiment: str = option("adhoc", "name of the arm; +experiment=NAME sets it")
    differs_in: list[str] = option([], "keys in which this arm differs from experiment=bf16, held by a test")
    scale: str = option("pocket", "name of the scale; +scale=NAME sets it")
    seed: int = option(0, "seeds data order, adapters, sampling and noise", at_least=0)
    steps: int = option(600, "rollouts; each is followed by updates_per_rollout x num_iterations updates", at_least=1)
    device: str = option("auto", "auto takes a GPU if there is one", choices=("auto", "cpu", "cuda"))
    cpu_threads: int = option(2, "torch threads on a CPU (runs side by side need 1 each); 0: all cores", at_least=0)
    dry_run: bool = option(False, "check every job of the command, print what would run, and stop")
    resume: str | None = option(None, "continue the run in this directory with its own configuration")
    run_dir: str = option("", "where the run's record goes; empty is runs/<experiment>/seed<seed>/<time>")

    @property
    def completions_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def updates_per_step(self) -> int:
        return self.algorithm.updates_per_rollout * self.algorithm.num_iterations


def package_data(name: str) -> Path:
    """The folder `conf` or `sweeps`: inside an installed package, at the root of a source checkout."""
    inside = Path(__file__).parent / name
    return inside if inside.is_dir() else Path(__file__).parents[2] / name


def choices_of(group: str) -> list[str]:
    """Names of a group's options: the files of conf/<group>/ (or of sweeps/)."""
    folder = package_data("sweeps") if group == "sweeps" else package_data("conf") / group
    return sorted(path.stem for path in folder.glob("*.yaml"))


def did_you_mean(given: str, allowed: list[str]) -> str:
    """` Did you mean x?` where something allowed is close to what was given, else nothing."""
    close = difflib.get_close_matches(given, allowed, n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def from_dict(values: dict[str, Any]) -> RunConfig:
    """A checked RunConfig from plain nested values, e.g. a run's resolved.yaml. Raises ConfigError."""
    cfg = _build(RunConfig, values, "")
    validate(cfg)
    return cfg


def _build(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.')}={values!r} is not a mapping; allowed: the keys of {kind.__name__}.")
    types, known, arguments = get_type_hints(kind), [f.name for f in fields(kind)], {}
    for key, value in values.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"{prefix}{key} is not a known key.{hint} Allowed: {', '.join(known)}.")
        arguments[key] = _build(types[key], value, f"{prefix}{key}.") if is_dataclass(types[key]) else value
    return kind(**arguments)


def leaves(node: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every (dotted name, dataclass field, value) of a configuration, depth first in schema order."""
    found: list[tuple[str, Any, Any]] = []
    for f in fields(node):
        value, name = getattr(node, f.name), prefix + f.name
        found += leaves(value, name + ".") if is_dataclass(value) else [(name, f, value)]
    return found


def validate(cfg: RunConfig) -> None:
    """Raise ConfigError at the first value out of bounds or combination that cannot run."""
    for name, f, value in leaves(cfg):
        check_bounds(name, f.metadata, value)
    for rule in (
        _model_given, _known_modules, _batch_divides, _aqn_acts, _aqn_decays, _task_steps_ordered, _adapters_on_linears,
        _optimizer_fits_device, _cache_fits_device,
    ):  # fmt: skip
        rule(cfg)


def check_bounds(name: str, bounds: Any, value: Any) -> None:
    """Raise ConfigError for a value outside the bounds of its `option`."""

    def refuse(allowed: str, remedy: str) -> None:
        raise ConfigError(f"{name}={value} is not allowed; allowed: {allowed}.{remedy}")

    if value is None:
        return
    if (choices := bounds.get("choices")) and value not in choices:
        # YAML reads an unquoted off as false, which arrives here as the text "False".
        quote = ' In a YAML file write "off" with its quotes.' if value == "False" and "off" in choices else ""
        example = f" Type for example {name}={choices[0]}."
        refuse(", ".join(choices), quote or did_you_mean(value, list(choices)) or example)
    if isinstance(value, float) and not math.isfinite(value):
        refuse("a finite number", f" Type for example {name}=1.0.")
    if (low := bounds.get("at_least")) is not None and value < low:
        refuse(f"at least {low}", f" Type for example {name}={low}.")
    if (low := bounds.get("above")) is not None and value <= low:
        refuse(f"above {low}", f" Type for example {name}={low + (bounds.get('at_most') or 1)}.")
    if (high := bounds.get("at_most")) is not None and value > high:
        refuse(f"at most {high}", f" Type for example {name}={high}.")


def _model_given(cfg: RunConfig) -> None:
    if not cfg.model.path:
        raise ConfigError("model.path= is empty; allowed: hub id, directory, pocket. Type for example model=pocket.")


def _known_modules(cfg: RunConfig) -> None:
    for group, name in (("format", cfg.format.name), ("task", cfg.task.name)):
        allowed = choices_of(group)
        if name not in allowed:
            raise ConfigError(
                f"{group}.name={name} is not allowed; allowed: {', '.join(allowed)}.{did_you_mean(name, allowed)} "
                f"Type for example {group}={allowed[0]}."
            )


def _batch_divides(cfg: RunConfig) -> None:
    batch, updates, micro = cfg.completions_per_step, cfg.algorithm.updates_per_rollout, cfg.optim.micro_batch_size
    if batch % (updates * micro) == 0:
        return
    kept = updates if batch % updates == 0 else 1
    remedy = f"optim.micro_batch_size={_largest_divisor(batch // kept, micro)}"
    raise ConfigError(
        f"rollout.prompts_per_step x rollout.group_size = {cfg.rollout.prompts_per_step} x {cfg.rollout.group_size} = "
        f"{batch} completions cannot be split into algorithm.updates_per_rollout={updates} updates of "
        f"optim.micro_batch_size={micro}; {batch} must be a multiple of {updates * micro}. "
        f"Type for example {remedy}{'' if kept == updates else f' algorithm.updates_per_rollout={kept}'}."
    )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


def _aqn_acts(cfg: RunConfig) -> None:
    if cfg.aqn.schedule != "off" and not cfg.aqn.norms:
        raise ConfigError(
            f"aqn.schedule={cfg.aqn.schedule} with aqn.norms=[] would add noise to nothing; allowed: one norm or more. "
            "Type for example aqn.norms=[input_layernorm], or aqn=off."
        )


def _aqn_decays(cfg: RunConfig) -> None:
    aqn = cfg.aqn
    if aqn.schedule == "off":
        return
    if aqn.sigma_end > aqn.sigma_start:
        raise ConfigError(
            f"aqn.sigma_end={aqn.sigma_end} is above aqn.sigma_start={aqn.sigma_start}; the noise decays, so "
            f"sigma_end may be at most sigma_start. Type for example aqn.sigma_end={aqn.sigma_start}."
        )
    if aqn.schedule == "exponential" and aqn.sigma_end == 0:
        raise ConfigError(
            "aqn.schedule=exponential never reaches aqn.sigma_end=0 (Eq. 8 takes the ratio sigma_end / sigma_start); "
            "allowed: above 0. Type for example aqn.sigma_end=5e-4 or aqn=linear."
        )
    if aqn.stages == 1 and aqn.reading != "equation":
        raise ConfigError(
            f"aqn.stages=1 with aqn.reading={aqn.reading} never adds noise, because that reading keeps stage 1 clean. "
            "Type for example aqn.stages=2 or aqn.reading=equation."
        )


def _task_steps_ordered(cfg: RunConfig) -> None:
    if cfg.task.min_steps > cfg.task.max_steps:
        raise ConfigError(
            f"task.min_steps={cfg.task.min_steps} is above task.max_steps={cfg.task.max_steps}. "
            f"Type for example task.min_steps={cfg.task.max_steps}."
        )


def _adapters_on_linears(cfg: RunConfig) -> None:
    if not cfg.lora.target_modules or "lm_head" in cfg.lora.target_modules:
        raise ConfigError(
            f"lora.target_modules={cfg.lora.target_modules} is not allowed; allowed: a non-empty list without lm_head "
            "(the loss reads lm_head.weight itself, so an adapter there would never train). "
            "Type for example lora.target_modules=[q_proj,v_proj]."
        )


def _optimizer_fits_device(cfg: RunConfig) -> None:
    if cfg.optim.name == "adamw_8bit" and cfg.device == "cpu":
        raise ConfigError(
            "optim.name=adamw_8bit needs a GPU, and device=cpu was given. Type optim=adamw, or device=cuda."
        )


def _cache_fits_device(cfg: RunConfig) -> None:
    if cfg.format.dense_cache == "on" and cfg.device == "cuda":
        raise ConfigError(
            "format.dense_cache=on with device=cuda would hold the dense weights that the format is there to save; "
            "allowed on a GPU: auto, off. Type format.dense_cache=off, or format=bf16."
        )


def config_hash(cfg: RunConfig) -> str:
    """12 hex digits that agree for two runs of one arm: all values but seed, paths and where it is tracked."""
    values = asdict(cfg)
    for key in ("seed", "run_dir", "resume", "dry_run", "tracking", "cpu_threads"):
        del values[key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
