"""`python -m qerl_lab.bench linear|train_step KEY=VALUE ...`: measure, print a table, write JSON and a figure."""

import json
import sys
from pathlib import Path
from typing import Any

from qerl_lab import record
from qerl_lab.arguments import HELP, manual, read
from qerl_lab.bench.options import LinearOptions, TrainStepOptions, check
from qerl_lab.config import ConfigError, did_you_mean
from qerl_lab.launch import OK, USAGE

COMMANDS: dict[str, type[LinearOptions] | type[TrainStepOptions]] = {
    "linear": LinearOptions,
    "train_step": TrainStepOptions,
}
ABOUT = {
    "linear": "Unpacking of weights against copying as many bytes; packed Linear against nn.Linear and bitsandbytes.",
    "train_step": "Tokens per second and peak memory of LoRA training steps of a whole model with random weights.",
}


def main(words: list[str]) -> int:
    try:
        return run(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in HELP or not name:
        print("\n".join(f"python -m qerl_lab.bench {command}  {about}" for command, about in ABOUT.items()))
        return OK
    if name not in COMMANDS:
        hint = did_you_mean(name, list(COMMANDS))
        raise ConfigError(f"{name} is no benchmark.{hint} Allowed: {', '.join(COMMANDS)}.")
    command = f"python -m qerl_lab.bench {name}"
    if set(HELP) & set(words):
        print(manual(ABOUT[name], command, COMMANDS[name](), ((command, "what results/bench holds"),)))
        return OK
    options = read(COMMANDS[name], words[1:])
    check(options)
    require_gpu()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
    result = {"benchmark": name, "environment": record.environment(), "options": vars(options), **measure(options)}
    save(result, Path(options.out))
    return OK


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("The benchmarks need an NVIDIA GPU, and torch sees none here.")


def measure(options: Any) -> dict[str, list[dict[str, Any]]]:
    """Lists of rows by name; each row is printed when it is there, because a whole run takes minutes."""
    from qerl_lab.progress import quiet_third_parties

    quiet_third_parties()
    if isinstance(options, TrainStepOptions):
        from qerl_lab.bench.train_step import steps

        return {"steps": list(map(shown, steps(options)))}
    from qerl_lab.bench.linear import dequantization, products

    tokens = [int(number) for number in options.tokens]
    return {
        "dequantization": list(map(shown, dequantization(options.models))),
        "products": list(map(shown, products(options.models, tokens))),
    }


def shown(row: dict[str, Any]) -> dict[str, Any]:
    values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
    print("  ".join(f"{name} {value}" for name, value in zip(row, values, strict=True)), file=sys.stderr, flush=True)
    return row


def save(result: dict[str, Any], stem: Path) -> None:
    from qerl_lab.report import bench

    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    bench.draw(result, stem.with_suffix(".png"))
    print(bench.table(result))
    print(f"{stem.with_suffix('.json')}  {stem.with_suffix('.png')}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
