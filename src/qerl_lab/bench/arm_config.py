"""Build the run configuration of a lab arm from the benchmark's options and the arm's words. Imports no torch."""

import math
from collections.abc import Mapping
from typing import Any

from qerl_lab.bench.bench_options import Arm
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB

BLOCK = 128  # tokens per block of vLLM's key-value cache: its largest default
Options = Mapping[str, Any]  # options of the benchmark


def arm_config(benchmark: str, arm: Arm, options: Options, rank: int, architecture: Options, folder: str) -> RunConfig:
    """Return the checked configuration of a run on the checkpoint in `folder`. Raises ConfigError for wrong words."""
    given = {
        "model.path": folder, "model.name": options["model"], "format.name": arm.format, "lora.rank": rank,
        "rollout.engine": "vllm", "rollout.max_prompt_tokens": options["prompt"],
        "rollout.max_completion_tokens": options["new"], "eval.questions": 0, "tracking.mlflow": False,
        "checkpoint.every": 0, "cpu_threads": 0,
    }  # fmt: skip
    given |= (_of_rollout(options, architecture) if benchmark == "rollout" else _of_step(options)) | arm.words
    nested: dict[str, Any] = {}
    for name, value in given.items():
        *groups, key = name.split(".")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
        node[key] = value
    return from_dict(nested)


def _of_rollout(options: Options, architecture: Options) -> dict[str, Any]:
    """Return the configuration keys that size the engine for its largest batch."""
    batch, longest = max(options["batches"]), options["prompt"] + options["new"]
    return {"rollout.batch_size": batch, "rollout.vllm.kv_cache_gib": kv_gib(architecture, batch, longest)}


def _of_step(options: Options) -> dict[str, Any]:
    groups, group_size = options["groups"], options["group_size"]
    return {
        "rollout.prompts_per_step": groups, "rollout.group_size": group_size, "rollout.batch_size": groups * group_size,
        "optim.micro_batch_size": options["micro_batch"], "model.gradient_checkpointing": True,
        "steps": options["steps"] + 1,
    }  # fmt: skip


def kv_gib(architecture: Options, sequences: int, longest: int) -> float:
    """Return the GiB of bfloat16 keys and values for `sequences` of `longest` tokens, plus one block each."""
    head_dim = architecture["hidden_size"] // architecture["num_attention_heads"]
    per_token = 4 * architecture["num_hidden_layers"] * architecture["num_key_value_heads"] * head_dim
    return float((sequences + 1) * (math.ceil(longest / BLOCK) + 1) * BLOCK * per_token / GIB)
