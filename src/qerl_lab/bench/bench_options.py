"""Options of the benchmarks: architectures, arms, sizes. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.option import option
from qerl_lab.config.rules import VLLM_FORMATS
from qerl_lab.config.schema import DENSE_FORMAT

# From config.json of the models on the hub: the keys that affect speed. Weights are random.
_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip
_SHAPES = {
    "qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2, True),
    "qwen2.5-1.5b": (151936, 1536, 8960, 28, 12, 2, True),
    "qwen2.5-3b": (151936, 2048, 11008, 36, 16, 2, True),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, False),
    "qwen2.5-14b": (152064, 5120, 13824, 48, 40, 8, False),
    "qwen2.5-32b": (152064, 5120, 27648, 64, 40, 8, False),
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, shape, strict=True)) for name, shape in _SHAPES.items()
}
FORMATS = (DENSE_FORMAT, *(name for name in choices_of("format") if name != DENSE_FORMAT))
OF_VLLM = [name for name in FORMATS if name in VLLM_FORMATS.split("|")]  # rollout and step sample on vLLM
ARMS = (DENSE_FORMAT, "bf16_peft", *FORMATS[1:], "qlora")  # of train_step
# Baselines and their weight formats: PEFT's modules; unchanged vLLM with a LoRARequest; TRL's trainer with such a vLLM.
PEFT = {"bf16_peft": "bf16", "qlora": "nf4"}
VLLM = {"bf16_stock": "bf16", "qlora_stock": "nf4", "nvfp4_stock": "nvfp4", "mxfp4_stock": "mxfp4", "fp8_stock": "fp8"}
TRL = {"bf16_trl": "bf16", "qlora_trl": "nf4"}
ARM_HELP = (
    "a format's name is the lab's engine in that format, {}; KEY=VALUE after a name, in quotes, changes a key of the "
    "run (of a baseline: an argument of {})"
)
OUT_HELP = "results, as OUT.json and OUT.png; files there are replaced"
Row = dict[str, Any]  # measured values by name


@dataclass
class Options:
    """Options that all benchmarks share."""

    BENCHMARK: ClassVar[str]
    BASELINES: ClassVar[Mapping[str, str]]
    model: str = option("qwen2.5-7b", "architecture, with random weights", choices=tuple(ARCHITECTURES))
    arms: list[str] = option([], "names of the arms to compare")
    scratch: str = option("/dev/shm", "directory for checkpoints of arms, which are removed")
    timeout_minutes: float = option(60, "an arm that takes longer is ended", above=0, at_most=100_000)
    out: str = option("", OUT_HELP)


@dataclass
class TrainingOptions(Options):
    """Options of the benchmarks that train."""

    rank: int = option(32, "rank of the adapters", at_least=1, at_most=512)
    steps: int = option(3, "timed steps of each arm, after one that is not", at_least=1)


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
    out: str = option("results/bench/train_step", OUT_HELP)


@dataclass
class RolloutOptions(Options):
    BENCHMARK = "rollout"
    BASELINES = VLLM
    arms: list[str] = option(
        ["bf16_stock", "qlora_stock", "nvfp4_stock", *OF_VLLM],
        ARM_HELP.format(
            "NAME_stock is vLLM as it is, with a LoRARequest (qlora_stock: bitsandbytes NF4)", "vLLM's LLM"
        ),
    )
    batches: list[int] = option(
        [8, 64, 256], "numbers of completions at once, each of a prompt of its own", at_least=1, at_most=65_536
    )
    prompt: int = option(256, "tokens of a prompt", at_least=1, at_most=30_000)
    ranks: list[int] = option([32], "ranks of the adapter; each is an engine of its own", at_least=1, at_most=512)
    new: int = option(512, "tokens of a completion, none ends earlier", at_least=2, at_most=30_000)
    repeats: int = option(3, "timed calls of each kind, after one that is not", at_least=1)
    out: str = option("results/bench/rollout", OUT_HELP)


@dataclass
class StepOptions(TrainingOptions):
    BENCHMARK = "step"
    BASELINES = TRL
    arms: list[str] = option(
        ["bf16_trl", "qlora_trl", *OF_VLLM],
        ARM_HELP.format(
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
    out: str = option("results/bench/step", OUT_HELP)


AnyOptions = TrainStepOptions | RolloutOptions | StepOptions
