"""`python -m qerl_lab.bench COMMAND KEY=VALUE ...`: measure, print, write JSON, draw. COMMANDS lists the commands."""

import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qerl_lab.system import exits

with exits.starting(__name__):
    from qerl_lab.bench.bench_options import AnyOptions, RolloutOptions, StepOptions, TrainStepOptions, check
    from qerl_lab.cli.grammar import Command, main_of
    from qerl_lab.config.option import ConfigError
    from qerl_lab.record.environment import environment
    from qerl_lab.system.disk import make_directory, replace_file
    from qerl_lab.system.terminal import quiet_third_parties


def measure_train_step(options: TrainStepOptions) -> None:
    """Measure the arms of `train_step`, which alternate in this process; print, write and draw the result."""
    result = start(options)
    from qerl_lab.bench.train_step import steps

    save(Path(options.out), result | {"steps": print_rows(steps(options))})


def measure_arms(options: RolloutOptions | StepOptions) -> None:
    """Measure each arm in its own process, writing its rows at once. Raises ValueError at the end if an arm died."""
    result = start(options)
    from qerl_lab.bench import arm_processes

    arm_processes.check(options)
    for number in exits.stop_signals():  # an ended command keeps its rows and removes its checkpoint
        signal.signal(number, signal.default_int_handler)
    result["rows"] = []
    for row in arm_processes.run(options):
        result["rows"] += print_rows([row])
        write(Path(options.out), result)
    save(Path(options.out), result)
    if dead := arm_processes.dead_rows(result["rows"]):
        raise ValueError(f"{len(dead)} arms died: {'; '.join(row['arm'] for row in dead)}. The table says of what.")


def start(options: AnyOptions) -> dict[str, Any]:
    """Check the options and begin the result: benchmark, environment, options. Raises ConfigError without a GPU."""
    check(options)
    require_gpu()
    make_directory(Path(options.out).parent, f"out={options.out}")
    quiet_third_parties()
    return {"benchmark": options.BENCHMARK, "environment": environment(), "options": vars(options)}


def require_gpu() -> None:
    """Raise ConfigError if torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("The benchmarks need an NVIDIA GPU, and torch sees none here.")


def print_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print each row as soon as it is measured, because a whole command takes minutes; return all rows."""
    found = []
    for row in rows:
        cells = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items() if name != "log"
        )  # fmt: skip
        print("  ".join(cells), file=sys.stderr, flush=True)
        found.append(row)
    return found


def write(stem: Path, result: dict[str, Any]) -> None:
    """Write the result to `stem`.json atomically, so that a killed command leaves a whole file."""
    replace_file(stem.with_suffix(".json"), json.dumps(result, indent=1).encode() + b"\n")


def save(stem: Path, result: dict[str, Any]) -> None:
    """Write the result to `stem`.json, and `stem`.png if there is something to draw; print its table."""
    from qerl_lab.report import bench, bench_figures

    write(stem, result)
    bench_figures.draw(result, stem.with_suffix(".png"))
    print(bench.text(result))
    written = (stem.with_suffix(suffix) for suffix in (".json", ".png"))
    print("  ".join(str(file) for file in written if file.exists()))


LINE = "python -m qerl_lab.bench"
COMMANDS: dict[str, Command[Any]] = {
    "train_step": Command(
        f"{LINE} train_step",
        "Tokens per second and peak memory of LoRA training steps of a whole model with random weights.",
        TrainStepOptions,
        measure_train_step,
        ((f"{LINE} train_step", "what results/bench holds"),),
        alone=True,
    ),
    "rollout": Command(
        f"{LINE} rollout",
        "Completion tokens per second of the lab's engine and of vLLM as it is; each arm in a process of its own.",
        RolloutOptions,
        measure_arms,
        (
            (f"{LINE} rollout", "every format and the baselines, 7B"),
            (f"{LINE} rollout batches=[1,8] ranks=[16,32,64,128]", "beside the paper's Figure 11"),
            (
                f"{LINE} rollout \"arms=[bf16_stock,nvfp4,'nvfp4 rollout.vllm.kv_cache_dtype=fp8']\"",
                "an arm with other keys of the run",
            ),
        ),
        alone=True,
    ),
    "step": Command(
        f"{LINE} step",
        "Seconds and memory of whole GRPO steps by phase, of the lab's trainer and of TRL's.",
        StepOptions,
        measure_arms,
        (
            (f"{LINE} step", "every format and the baselines, 7B"),
            (f"{LINE} step mean_tokens=400", "ragged lengths"),
            (f"{LINE} step \"arms=[nvfp4,'nvfp4 gpus=2']\"", "one GPU beside two, the same completions"),
        ),
        alone=True,
    ),
}
main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
