"""`python -m qerl_lab.bench COMMAND KEY=VALUE ...`: measure, print, write JSON, draw. COMMANDS lists the commands."""

import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab.bench.bench_options import (
        AnyOptions,
        DecodeOptions,
        LinearOptions,
        RolloutOptions,
        StepOptions,
        TrainStepOptions,
        check,
    )
    from qerl_lab.cli.grammar import Command, main_of
    from qerl_lab.config.option import ConfigError
    from qerl_lab.disk import make_directory, replace_file
    from qerl_lab.record.environment import environment
    from qerl_lab.terminal import quiet_third_parties


def linear(options: LinearOptions) -> None:
    """Measure single Linears."""
    about = prepare(options)
    from qerl_lab.bench.linears import dequantization, products

    rows = {"dequantization": shown(dequantization(options.models))}
    rows["products"] = shown(products(options.models, options.tokens))
    save(Path(options.out), {"benchmark": "linear", **about, **rows})


def decode(options: DecodeOptions) -> None:
    """Measure the Linears of a decoder layer with the few rows of decoding."""
    about = prepare(options)
    from qerl_lab.bench.decode import times

    rows = shown(times(options.model, options.rows, options.rank))
    save(Path(options.out), {"benchmark": "decode", **about, "decode": rows})


def train_step(options: TrainStepOptions) -> None:
    """Measure the training steps of a whole model."""
    about = prepare(options)
    from qerl_lab.bench.train_step import steps

    save(Path(options.out), {"benchmark": "train_step", **about, "steps": shown(steps(options))})


def rollout(options: RolloutOptions) -> None:
    """Measure rollouts, each arm in its own process."""
    in_processes("rollout", options)


def step(options: StepOptions) -> None:
    """Measure whole GRPO steps, each arm in its own process."""
    in_processes("step", options)


def in_processes(benchmark: str, options: RolloutOptions | StepOptions) -> None:
    """Measure every arm, writing each row at once. Raises ValueError at the end if an arm died."""
    about = prepare(options)
    from qerl_lab.bench import arm_processes

    arm_processes.clear(Path(options.scratch))
    arm_processes.refuse_wrong_runs(benchmark, options)
    arm_processes.refuse_few_gpus(options)
    arm_processes.refuse_small_scratch(options)
    hear_once()
    rows: list[dict[str, Any]] = []
    result = {"benchmark": benchmark, **about, "rows": rows}
    for row in arm_processes.run(benchmark, options):
        rows += shown([row])
        write(Path(options.out), result)
    save(Path(options.out), result)
    if dead := arm_processes.dead(rows):
        raise ValueError(f"{len(dead)} arms died: {'; '.join(row['arm'] for row in dead)}. The table says of what.")


def hear_once() -> None:
    """Raise KeyboardInterrupt at the first stop signal, so that the command removes its checkpoint.

    A second signal is ignored: `timeout` sends two, and the second would interrupt the removal.
    """

    def end(*_: object) -> NoReturn:
        for number in exits.heard():
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in exits.heard():
        signal.signal(number, end)


def prepare(options: AnyOptions) -> dict[str, Any]:
    """Check options, GPU and OUT; return environment and options to record. Raises ConfigError."""
    check(options)
    require_gpu()
    make_directory(Path(options.out).parent, f"out={options.out}")
    quiet_third_parties()
    return {"environment": environment(), "options": vars(options)}


def require_gpu() -> None:
    """Raise ConfigError if torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("The benchmarks need an NVIDIA GPU, and torch sees none here.")


def shown(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collect the rows, printing each as soon as it is measured: a whole command takes minutes."""
    found = []
    for row in rows:
        short = {name: value for name, value in row.items() if name not in ("log", "kernels")}  # too long to print
        cells = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in short.items()
        )
        print("  ".join(cells), file=sys.stderr, flush=True)
        found.append(row)
    return found


def write(stem: Path, result: dict[str, Any]) -> None:
    """Write `stem`.json atomically, so that a killed command leaves a whole file."""
    replace_file(stem.with_suffix(".json"), json.dumps(result, indent=1).encode() + b"\n")


def save(stem: Path, result: dict[str, Any]) -> None:
    """Write `stem`.json, and `stem`.png if there is something to draw; print the table."""
    from qerl_lab.report import bench, bench_arms

    report = bench_arms if "rows" in result else bench
    write(stem, result)
    report.draw(result, stem.with_suffix(".png"))
    print(report.table(result))
    written = (stem.with_suffix(suffix) for suffix in (".json", ".png"))
    print("  ".join(str(file) for file in written if file.exists()))


COMMANDS: dict[str, Command[Any]] = {
    "linear": Command(
        "python -m qerl_lab.bench linear",
        "Unpacking of weights against copying as many bytes; packed Linear against nn.Linear and bitsandbytes.",
        LinearOptions,
        linear,
        examples=(("python -m qerl_lab.bench linear", "what results/bench holds"),),
        alone=True,
    ),
    "decode": Command(
        "python -m qerl_lab.bench decode",
        "The Linears of a decoder layer at few rows: NVFP4 by each kernel, BF16, and the adapter by each route.",
        DecodeOptions,
        decode,
        examples=(("python -m qerl_lab.bench decode rows=[1,8] rank=64", "needs vLLM, whose kernels it compares"),),
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
    "rollout": Command(
        "python -m qerl_lab.bench rollout",
        "Completion tokens per second of the lab's engine and of vLLM as it is; each arm in a process of its own.",
        RolloutOptions,
        rollout,
        examples=(
            ("python -m qerl_lab.bench rollout", "every format and the baselines, 7B"),
            ("python -m qerl_lab.bench rollout batches=[1,8] ranks=[16,32,64,128]", "beside the paper's Figure 11"),
            (
                "python -m qerl_lab.bench rollout \"arms=[bf16_stock,nvfp4,'nvfp4 rollout.vllm.kv_cache_dtype=fp8']\"",
                "an arm with other keys of the run",
            ),
            (
                "python -m qerl_lab.bench rollout arms=[bf16_stock,nvfp4] batches=[64] kernels=true",
                "what takes the time",
            ),
        ),
        alone=True,
    ),
    "step": Command(
        "python -m qerl_lab.bench step",
        "Seconds and memory of whole GRPO steps by phase, of the lab's trainer and of TRL's.",
        StepOptions,
        step,
        examples=(
            ("python -m qerl_lab.bench step", "every format and the baselines, 7B"),
            ("python -m qerl_lab.bench step mean_tokens=400", "ragged lengths"),
            (
                "python -m qerl_lab.bench step \"arms=[nvfp4,'nvfp4 gpus=2']\"",
                "one GPU beside two, the same completions",
            ),
        ),
        alone=True,
    ),
}


main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
