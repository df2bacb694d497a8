"""Show sampled completions of a run with their rewards: `python -m qerl_lab.tools.samples RUN_DIR [step=N]`."""

from dataclasses import dataclass
from pathlib import Path

from qerl_lab.cli.grammar import Command
from qerl_lab.config.option import ConfigError, option
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.line_files import Sample
from qerl_lab.system import exits


@dataclass
class SamplesOptions:
    step: int | None = option(None, "step to show, from 1; null is the last step", at_least=1)
    run_dir: str = option("", "directory of the run; the key may be left out")


def format_step(run_dir: Path, step: int | None) -> str:
    """Format the completions recorded for a step (None: the last) as text.

    Raises ConfigError if `run_dir` is no directory of a run, if the step has none, or if the record is damaged.
    """
    run = RunDirectory(run_dir)
    run.checked_metrics()  # raises for a damaged record, as `report` and `resync` do
    samples = run.samples()
    if not samples:
        run.settings()  # raises if this is no directory of a run, such as the directory of a sweep
        raise ConfigError(
            f"{run_dir} has no sample in samples.jsonl. Type the directory of a run that has completed a step."
        )
    steps = [sample.step for sample in samples]
    wanted = step or steps[-1]
    if wanted not in steps:
        raise ConfigError(
            f"step={step} is not in {run_dir}/samples.jsonl; allowed: {steps[0]} to {steps[-1]}. Type step={steps[-1]}."
        )
    return "\n\n".join(format_sample(sample) for sample in samples if sample.step == wanted)


def format_sample(sample: Sample) -> str:
    """Format a sampled completion, with control characters escaped so that it cannot control the terminal."""
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.rewards.items())
    end = "" if sample.finished else ", cut at the token limit"
    head = f"step {sample.step}, {sample.question_id}: reward {sum(sample.rewards.values()):g} ({parts}){end}"
    body = f"{sample.question}\n{sample.completion}"
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in body)
    return "\n".join([head, *(f"  {line}" for line in shown.split("\n"))])


COMMAND = Command(
    "python -m qerl_lab.tools.samples RUN_DIR",
    "Show sampled completions of a run with their rewards.",
    SamplesOptions,
    lambda options: print(format_step(Path(options.run_dir).expanduser(), options.step)),
    examples=(
        ("python -m qerl_lab.tools.samples runs/nvfp4_aqn/seed0/20260131-120000", "the last step that is recorded"),
        ("python -m qerl_lab.tools.samples runs/nvfp4_aqn/seed0/20260131-120000 step=1", "the first step"),
    ),
    required=("run_dir",),
    bare="run_dir",
)
main = exits.command(COMMAND.run)


if __name__ == "__main__":
    exits.run(main)
