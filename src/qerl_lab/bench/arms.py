"""Arms, each in a process of its own: one engine a process, and all memory comes back. A dead arm is a row too.

The process is `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl`. A checkpoint is written once for the arms that
share its format, and removed before the next one.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_lab import formats
from qerl_lab.bench import random_model
from qerl_lab.bench.options import TRL, VLLM, Arm, RolloutOptions, StepOptions, arm_of
from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import FormatConfig

Row = dict[str, Any]
LINES = 40  # of the log that are kept of a process that could not say why it died


@dataclass(frozen=True)
class Job:
    """What the process of one arm is told. `options` are those of the benchmark, `folder` holds the checkpoint."""

    benchmark: str
    arm: Arm
    rank: int
    architecture: dict[str, Any]
    folder: str
    adapter: str
    options: dict[str, Any]

    @property
    def about(self) -> Row:
        """What every row of the arm begins with."""
        return {
            "model": self.options["model"], "arm": self.arm.name, "format": self.arm.format,
            "baseline": self.arm.is_baseline, "rank": self.rank,
        }  # fmt: skip


def read_job(file: Path) -> Job:
    """The job that `run` wrote."""
    job = json.loads(file.read_text(encoding="utf-8"))
    return Job(**job | {"arm": Arm(**job["arm"])})


def refuse_small_scratch(options: RolloutOptions | StepOptions) -> None:
    """Raise ConfigError where the largest checkpoint has no room. Makes no tensor."""
    scratch, device = Path(options.scratch), torch.device("cpu")
    needed = {}
    for name in {arm.format for arm in arms(options)}:
        built = formats.build(FormatConfig(name=name))
        _, shards = random_model.plan(ARCHITECTURES[options.model], built, device)
        needed[name] = sum(shard.bytes for shard in shards)
    largest = max(needed, key=lambda name: needed[name])
    free, asked = shutil.disk_usage(scratch).free, 1.02 * needed[largest]  # adapter and tokenizer
    if free < asked:
        raise ConfigError(
            f"scratch={scratch} has {free / 1e9:.1f} GB free, and {options.model} in {largest} takes "
            f"{asked / 1e9:.1f} GB: {(asked - free) / 1e9:.1f} GB are missing. Type scratch=DIR of a larger disk."
        )


def arms(options: RolloutOptions | StepOptions) -> list[Arm]:
    """The arms, those of one format one after another."""
    baselines = VLLM if isinstance(options, RolloutOptions) else TRL
    every = [arm_of(text, baselines) for text in options.arms]
    order = list(dict.fromkeys(arm.format for arm in every))
    return sorted(every, key=lambda arm: order.index(arm.format))


def run(benchmark: str, options: RolloutOptions | StepOptions) -> Iterator[Row]:
    """Yield the rows of every arm and rank; of one that died those that it had, and one with `died`, the reason."""
    ranks = options.ranks if isinstance(options, RolloutOptions) else [options.rank]
    with tempfile.TemporaryDirectory(prefix="qerl-lab-bench-", dir=options.scratch) as name:
        scratch, written = Path(name), ""
        for rank in ranks:
            random_model.write_adapter(scratch / f"rank{rank}", ARCHITECTURES[options.model], rank)
        for arm in arms(options):
            if arm.format != written:
                shutil.rmtree(scratch / written) if written else None
                write_checkpoint(scratch / arm.format, arm.format, options)
                written = arm.format
            for rank in ranks:
                job = Job(
                    benchmark, arm, rank, ARCHITECTURES[options.model], str(scratch / written),
                    str(scratch / f"rank{rank}"), asdict(options),
                )  # fmt: skip
                yield from run_one(job, scratch, options.timeout_minutes)


def write_checkpoint(folder: Path, weight_format: str, options: RolloutOptions | StepOptions) -> None:
    """Write the checkpoint that arms share, on the GPU where there is one, whose memory is given back."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mean_tokens = options.mean_tokens if isinstance(options, StepOptions) else 0.0
    built = formats.build(FormatConfig(name=weight_format))
    random_model.write(folder, ARCHITECTURES[options.model], built, device, mean_tokens)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_one(job: Job, scratch: Path, timeout_minutes: float) -> list[Row]:
    """Run the process of one arm, and read its rows."""
    asked, rows, log = (scratch / name for name in ("job.json", "rows.jsonl", "log.txt"))
    asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
    rows.write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "qerl_lab.bench.one_arm", str(asked), str(rows)]
    with log.open("w", encoding="utf-8") as out:
        try:
            status = subprocess.run(command, stdout=out, stderr=out, timeout=60 * timeout_minutes).returncode
        except subprocess.TimeoutExpired:
            status = None
    measured = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    if (status == 0 and measured) or dead(measured):
        return measured
    said = log.read_text("utf-8", "replace").splitlines()[-LINES:]
    return [*measured, job.about | {"died": why(status, timeout_minutes), "log": "\n".join(said)}]


def why(status: int | None, timeout_minutes: float) -> str:
    """The reason of a process that could not write its own: its time was over, or it was ended from outside."""
    if status is None:
        return f"took longer than timeout_minutes={timeout_minutes:g}"
    memory = " (the memory of the host may be full)" if status == -9 else ""
    return f"ended by signal {-status}{memory}" if status < 0 else f"exit status {status}, and no row"


def dead(rows: Sequence[Row]) -> list[Row]:
    """The rows that say that an arm died."""
    return [row for row in rows if "died" in row]
