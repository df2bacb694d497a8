"""`python -m qerl_lab.bench COMMAND KEY=VALUE ...`: measure, print, write JSON, draw. COMMANDS lists the commands."""

import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qerl_lab.system import exits

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
    from qerl_lab.record.environment import environment
    from qerl_lab.system.disk import make_directory, replace_file
    from qerl_lab.system.terminal import quiet_third_parties


def measure(options: AnyOptions) -> None:
    """Measure, print, write and draw. Raises ConfigError for wrong options or too small a machine."""
    check(options)
    require_gpu()
    make_directory(Path(options.out).parent, f"out={options.out}")
    quiet_third_parties()
    about = {"benchmark": options.BENCHMARK, "environment": environment(), "options": vars(options)}
    if isinstance(options, RolloutOptions | StepOptions):
        measure_in_processes(options, about)
    else:
        save(Path(options.out), about | measure_in_turn(options))


def measure_in_turn(options: LinearOptions | DecodeOptions | TrainStepOptions) -> dict[str, list[dict[str, Any]]]:
    """Measure arms that alternate in this process; return the rows by name of the table."""
    if isinstance(options, LinearOptions):
        from qerl_lab.bench.linears import dequantization, products

        rows = print_rows(dequantization(options.models))
        return {"dequantization": rows, "products": print_rows(products(options.models, options.tokens))}
    if isinstance(options, DecodeOptions):
        from qerl_lab.bench.decode import times

        return {"decode": print_rows(times(options.model, options.rows, options.rank))}
    from qerl_lab.bench.train_step import steps

    return {"steps": print_rows(steps(options))}


def measure_in_processes(options: RolloutOptions | StepOptions, about: dict[str, Any]) -> None:
    """Measure each arm in its own process, writing each row at once. Raises ValueError at the end if an arm died."""
    from qerl_lab.bench import arm_processes

    arm_processes.check(options)
    for number in exits.stop_signals():  # an ended command keeps its rows and removes its checkpoint
        signal.signal(number, signal.default_int_handler)
    rows: list[dict[str, Any]] = []
    result = {**about, "rows": rows}
    for row in arm_processes.run(options):
        rows += print_rows([row])
        write(Path(options.out), result)
    save(Path(options.out), result)
    if dead := arm_processes.dead_rows(rows):
        raise ValueError(f"{len(dead)} arms died: {'; '.join(row['arm'] for row in dead)}. The table says of what.")


def require_gpu() -> None:
    """Raise ConfigError if torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("The benchmarks need an NVIDIA GPU, and torch sees none here.")


def print_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
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
    from qerl_lab.report import bench, bench_figures

    write(stem, result)
    bench_figures.draw(result, stem.with_suffix(".png"))
    print(bench.text(result))
    written = (stem.with_suffix(suffix) for suffix in (".json", ".png"))
    print("  ".join(str(file) for file in written if file.exists()))


LINE = "python -m qerl_lab.bench"
ABOUT: tuple[tuple[type[AnyOptions], str, tuple[tuple[str, str], ...]], ...] = (  # options, purpose, examples
    (
        LinearOptions,
        "Unpacking of weights against copying as many bytes; packed Linear against nn.Linear and bitsandbytes.",
        ((f"{LINE} linear", "what results/bench holds"),),
    ),
    (
        DecodeOptions,
        "The Linears of a decoder layer at few rows: NVFP4 by each kernel, BF16, and the adapter by each route.",
        ((f"{LINE} decode rows=[1,8] rank=64", "needs vLLM, whose kernels it compares"),),
    ),
    (
        TrainStepOptions,
        "Tokens per second and peak memory of LoRA training steps of a whole model with random weights.",
        ((f"{LINE} train_step", "what results/bench holds"),),
    ),
    (
        RolloutOptions,
        "Completion tokens per second of the lab's engine and of vLLM as it is; each arm in a process of its own.",
        (
            (f"{LINE} rollout", "every format and the baselines, 7B"),
            (f"{LINE} rollout batches=[1,8] ranks=[16,32,64,128]", "beside the paper's Figure 11"),
            (
                f"{LINE} rollout \"arms=[bf16_stock,nvfp4,'nvfp4 rollout.vllm.kv_cache_dtype=fp8']\"",
                "an arm with other keys of the run",
            ),
            (f"{LINE} rollout arms=[bf16_stock,nvfp4] batches=[64] kernels=true", "what takes the time"),
        ),
    ),
    (
        StepOptions,
        "Seconds and memory of whole GRPO steps by phase, of the lab's trainer and of TRL's.",
        (
            (f"{LINE} step", "every format and the baselines, 7B"),
            (f"{LINE} step mean_tokens=400", "ragged lengths"),
            (f"{LINE} step \"arms=[nvfp4,'nvfp4 gpus=2']\"", "one GPU beside two, the same completions"),
        ),
    ),
)
COMMANDS: dict[str, Command[Any]] = {
    options.BENCHMARK: Command(f"{LINE} {options.BENCHMARK}", about, options, measure, examples, alone=True)
    for options, about, examples in ABOUT
}
main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
