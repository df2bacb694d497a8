"""Rollout engines, which turn prompts into completions; `engine.Engine` is their interface."""

from qerl_lab.config.schema import ENGINES, RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine


def build(cfg: RunConfig, policy: Policy) -> Engine:
    """Build the engine that `rollout.engine` names, without noise. Raises ValueError for an unknown name."""
    match cfg.rollout.engine:
        case "transformers":
            from qerl_lab.rollout.transformers import TransformersEngine

            return TransformersEngine(policy, cfg.rollout.batch_size)
        case "vllm":
            from qerl_lab.rollout.vllm.vllm_engine import VllmEngine

            return VllmEngine(policy, cfg)
        case "vllm_server":
            from qerl_lab.rollout.vllm_server.server_engine import VllmServerEngine

            return VllmServerEngine(policy, cfg)
    raise ValueError(f"unknown rollout.engine={cfg.rollout.engine!r}; allowed: {', '.join(ENGINES)}")
