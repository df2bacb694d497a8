"""Hand the adapter and the norms to vLLM, in this process or in a server: arguments, files and JSON.

Imports no vllm, because a server may run elsewhere.
"""

import base64
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.lora import lora_layers
from qerl_lab.rollout.engine import EngineFailed, Sampling
from qerl_lab.system.disk import make_readable

WORKER = "qerl_lab.rollout.vllm.worker.NormWorker"
FLOAT32_NORMS = "qerl_lab_float32_norms"  # key in additional_config
# vLLM uses Marlin for FP8 weights only on GPUs that cannot multiply FP8, and names this variable for the others.
MARLIN_FOR_FP8 = {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # allowed by vLLM's LoRAConfig


def serving_arguments(cfg: RunConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return a run's arguments for vLLM by name: keywords of `vllm.LLM` in this process, or flags of `vllm serve`.

    `dtype` is the compute dtype. The norms that `NormWorker` holds in float32 are named in `additional_config`, because
    it is part of vLLM's key for compiled code. Otherwise a graph compiled for bfloat16 norms would read float32 ones.
    """
    rollout, vllm_cfg = cfg.rollout, cfg.rollout.vllm
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": rollout.max_prompt_tokens + rollout.max_completion_tokens,
        "max_num_seqs": rollout.batch_size,
        "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
        "enforce_eager": vllm_cfg.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # at the temperature of sampling
        "generation_config": "vllm",  # ignore the model's own penalties and cuts
        "worker_cls": WORKER,
        "additional_config": {FLOAT32_NORMS: list(cfg.aqn.norms)},
    }
    if vllm_cfg.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = vllm_cfg.max_num_batched_tokens
    if device.type == "cpu":  # each chunk of a prompt draws a token in vain, and a CPU generator cannot step back
        arguments["enable_chunked_prefill"] = False
    return arguments


def sampling_arguments(sampling: Sampling, group_size: int, seed: int, end_ids: list[int]) -> dict[str, Any]:
    """Return one prompt's sampling arguments: keywords of `vllm.SamplingParams`, or keys of a /v1/completions request.

    `seed` is the prompt's seed, `end_ids` the token ids that end a completion.
    """
    return {
        "n": group_size,
        "seed": seed,  # completion g uses seed + g
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        # vLLM returns log-probs after the nucleus cut, but `Rollout` needs them before it.
        "logprobs": 0 if sampling.top_p == 1 else None,
        "stop_token_ids": end_ids,
    }


def check_norms(held: Mapping[str, Tensor], clean: Mapping[str, Tensor], holder: str, remedy: str) -> None:
    """Compare an engine's norms `held` with the policy's norms `clean`, both by full layer name.

    Raises ConfigError if a norm is missing, has another weight, or is not float32. The message begins with `holder`,
    which names the engine, and ends with `remedy`.
    """
    for name, weight in clean.items():
        if name not in held:
            why = f"has no layer {name}: its model is another, or names layers otherwise, so that no noise can be added"
        elif held[name].dtype != torch.float32:
            why = f"holds {name} in {held[name].dtype}, which cannot hold a small sigma; allowed: torch.float32"
        elif not torch.equal(held[name], weight):
            why = f"holds another weight of {name} than the policy: its model is another"
        else:
            continue
        raise ConfigError(f"{holder} {why}. {remedy}")


def adapted_layers(vllm_model: nn.Module) -> list[str]:
    """List the layers of `vllm_model` for which vLLM's own LoRA holds an adapter, by full name in the checkpoint."""
    found, packed = list[str](), cast(Mapping[str, list[str]], vllm_model.packed_modules_mapping)
    for name, layer in vllm_model.named_modules():
        matrices = getattr(layer, "lora_a_stacked", None)
        if isinstance(matrices, tuple):  # A[1, 1, max_rank, K] of each fused part, 0 where vLLM has found none
            parent, _, fused = name.rpartition(".")
            parts = zip(packed.get(fused, [fused]), matrices, strict=True)
            found += [f"{parent}.{part}" for part, A in parts if A.any()]
    return found


def check_adapter(held: Collection[str], model: PeftModel, holder: str, remedy: str) -> None:
    """Check that an engine holds an adapter in each layer where `model` has one.

    `held` has the full names of the engine's layers with an adapter (`adapted_layers`). vLLM ignores an adapter of a
    layer that it names otherwise, and would sample from the base without an error. Raises ConfigError for such a layer.
    The message begins with `holder`, which names the engine, and ends with `remedy`.
    """
    given = lora_layers(model.get_base_model())
    if missing := [name for name in given if name not in held]:
        raise ConfigError(
            f"{holder} holds no adapter in {len(missing)} of {len(given)} layers that have one, the first "
            f"{missing[0]}: its model is another, or names layers otherwise. {remedy}"
        )


def encode_tensor(tensor: Tensor) -> list[str]:
    """Encode a tensor for JSON as [dtype, base64], bit for bit.

    Decimal numbers would take four times the space, and JSON has no NaN.
    """
    held = tensor.detach().cpu().contiguous()
    return [str(held.dtype).removeprefix("torch."), base64.b64encode(held.view(torch.uint8).numpy().tobytes()).decode()]


def decode_tensor(dtype: str, data: str) -> Tensor:
    """Decode the result of `encode_tensor` to a tensor with one axis."""
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))


def max_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` that vLLM allows for an adapter of `rank`.

    Raises ConfigError if `rank` is higher than all that vLLM allows.
    """
    if rank > MAX_RANKS[-1]:
        raise ConfigError(
            f"lora.rank={rank} is more than vLLM takes; allowed: up to {MAX_RANKS[-1]}. "
            f"Type lora.rank={MAX_RANKS[-1]}, or rollout=transformers."
        )
    return next(allowed for allowed in MAX_RANKS if allowed >= rank)


def adapter_bytes(model: PeftModel) -> int:
    """Return the size of the adapter's weights in bytes."""
    return sum(tensor.nbytes for tensor in get_peft_model_state_dict(model, adapter_name="default").values())


def write_adapter_config(model: PeftModel, folder: Path) -> None:
    """Write the adapter's adapter_config.json, which does not change during a run, to `folder`."""
    model.peft_config["default"].save_pretrained(folder)


def write_adapter_weights(model: PeftModel, folder: Path) -> None:
    """Write the current adapter weights to `folder` atomically.

    Raises EngineFailed if that fails: the folder may be full, or on another host that went away.
    """
    state = get_peft_model_state_dict(model, adapter_name="default")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    aside = folder / "adapter_model.new"
    try:
        save_file(tensors, aside)
        make_readable([aside])
        os.replace(aside, folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise EngineFailed(f"the adapter cannot be written to {folder} ({first_line(error)})") from error
