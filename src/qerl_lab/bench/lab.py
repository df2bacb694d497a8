"""Build the lab's policy and engine on a random checkpoint."""

import time
from pathlib import Path

from qerl_lab import rollout
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import base_gib
from qerl_lab.bench.job import Job
from qerl_lab.model.policy import Policy, device_of, load_adapter
from qerl_lab.model.policy import build as build_policy
from qerl_lab.rollout.engine import Engine


class RandomPolicy(Policy):
    """A policy without its tokenizer's end token, which a random checkpoint cannot sample and engines refuse."""

    def end_ids(self) -> list[int]:
        """Return the token ids that end a completion, without the tokenizer's; none if the checkpoint has no other.

        A checkpoint made with a mean completion length has others: see `random_model.end_ids`.
        """
        return [index for index in super().end_ids() if index != self.tokenizer.eos_token_id]


def build(job: Job) -> tuple[Policy, Engine, Row]:
    """Build a job's policy with its adapter, and the engine on it.

    The row has the seconds that each took, the GiB of the policy's base weights, and the engine's `linear_backend`.
    """
    cfg, started = job.config(), time.perf_counter()
    policy = RandomPolicy(**vars(build_policy(cfg, device_of(cfg.device))))
    load_adapter(policy.model, Path(job.adapter))
    loaded = time.perf_counter()
    engine = rollout.build(cfg, policy)
    row: Row = {
        "load_seconds": loaded - started, "start_seconds": time.perf_counter() - loaded,
        "policy_gib": base_gib(policy.model),
    }  # fmt: skip
    if engine.linear_backend is not None:
        row["linear_backend"] = engine.linear_backend  # the lab's setting: vLLM's own does not know the lab's kernel
    return policy, engine, row
