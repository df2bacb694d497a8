"""Write run directories of made-up runs, for tests of their readers."""

import json
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.record.metrics import encode_line

STEPS = 4
DECLARED = {"bf16": [], "nvfp4": ["format.name"], "nvfp4_aqn": ["format.name", "aqn.schedule"]}


def metrics_of(step: int, steps: int) -> dict[str, float]:
    """Return metrics of a step: entropy falls from 0.4 by 0.2, reward rises to 1; a step takes 2 s for 100 tokens."""
    return {
        "policy/entropy_nats": 0.4 - 0.2 * step / steps, "sampler/entropy_nats": 0.5,
        "reward/mean": step / steps, "reward/answer": 0.8 * step / steps, "reward/format": 0.2 * step / steps,
        "noise/sigma": 0.1, "noise/std_observed": 0.11,
        "step/seconds": 2.0, "step/tokens_per_second": 50.0, "rollout/tokens_per_second": 200.0,
        "seconds/rollout": 0.5, "seconds/train": 1.0, "seconds/sync": 0.1, "memory/rss_gib": 1 + step / 100,
    }  # fmt: skip


def config(experiment: str, seed: int, **changes: Any) -> RunConfig:
    """Return a configuration; `config("bf16", 0, optim__learning_rate=0.1)` changes `optim.learning_rate`."""
    values = asdict(RunConfig())
    values |= {"experiment": experiment, "differs_in": DECLARED[experiment], "seed": seed, "steps": STEPS}
    values["format"]["name"] = experiment.partition("_")[0]
    values["aqn"]["schedule"] = "exponential" if experiment.endswith("_aqn") else "off"
    values["eval"]["samples"] = 4  # the default accuracies are quarters
    for name, value in changes.items():
        *groups, key = name.split("__")
        reduce(getitem, groups, values)[key] = value
    return from_dict(values)


def write_config(folder: Path, cfg: RunConfig) -> None:
    """Write the resolved.yaml of a run."""
    (folder / "resolved.yaml").write_text(yaml.safe_dump(asdict(cfg), sort_keys=False))


def claimed(folder: Path, cfg: RunConfig) -> RunDirectory:
    """Claim a directory for a run, as the command does before it starts the run's process."""
    directory = RunDirectory(folder)
    directory.claim(cfg, TypedCommand("the command"))
    return directory


def make_run(
    folder: Path, experiment: str, seed: int, *, before: list[float] | None = None, after: list[float] | None = None,
    ended: float | None = None, began: dict[str, Any] | None = None, failed: str = "", **changes: Any,
) -> Path:  # fmt: skip
    """Write a finished run with these accuracies by question, or one that failed for a reason.

    `ended` is in unix seconds, `began` the content of env.json.
    """
    folder.mkdir(parents=True)
    cfg = config(experiment, seed, **changes)
    write_config(folder, cfg)
    lines = [json.loads(encode_line(step, metrics_of(step, STEPS))) for step in range(1, STEPS + 1)]
    if ended is not None:
        lines = [line | {"time": ended} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "env.json").write_text(json.dumps(began or {"git_sha": "c0ffee0", "dirty": False}))
    before = [0.0, 0.25, 0.5, 0.75] if before is None else before
    after = [value + 0.25 for value in before] if after is None else after
    phases = {"before": before, "after": after}
    RunDirectory(folder).write_evaluations({phase: _rows(values) for phase, values in phases.items()})
    RunDirectory(folder).fail(failed) if failed else RunDirectory(folder).finish({"seconds": 8.0})
    return folder


def save_results(folder: str, out: str) -> None:
    """Store the runs below `folder` in `out`, as a report does, without its page."""
    from qerl_lab.report import comparison, results

    found = comparison.read([Path(folder)])
    Path(out).mkdir(parents=True, exist_ok=True)
    results.write(Path(out), results.to_tables(found.runs, found.damaged, found.arm_of))


def _rows(accuracy: list[float]) -> pd.DataFrame:
    ids = [f"q{n}" for n in range(len(accuracy))]
    return pd.DataFrame({"id": ids, "accuracy": accuracy, "tokens": np.ones(len(ids)), "sample": "x"})
