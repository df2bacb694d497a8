"""Check, when the engine is built, that the server's model and settings match the policy's.

A server that differs would train the policy on another model's completions, and nothing later would notice.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl_lab import formats
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, EngineFailed, Sampling
from qerl_lab.rollout.vllm_server.client import API_KEY, Refused, Server
from qerl_lab.rollout.vllm_server.server_command import backend_of

LINE = "Type python -m qerl_lab.tools.serve_line and the words of this run for the command that starts it right."
PROBE = "A train has 12 cars with 30 seats each. How many seats are there?"
PROBE_TOKENS = 16
# Largest mean difference of log-probs in nats. A different order of summation stays below a fifth of it
# (tests/gpu/test_vllm_engine.py holds 0.02 for bfloat16). Other weights exceed it, unless they differ as little as two
# rounding rules of a format.
NEAR = {torch.float32: 0.01, torch.bfloat16: 0.1}


def check_settings(server: Server, cfg: RunConfig, policy: Policy) -> None:
    """Raise ConfigError if there is no server, or its settings differ from those that `serve_line` prints."""
    longest = cfg.rollout.max_prompt_tokens + cfg.rollout.max_completion_tokens
    card = _asked(server, "GET", "/v1/models")["data"][0]
    if card["max_model_len"] < longest:
        raise differs(server, f"has a context of {card['max_model_len']} tokens", "rollout.max_prompt_tokens + "
                      f"max_completion_tokens = {longest}")  # fmt: skip
    workers = _asked(server, "POST", "/collective_rpc", {"method": "qerl_describe"})["results"]
    for told in workers:
        if not isinstance(told, dict) or "dtype" not in told:
            raise ConfigError(
                f"{server.name} has a worker that answers what was asked before: vLLM's workers are out of step after "
                f"an error in several of them. Start it again. {LINE}"
            )
        _check_format(server, cfg, told)
        dtype = str(policy.model.dtype).removeprefix("torch.")
        for what, given, wanted in (
            ("computes in", told["dtype"], dtype),
            ("tells log-probs of the kind", told["logprobs_mode"], "processed_logprobs"),
            ("takes its sampling from", told["generation_config"], "vllm"),
            ("has a key-value cache of the kind", told["kv_cache_dtype"], cfg.rollout.vllm.kv_cache_dtype),
            ("computes 4-bit products by the kernels of", told["linear_backend"], backend_of(cfg)),
            ("adapters at once:", told["loras"], 1),
        ):
            if given != wanted:
                raise differs(server, f"{what} {given}", str(wanted))
        if told["lora_rank"] < cfg.lora.rank:
            raise differs(server, f"holds adapters of rank {told['lora_rank']}", f"lora.rank={cfg.lora.rank}")


def _check_format(server: Server, cfg: RunConfig, told: dict[str, Any]) -> None:
    """Raise ConfigError if the server's base has another format than the run's."""
    packed, name = told["quantization_config"], told["quantization"] or DENSE_FORMAT
    if packed is not None:
        try:
            name = formats.recognize(packed).weight_format.NAME
        except ValueError as error:
            name = f"{name} ({error})"
    if name != cfg.format.name:
        raise differs(server, f"serves the base in {name}", f"format.name={cfg.format.name}")


def differs(server: Server, found: str, wanted: str) -> ConfigError:
    """Return the error for a server setting that differs from the run's."""
    return ConfigError(f"{server.name} {found}; allowed for this run: {wanted}. {LINE}")


def _asked(server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request at the start of a run. Raises ConfigError for any error, because the server was started
    wrongly.
    """
    try:
        return server.ask(method, path, body)
    except TimeoutError:
        raise ConfigError(f"{server.name} did not answer {path}. {LINE}") from None
    except EngineFailed as error:
        raise ConfigError(str(error)) from error
    except Refused as error:
        if error.status in (401, 403):
            raise ConfigError(
                f"{server.name} wants a key. Type {API_KEY}=KEY in front of the command, the server's own."
            ) from error
        raise ConfigError(
            f"{server.name} refuses {path} (HTTP {error.status}: {error}): it was started without the settings of "
            f"development, or without the lab's worker class. {LINE}"
        ) from error


def cannot_load(server: Server, folder: Path, why: str) -> ConfigError:
    """Return the error for a server that cannot read the adapter's folder."""
    return ConfigError(
        f"{server.name} cannot load the adapter from {folder} ({why}). It reads the files itself. Type "
        f"rollout.vllm_server.adapter_dir=DIR, a folder that server and trainer see under one path, if it does not see "
        f"them. {LINE}"
    )


def check_norms(held: dict[str, Tensor], policy: Policy, cfg: RunConfig) -> None:
    """Raise ConfigError unless the served model has the policy's norms: same names, same weights, in float32."""
    url = cfg.rollout.vllm_server.url
    for name, clean in policy.clean_norms.items():
        if name not in held:
            raise ConfigError(
                f"the vLLM server at {url} has no layer {name}: it serves another model than model.path="
                f"{cfg.model.path}, or names its layers otherwise, so that no noise can be put on them. {LINE}"
            )
        if held[name].dtype != torch.float32:
            raise ConfigError(
                f"the vLLM server at {url} holds {name} in {held[name].dtype}, which cannot hold a small sigma; "
                f"allowed: torch.float32. {LINE}"
            )
        if held[name].shape != clean.shape or not torch.equal(held[name], clean):
            raise ConfigError(
                f"the vLLM server at {url} holds another weight of {name} than model.path={cfg.model.path}: it serves "
                f"another model. {LINE}"
            )


def check_logprobs(engine: Engine, policy: Policy, cfg: RunConfig) -> None:
    """Raise ConfigError unless the server's log-probs of a sampled text are near the policy's."""
    prompt = policy.tokenizer(PROBE)["input_ids"][: cfg.rollout.max_prompt_tokens]
    tokens = min(PROBE_TOKENS, cfg.rollout.max_completion_tokens)
    out = engine.generate([prompt], 1, Sampling(tokens, seed=0))
    ids = out.completion_ids_P_G[0][0]
    with policy.as_sampler({name: norm.data for name, norm in policy.norms.items()}):
        logits = policy.model(input_ids=torch.tensor([prompt + ids], device=policy.device)).logits[0]
    own = logits[len(prompt) - 1 : -1].float().log_softmax(-1)[torch.arange(len(ids)), ids].cpu()
    gap = (own - torch.tensor(out.logprobs_P_G[0][0])).abs().mean().item()
    if not gap < NEAR[policy.model.dtype]:  # NaN too
        raise ConfigError(
            f"the vLLM server at {cfg.rollout.vllm_server.url} is {gap:.3g} nats a token away from the policy on a "
            f"fixed prompt; allowed: {NEAR[policy.model.dtype]:g}. It serves other weights than model.path="
            f"{cfg.model.path} in {cfg.format.name}. {LINE}"
        )
