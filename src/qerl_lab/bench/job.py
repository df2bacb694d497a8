"""The job of one arm's process. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from qerl_lab.bench.bench_options import Arm, Row
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB

BLOCK = 128  # tokens per block of vLLM's key-value cache: its largest default


@dataclass(frozen=True)
class Job:
    """What the process of one arm measures.

    Attributes:
        folder: directory of the checkpoint.
        adapter: directory of the adapter, in PEFT's format.
        options: the benchmark's options by name.
    """

    benchmark: str
    arm: Arm
    rank: int
    architecture: dict[str, Any]
    folder: str
    adapter: str
    options: dict[str, Any]

    @property
    def about(self) -> Row:
        """Return the columns that all rows of the arm share: model, arm, format, baseline, rank, gpus."""
        return {
            "model": self.options["model"], "arm": self.arm.name, "format": self.arm.format,
            "baseline": self.arm.is_baseline, "rank": self.rank, "gpus": self.arm.gpus,
        }  # fmt: skip

    def config(self) -> RunConfig:
        """Build the configuration of the run that measures an arm of the lab. Raises ConfigError if it is invalid."""
        options = self.options
        given = {
            "model.path": self.folder, "model.name": options["model"], "format.name": self.arm.format,
            "lora.rank": self.rank, "eval.questions": 0, "tracking.mlflow": False, "checkpoint.every": 0,
            "cpu_threads": 0,
        }  # fmt: skip
        if self.benchmark != "train_step":
            given |= {
                "rollout.engine": "vllm", "rollout.max_prompt_tokens": options["prompt"],
                "rollout.max_completion_tokens": options["new"],
            }  # fmt: skip
        if self.benchmark == "rollout":  # the engine has room for the largest batch
            batch, longest = max(options["batches"]), options["prompt"] + options["new"]
            cache_gib = kv_gib(self.architecture, batch, longest)
            given |= {"rollout.batch_size": batch, "rollout.vllm.kv_cache_gib": cache_gib}
        if self.benchmark == "step":
            groups, group_size = options["groups"], options["group_size"]
            given |= {
                "rollout.prompts_per_step": groups, "rollout.group_size": group_size,
                "rollout.batch_size": groups * group_size, "optim.micro_batch_size": options["micro_batch"],
                "model.gradient_checkpointing": True, "steps": options["steps"] + 1,
            }  # fmt: skip
        nested = OmegaConf.create()
        for key, value in (given | self.arm.overrides).items():
            OmegaConf.update(nested, key, value)
        values: Any = OmegaConf.to_container(nested)
        return from_dict(values)


def kv_gib(architecture: Mapping[str, Any], sequences: int, longest: int) -> float:
    """Return the GiB of a bfloat16 key-value cache for `sequences` of `longest` tokens.

    Adds room for one more sequence, and for one more block of `BLOCK` tokens in each.
    """
    head_dim = architecture["hidden_size"] // architecture["num_attention_heads"]
    per_token = 4 * architecture["num_hidden_layers"] * architecture["num_key_value_heads"] * head_dim
    return float((sequences + 1) * (math.ceil(longest / BLOCK) + 1) * BLOCK * per_token / GIB)
