"""Check, when the engine is built, that the server's model and settings match the policy's.

A server that differs would train the policy on another model's completions, and nothing later would notice.
"""

from typing import Any

import torch

from qerl_lab import formats
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, EngineFailed, Sampling
from qerl_lab.rollout.vllm_server.client import Refused, Server, Unanswered
from qerl_lab.rollout.vllm_server.server_command import settings

LINE = "Type python -m qerl_lab.tools.serve_line and the words of this run for the command that starts it right."
AT_LEAST = ("max_model_len", "max_lora_rank")  # a server may have more of these
PROBE = "A train has 12 cars with 30 seats each. How many seats are there?"
PROBE_TOKENS = 16
# Largest mean difference of log-probs in nats. A different order of summation stays below a fifth of it
# (tests/gpu/test_vllm_engine.py holds 0.02 for bfloat16). Other weights exceed it, unless they differ as little as two
# rounding rules of a format.
NEAR = {torch.float32: 0.01, torch.bfloat16: 0.1}


def check_settings(server: Server, cfg: RunConfig, policy: Policy) -> None:
    """Raise ConfigError if there is no server, or if its settings differ from those that `serve_line` prints."""
    try:
        workers = server.ask("POST", "/collective_rpc", {"method": "qerl_describe"})["results"]
    except (Refused, Unanswered) as error:
        raise ConfigError(f"{error}. {LINE}") from error
    except EngineFailed as error:
        raise ConfigError(str(error)) from error
    wanted = settings(cfg, policy.model.dtype) | {"format": cfg.format.name}
    for found in workers:
        found["format"] = format_of(found.pop("quantization"), found.pop("quantization_config"))
        for key, value in found.items():
            least = key in AT_LEAST
            if value < wanted[key] if least else value != wanted[key]:
                allowed = f"{'at least ' if least else ''}{wanted[key]}"
                raise ConfigError(f"{server.name} has {key}={value}; allowed for this run: {allowed}. {LINE}")


def format_of(name: str | None, config: dict[str, Any] | None) -> str:
    """Return the weight format of the server's base, or vLLM's name of it if the lab does not know it."""
    try:
        return formats.recognize(config).weight_format.NAME if config is not None else name or DENSE_FORMAT
    except ValueError as error:
        return f"{name} ({error})"


def check_logprobs(server: Server, engine: Engine, policy: Policy, cfg: RunConfig) -> None:
    """Raise ConfigError unless the server's log-probs of a sampled text are near the policy's."""
    prompt = policy.tokenizer(PROBE)["input_ids"][: cfg.rollout.max_prompt_tokens]
    out = engine.generate([prompt], 1, Sampling(min(PROBE_TOKENS, cfg.rollout.max_completion_tokens), seed=0))
    ids = out.completion_ids_P_G[0][0]
    with policy.as_sampler({name: norm.data for name, norm in policy.norms.items()}):
        logits = policy.model(input_ids=torch.tensor([prompt + ids], device=policy.device)).logits[0]
    own = logits[len(prompt) - 1 : -1].float().log_softmax(-1)[torch.arange(len(ids)), ids].cpu()
    gap, near = (own - torch.tensor(out.logprobs_P_G[0][0])).abs().mean().item(), NEAR[policy.model.dtype]
    if not gap < near:  # NaN too
        raise ConfigError(
            f"{server.name} is {gap:.3g} nats a token away from the policy on a fixed prompt; allowed: {near:g}. It "
            f"serves other weights than model.path={cfg.model.path} in {cfg.format.name}. {LINE}"
        )
