"""Build the lab's policy and engine on a random checkpoint."""

import time
from pathlib import Path

from peft import set_peft_model_state_dict

from qerl_lab import rollout
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import base_gib
from qerl_lab.bench.job import Job
from qerl_lab.model.policy import Policy, adapter_tensors, device_of
from qerl_lab.model.policy import build as build_policy
from qerl_lab.rollout.engine import Engine


class RandomPolicy(Policy):
    """A policy on a random checkpoint. It ignores the end token of its tokenizer.

    The id of that token lies beyond the vocabulary: the model cannot sample it, and engines refuse it.
    """

    def end_ids(self) -> list[int]:
        """Return the token ids that end a completion, except the tokenizer's end token.

        The list is empty unless the checkpoint was written with a mean completion length, see `random_model.end_ids`.
        """
        return [index for index in super().end_ids() if index != self.tokenizer.eos_token_id]


def build(job: Job) -> tuple[Policy, Engine, Row]:
    """Build the policy of a job with its adapter, and the engine that samples from this policy.

    The row has the seconds to start the engine, the GiB of the policy's base weights, and `linear_backend` if the
    engine has such a setting.
    """
    cfg = job.config()
    policy = RandomPolicy(**vars(build_policy(cfg, device_of(cfg.device))))
    tensors = adapter_tensors(Path(job.adapter))  # of all Linears; an arm may set fewer in lora.target_modules
    set_peft_model_state_dict(policy.model, tensors)
    started = time.perf_counter()
    engine = rollout.build(cfg, policy)
    row: Row = {"start_seconds": time.perf_counter() - started, "policy_gib": base_gib(policy.model)}
    if engine.linear_backend is not None:
        row["linear_backend"] = engine.linear_backend  # the lab's setting: vLLM's own does not know the lab's kernel
    return policy, engine, row
