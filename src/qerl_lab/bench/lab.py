"""Build the lab's policy and engine on a random checkpoint."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab import aqn, rollout
from qerl_lab.bench.arm_processes import Job
from qerl_lab.bench.bench_options import Row
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.model.linear import weight_bytes
from qerl_lab.model.policy import Policy, device_of, load_adapter
from qerl_lab.model.policy import build as build_policy
from qerl_lab.rollout.engine import Engine, Sampling


class RandomPolicy(Policy):
    """A policy without its tokenizer's end token, which a random checkpoint cannot sample and engines refuse."""

    def end_ids(self) -> list[int]:
        """Return the token ids that end a completion: none, or those of `random_model.end_ids`."""
        return [index for index in super().end_ids() if index != self.tokenizer.eos_token_id]


@dataclass
class Built:
    """Policy with the job's adapter, engine, and in `row` the seconds and GiB of building them."""

    cfg: RunConfig
    policy: Policy
    engine: Engine
    row: Row


def build(job: Job) -> Built:
    """Build policy and engine as a run does."""
    cfg, started = job.config, time.perf_counter()
    policy = RandomPolicy(**vars(build_policy(cfg, device_of(cfg.device))))
    load_adapter(policy.model, Path(job.adapter))
    loaded = time.perf_counter()
    engine = rollout.build(cfg, policy)
    row: Row = {
        "load_seconds": loaded - started, "start_seconds": time.perf_counter() - loaded,
        "policy_gib": base_bytes(policy) / GIB,
    }  # fmt: skip
    if engine.linear_backend is not None:
        row["linear_backend"] = engine.linear_backend  # the lab's setting: vLLM's own does not know the lab's kernel
    return Built(cfg, policy, engine, row)


def base_bytes(policy: Policy) -> int:
    """Return the bytes of the trainer's base without the adapter, counted as for TRL's arms."""
    learned = sum(parameter.nbytes for parameter in policy.model.parameters() if parameter.requires_grad)
    return weight_bytes(policy.model).total - learned


class LabSampler:
    """The lab's engine as a `rollout.Sampler`."""

    def __init__(self, engine: Any, row: Row) -> None:
        self.engine, self.llm, self.row = engine, engine.llm, row  # `llm` is vLLM's object; some engines have none

    def renew(self) -> None:
        """Send adapter and norms to the engine, as before every rollout."""
        self.engine.sync(aqn.CLEAN)

    def generate(self, prompt_ids_P: list[list[int]], new: int, seed: int) -> list[list[float]]:
        """Sample one completion of each prompt; return its log-probs."""
        out = self.engine.generate(prompt_ids_P, 1, Sampling(new, seed=seed))
        return [group[0] for group in out.logprobs_P_G]


def sampler(job: Job) -> LabSampler:
    """Build the lab's sampler of a rollout benchmark."""
    built = build(job)
    return LabSampler(built.engine, built.row)
