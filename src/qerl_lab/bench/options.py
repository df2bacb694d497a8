"""Options of the benchmarks. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config.schema import ConfigError, leaves, option

ARMS = ("bf16", "bf16_peft", "nvfp4", "mxfp4", "nf4", "qlora")


@dataclass
class LinearOptions:
    models: list[str] = option(["qwen2.5-7b", "qwen2.5-32b"], "whose Linears", choices=tuple(ARCHITECTURES))
    tokens: list[int] = option([512, 2048, 8192], "rows of the input", at_least=1)
    out: str = option("results/bench/linear", "where NAME.json and NAME.png go, less the suffix")


@dataclass
class TrainStepOptions:
    model: str = option("qwen2.5-7b", "architecture, with random weights", choices=tuple(ARCHITECTURES))
    arms: list[str] = option(
        list(ARMS),
        "formats under the lab's LoRA; bf16_peft and qlora (bitsandbytes' Linear4bit) under PEFT's modules",
        choices=ARMS,
    )
    sequences: int = option(8, "sequences in a step; timed in one micro-batch, and one by one", at_least=1)
    length: int = option(2048, "tokens of a sequence", at_least=2)
    rank: int = option(32, "rank of the adapters", at_least=1)
    steps: int = option(3, "timed steps of each arm, after one that is not", at_least=1)
    out: str = option("results/bench/train_step", "where NAME.json and NAME.png go, less the suffix")


def check(options: LinearOptions | TrainStepOptions) -> None:
    """Raise ConfigError for an empty list, and for an `out` without a name."""
    for name, _, value in leaves(options):
        if value == []:
            raise ConfigError(f"{name}=[] leaves nothing to measure. Leave {name} out, or name one or more.")
    if Path(options.out).name in ("", ".."):
        raise ConfigError(f"out={options.out} has no file name. Type for example out=results/bench/mine.")
