"""What can be asked of the benchmarks. Imports no torch."""

from dataclasses import dataclass

from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config import ConfigError, did_you_mean, option

ARMS = ("bf16", "bf16_peft", "nvfp4", "mxfp4", "nf4", "qlora")


@dataclass
class LinearOptions:
    models: list[str] = option(["qwen2.5-7b", "qwen2.5-32b"], f"whose Linears: {', '.join(ARCHITECTURES)}")
    tokens: list[str] = option(["512", "2048", "8192"], "rows of the input")
    out: str = option("results/bench/linear", "where NAME.json and NAME.png go, less the suffix")


@dataclass
class TrainStepOptions:
    model: str = option("qwen2.5-7b", "architecture, with random weights", choices=tuple(ARCHITECTURES))
    arms: list[str] = option(
        list(ARMS), "formats under the lab's LoRA; bf16_peft and qlora (bitsandbytes' Linear4bit) under PEFT's modules"
    )
    sequences: int = option(8, "sequences in a step; timed in one micro-batch, and one by one", at_least=1)
    length: int = option(2048, "tokens of a sequence", at_least=2)
    rank: int = option(32, "rank of the adapters", at_least=1)
    steps: int = option(3, "timed steps of each arm, after one that is not", at_least=1)
    out: str = option("results/bench/train_step", "where NAME.json and NAME.png go, less the suffix")


def check(options: LinearOptions | TrainStepOptions) -> None:
    """Raises ConfigError for a name that does not exist, and for tokens that are no numbers."""
    if isinstance(options, LinearOptions):
        _known("models", options.models, tuple(ARCHITECTURES))
        if not all(number.isdigit() and int(number) for number in options.tokens):
            raise ConfigError(f"tokens={','.join(options.tokens)}: allowed are positive numbers, as tokens=512,2048.")
    else:
        _known("arms", options.arms, ARMS)


def _known(key: str, given: list[str], allowed: tuple[str, ...]) -> None:
    if not given:
        raise ConfigError(f"{key}= is empty. Allowed: {', '.join(allowed)}.")
    for name in given:
        if name not in allowed:
            raise ConfigError(
                f"{key}: {name!r} is unknown.{did_you_mean(name, list(allowed))} Allowed: {', '.join(allowed)}."
            )
