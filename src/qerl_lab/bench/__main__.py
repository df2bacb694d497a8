"""`python -m qerl_lab.bench linear|train_step KEY=VALUE ...`: measure, print a table, write JSON and a figure."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab.bench.options import LinearOptions, TrainStepOptions, check
    from qerl_lab.cli.grammar import Command, choose
    from qerl_lab.config.schema import ConfigError
    from qerl_lab.record.environment import environment
    from qerl_lab.record.outputs import make_directory
    from qerl_lab.terminal import quiet_third_parties


def linear(options: LinearOptions) -> None:
    """Measure single Linears."""
    about = prepare(options)
    from qerl_lab.bench.linear import dequantization, products

    rows = {"dequantization": shown(dequantization(options.models))}
    rows["products"] = shown(products(options.models, options.tokens))
    save(Path(options.out), {"benchmark": "linear", **about, **rows})


def train_step(options: TrainStepOptions) -> None:
    """Measure the training steps of a whole model."""
    about = prepare(options)
    from qerl_lab.bench.train_step import steps

    save(Path(options.out), {"benchmark": "train_step", **about, "steps": shown(steps(options))})


def prepare(options: LinearOptions | TrainStepOptions) -> dict[str, Any]:
    """Make ready to measure, and describe it. Raises ConfigError where it cannot be done, or not be written."""
    check(options)
    require_gpu()
    make_directory(Path(options.out).parent, f"out={options.out}")
    quiet_third_parties()
    return {"environment": environment(), "options": vars(options)}


def require_gpu() -> None:
    """Raise ConfigError where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("The benchmarks need an NVIDIA GPU, and torch sees none here.")


def shown(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collect the rows, and print each when it is there: a whole run takes minutes."""
    found = []
    for row in rows:
        values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
        cells = (f"{name} {value}" for name, value in zip(row, values, strict=True))
        print("  ".join(cells), file=sys.stderr, flush=True)
        found.append(row)
    return found


def save(stem: Path, result: dict[str, Any]) -> None:
    """Write `stem`.json and `stem`.png, and print the table."""
    from qerl_lab.report import bench

    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    bench.draw(result, stem.with_suffix(".png"))
    print(bench.table(result))
    print(f"{stem.with_suffix('.json')}  {stem.with_suffix('.png')}")


COMMANDS: dict[str, Command[Any]] = {
    "linear": Command(
        "python -m qerl_lab.bench linear",
        "Unpacking of weights against copying as many bytes; packed Linear against nn.Linear and bitsandbytes.",
        LinearOptions,
        linear,
        examples=(("python -m qerl_lab.bench linear", "what results/bench holds"),),
        alone=True,
    ),
    "train_step": Command(
        "python -m qerl_lab.bench train_step",
        "Tokens per second and peak memory of LoRA training steps of a whole model with random weights.",
        TrainStepOptions,
        train_step,
        examples=(("python -m qerl_lab.bench train_step", "what results/bench holds"),),
        alone=True,
    ),
}


@exits.command
def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    return choose(COMMANDS, words)


if __name__ == "__main__":
    exits.run(main)
