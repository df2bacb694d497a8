"""`python -m qerl_lab.bench COMMAND KEY=VALUE ...`: measure, print, write JSON, draw. COMMANDS lists the commands."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from qerl_lab.bench.bench_options import AnyOptions, RolloutOptions, Row, StepOptions, TrainStepOptions
from qerl_lab.bench.job import check
from qerl_lab.cli.grammar import Command, main_of
from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.record.environment import environment
from qerl_lab.system import exits
from qerl_lab.system.disk import make_directory, replace_file
from qerl_lab.system.terminal import quiet_third_parties


def measure(options: AnyOptions) -> None:
    """Measure each arm in its own process; print and write each row at once, and at the end a table and a figure.

    Raises ConfigError before measuring if options are invalid or there is no GPU, and ValueError at the end if an arm
    died.
    """
    check(options)
    require_gpu()
    stem = Path(options.out)
    as_json, as_png = stem.with_suffix(".json"), stem.with_suffix(".png")  # ValueError without a file name
    make_directory(stem.parent, f"out={options.out}")
    quiet_third_parties()
    from qerl_lab.bench import arm_processes
    from qerl_lab.report import bench, bench_figures

    arm_processes.prepare(options)
    for number in exits.stop_signals():  # raise KeyboardInterrupt, so that the checkpoint is removed
        signal.signal(number, signal.default_int_handler)
    rows = list[Row]()
    result = {
        "benchmark": options.BENCHMARK, "environment": environment(), "options": vars(options), "rows": rows
    }  # fmt: skip
    for row in arm_processes.run(options):
        cells = ((key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in row.items())
        shown = (f"{key} {cell}" for key, cell in cells if key not in ("log", "gib_by_owner"))
        print("  ".join(shown), file=sys.stderr, flush=True)
        rows.append(row)
        replace_file(as_json, json.dumps(result, indent=1).encode() + b"\n")
    bench_figures.draw(result, as_png)
    print(bench.text(result))
    print("  ".join(str(file) for file in (as_json, as_png) if file.exists()))
    if dead := [row["arm"] for row in rows if "died" in row]:
        raise ValueError(f"{with_noun(len(dead), 'arm')} died: {'; '.join(dead)}. The table says of what.")


def require_gpu() -> None:
    """Raise ConfigError if torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("The benchmarks need an NVIDIA GPU, and torch sees none here.")


LINE = "python -m qerl_lab.bench"
COMMANDS: dict[str, Command[Any]] = {
    "train_step": Command(
        f"{LINE} train_step",
        "Tokens per second and peak memory of LoRA training steps of a whole model with random weights.",
        TrainStepOptions,
        measure,
        ((f"{LINE} train_step", "every format and the baselines, 7B"),),
        alone=True,
    ),
    "rollout": Command(
        f"{LINE} rollout",
        "Completion tokens per second of the lab's engine and of vLLM as it is; each arm in a process of its own.",
        RolloutOptions,
        measure,
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
        measure,
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
