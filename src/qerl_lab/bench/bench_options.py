"""Options of the benchmarks, and arms: a weight format or a baseline, and overrides. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.option import ConfigError, did_you_mean, option
from qerl_lab.config.schema import DENSE_FORMAT

# config.json of the models on the hub, without keys that do not affect speed. Weights are random.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "qwen2.5-14b": {
        "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "qwen2.5-32b": {
        "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip

FORMATS = (DENSE_FORMAT, *(name for name in choices_of("format") if name != DENSE_FORMAT))
ARMS = (DENSE_FORMAT, "bf16_peft", *FORMATS[1:], "qlora")  # of train_step
# Baselines and their weight formats: PEFT's modules; unchanged vLLM with a LoRARequest; TRL's trainer with such a vLLM.
PEFT = {"bf16_peft": "bf16", "qlora": "nf4"}
VLLM = {"bf16_stock": "bf16", "qlora_stock": "nf4", "nvfp4_stock": "nvfp4", "mxfp4_stock": "mxfp4", "fp8_stock": "fp8"}
TRL = {"bf16_trl": "bf16", "qlora_trl": "nf4"}
ARM = (
    "a format is the lab's engine, {}; KEY=VALUE after a name, in quotes, changes a key of the run (of a baseline: an "
    "argument of {})"
)
OUT = "where NAME.json and NAME.png go, less the suffix; what is there is replaced"
Row = dict[str, Any]  # measured values by name


@dataclass(frozen=True)
class Arm:
    """One arm of a benchmark. `overrides` are values of keys of the lab's run, or of the baseline's arguments."""

    name: str
    format: str
    is_baseline: bool
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs, and so of processes, that the arm uses: its override `gpus`, or 1."""
        return 1 if self.is_baseline else self.overrides.get("gpus", 1)

    @property
    def is_on_cpu(self) -> bool:
        """Tell whether the arm's overrides select the CPU."""
        return self.overrides.get("device") == "cpu"


def parse_arm(text: str, baselines: Mapping[str, str]) -> Arm:
    """Parse an arm such as "nvfp4 rollout.vllm.kv_cache_dtype=fp8": a format or baseline, then overrides.

    `baselines` maps the names of the baselines to their weight formats. Raises ConfigError if a part cannot be read.
    """
    name, *overrides = text.split() or [""]
    allowed = [*baselines, *FORMATS]
    if name not in allowed:
        hint = did_you_mean(name, allowed) or f" Type for example arms=[{allowed[0]}]."
        raise ConfigError(f"{text!r} in arms is not allowed; allowed: {', '.join(allowed)}.{hint}")
    given = {}
    for word in overrides:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            override = None
        if override is None or override.is_sweep_override():
            raise ConfigError(
                f"{word} in the arm {text!r} is no KEY=VALUE that can be read. Type for example "
                f"\"arms=['{name} KEY=VALUE']\", the value without commas."
            )
        given[override.key_or_group] = override.value()
    return Arm(text, baselines.get(name, name), name in baselines, given)


@dataclass
class Options:
    """Options that all benchmarks share."""

    BENCHMARK: ClassVar[str]
    BASELINES: ClassVar[Mapping[str, str]]
    model: str = option("qwen2.5-7b", "architecture, with random weights", choices=tuple(ARCHITECTURES))
    arms: list[str] = option([], "names of arms")
    scratch: str = option("/dev/shm", "directory for the checkpoint of an arm; it is removed")
    timeout_minutes: float = option(60, "an arm that takes longer is ended", above=0, at_most=100_000)
    out: str = option("", "")

    def read_arms(self) -> list[Arm]:
        """Parse the option `arms`. Raises ConfigError as `parse_arm` does."""
        return [parse_arm(text, self.BASELINES) for text in self.arms]


@dataclass
class TrainingOptions(Options):
    """Options of the benchmarks that train."""

    rank: int = option(32, "rank of the adapters", at_least=1, at_most=512)
    steps: int = option(3, "timed steps of each arm, after one that is not", at_least=1)

    @property
    def ranks(self) -> list[int]:
        """Return the adapter's rank as a list, as `RolloutOptions` has it."""
        return [self.rank]


@dataclass
class TrainStepOptions(TrainingOptions):
    BENCHMARK = "train_step"
    BASELINES = PEFT
    arms: list[str] = option(
        list(ARMS),
        "formats under the lab's LoRA; bf16_peft and qlora (bitsandbytes' Linear4bit) under PEFT's modules",
        choices=ARMS,
    )
    sequences: int = option(8, "sequences in a step; timed in one micro-batch, and one by one", at_least=1)
    length: int = option(2048, "tokens of a sequence", at_least=2)
    out: str = option("results/bench/train_step", OUT)


@dataclass
class RolloutOptions(Options):
    BENCHMARK = "rollout"
    BASELINES = VLLM
    arms: list[str] = option(
        ["bf16_stock", "qlora_stock", "nvfp4_stock", *FORMATS],
        ARM.format("NAME_stock is vLLM as it is, with a LoRARequest (qlora_stock: bitsandbytes NF4)", "vLLM's LLM"),
    )
    batches: list[int] = option([8, 64, 256], "completions at once, of as many prompts", at_least=1, at_most=65_536)
    prompt: int = option(256, "tokens of a prompt", at_least=1, at_most=30_000)
    ranks: list[int] = option([32], "ranks of the adapter; each is an engine of its own", at_least=1, at_most=512)
    new: int = option(512, "tokens of a completion, none ends earlier", at_least=2, at_most=30_000)
    repeats: int = option(3, "timed calls of each kind, after one that is not", at_least=1)
    out: str = option("results/bench/rollout", OUT)


@dataclass
class StepOptions(TrainingOptions):
    BENCHMARK = "step"
    BASELINES = TRL
    arms: list[str] = option(
        ["bf16_trl", "qlora_trl", *FORMATS],
        ARM.format(
            "NAME_trl is TRL's GRPOTrainer with vLLM beside it, as they are (qlora_trl: bitsandbytes NF4)",
            "TRL's GRPOConfig",
        ),
    )
    prompt: int = option(256, "tokens of a prompt", at_least=1, at_most=30_000)
    groups: int = option(8, "prompts of a step", at_least=1, at_most=65_536)
    group_size: int = option(8, "completions of a prompt", at_least=2, at_most=4096)
    new: int = option(1024, "tokens of a completion at most", at_least=2, at_most=30_000)
    mean_tokens: float = option(
        0, "completions end at random, after so many tokens in the mean if none were cut (geometric); 0: at new",
        at_least=0, at_most=30_000,
    )  # fmt: skip
    micro_batch: int = option(8, "completions per forward and backward pass", at_least=1, at_most=65_536)
    out: str = option("results/bench/step", OUT)


AnyOptions = TrainStepOptions | RolloutOptions | StepOptions


def check(options: AnyOptions) -> None:
    """Raise ConfigError for options that cannot be measured: lists, arms, `scratch`, `micro_batch` and `out`."""
    for name, _, value in leaves(options):
        if value == []:
            raise ConfigError(f"{name}=[] leaves nothing to measure. Leave {name} out, or name one or more.")
    for arm in options.read_arms():
        if isinstance(options, RolloutOptions) and arm.gpus != 1:
            raise ConfigError(
                f"gpus={arm.gpus} in the arm {arm.name!r} is for whole steps: a rank's engine samples for itself. "
                "Leave it out, or type python -m qerl_lab.bench step."
            )
    if not Path(options.scratch).is_dir():
        raise ConfigError(f"scratch={options.scratch} is no directory. Type scratch=DIR of one that is there.")
    if isinstance(options, StepOptions) and (count := options.groups * options.group_size) % options.micro_batch:
        raise ConfigError(
            f"micro_batch={options.micro_batch} does not divide groups x group_size = {count}; allowed: a divisor. "
            f"Type for example micro_batch={options.group_size}."
        )
    if Path(options.out).name in ("", ".."):
        raise ConfigError(f"out={options.out} has no file name. Type for example out=results/bench/mine.")
