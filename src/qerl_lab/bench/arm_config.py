"""The job of one arm's process, and the run configuration of a lab arm. Imports no torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab.bench.bench_options import Arm, Row
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB

BLOCK = 128  # tokens per block of vLLM's key-value cache: its largest default
Options = Mapping[str, Any]  # options of the benchmark


@dataclass(frozen=True)
class Job:
    """What the process of one arm measures: `options` are the benchmark's, `folder` holds the checkpoint."""

    benchmark: str
    arm: Arm
    rank: int
    architecture: dict[str, Any]
    folder: str
    adapter: str
    options: dict[str, Any]

    @property
    def config(self) -> RunConfig:
        """Return the configuration of the run that measures a lab arm."""
        return arm_config(self.benchmark, self.arm, self.options, self.rank, self.architecture, self.folder)

    @property
    def about(self) -> Row:
        """Return the columns that all rows of the arm share."""
        return {
            "model": self.options["model"], "arm": self.arm.name, "format": self.arm.format,
            "baseline": self.arm.is_baseline, "rank": self.rank, "gpus": self.arm.gpus,
        }  # fmt: skip


def read_job(file: Path) -> Job:
    """Read the job file that `arm_processes.measure` wrote."""
    job = json.loads(file.read_text(encoding="utf-8"))
    return Job(**job | {"arm": Arm(**job["arm"])})


def arm_config(benchmark: str, arm: Arm, options: Options, rank: int, architecture: Options, folder: str) -> RunConfig:
    """Build the checked configuration of a lab arm's run on the checkpoint in `folder`. Raises ConfigError."""
    given = {
        "model.path": folder, "model.name": options["model"], "format.name": arm.format, "lora.rank": rank,
        "rollout.engine": "vllm", "rollout.max_prompt_tokens": options["prompt"],
        "rollout.max_completion_tokens": options["new"], "eval.questions": 0, "tracking.mlflow": False,
        "checkpoint.every": 0, "cpu_threads": 0,
    }  # fmt: skip
    if benchmark == "rollout":  # the engine has room for the largest batch
        batch, longest = max(options["batches"]), options["prompt"] + options["new"]
        given |= {"rollout.batch_size": batch, "rollout.vllm.kv_cache_gib": kv_gib(architecture, batch, longest)}
    else:
        groups, group_size = options["groups"], options["group_size"]
        given |= {
            "rollout.prompts_per_step": groups, "rollout.group_size": group_size,
            "rollout.batch_size": groups * group_size, "optim.micro_batch_size": options["micro_batch"],
            "model.gradient_checkpointing": True, "steps": options["steps"] + 1,
        }  # fmt: skip
    nested: dict[str, Any] = {}
    for name, value in (given | arm.words).items():
        *groups, key = name.split(".")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
        node[key] = value
    return from_dict(nested)


def kv_gib(architecture: Options, sequences: int, longest: int) -> float:
    """Return the GiB of a bfloat16 key-value cache for `sequences` of `longest` tokens, plus one block each."""
    head_dim = architecture["hidden_size"] // architecture["num_attention_heads"]
    per_token = 4 * architecture["num_hidden_layers"] * architecture["num_key_value_heads"] * head_dim
    return float((sequences + 1) * (math.ceil(longest / BLOCK) + 1) * BLOCK * per_token / GIB)
