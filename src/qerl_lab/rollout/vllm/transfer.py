"""Hand the adapter and the norms to vLLM, in this process or in a server: arguments, files and JSON.

Imports no vllm, because a server may run elsewhere.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.disk import let_read

WORKER = "qerl_lab.rollout.vllm.worker.NormWorker"
FLOAT32_NORMS = "qerl_lab_float32_norms"  # key in additional_config
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # allowed by vLLM's LoRAConfig


def norm_arguments(names: Sequence[str]) -> dict[str, Any]:
    """Return the `vllm.LLM` arguments that hold the norms in `names` (last part of the layer name) in float32.

    `additional_config` carries the names because it is part of vLLM's key for compiled code. Otherwise a graph compiled
    for bfloat16 norms would read float32 ones.
    """
    return {"worker_cls": WORKER, "additional_config": {FLOAT32_NORMS: list(names)}}


def check_norms(held: Mapping[str, Tensor], clean: Mapping[str, Tensor], holder: str, way_out: str) -> None:
    """Raise ConfigError unless an engine holds the policy's clean norms: same names, same weights, in float32.

    The message begins with `holder`, the engine, and ends with `way_out`, what to type.
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
        raise ConfigError(f"{holder} {why}. {way_out}")


def encoded(tensor: Tensor) -> list[str]:
    """Encode a tensor as dtype and base64, bit for bit. Decimal numbers take four times the space and cannot be NaN."""
    held = tensor.detach().cpu().contiguous()
    return [str(held.dtype).removeprefix("torch."), base64.b64encode(held.view(torch.uint8).numpy().tobytes()).decode()]


def decoded(dtype: str, data: str) -> Tensor:
    """Decode the result of `encoded` to a tensor with one axis."""
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))


def max_rank(rank: int) -> int:
    """Return the smallest rank allowed by vLLM that holds `rank`. Raises ConfigError above the largest."""
    if rank > MAX_RANKS[-1]:
        raise ConfigError(
            f"lora.rank={rank} is more than vLLM takes; allowed: up to {MAX_RANKS[-1]}. "
            f"Type lora.rank={MAX_RANKS[-1]}, or rollout=transformers."
        )
    return next(allowed for allowed in MAX_RANKS if allowed >= rank)


def adapter_bytes(model: PeftModel) -> int:
    """Return the bytes of the adapter's weights."""
    return sum(tensor.nbytes for tensor in get_peft_model_state_dict(model, adapter_name="default").values())


def write_settings(model: PeftModel, folder: Path) -> None:
    """Write adapter_config.json, which does not change during a run."""
    model.peft_config["default"].save_pretrained(folder)


def write_weights(model: PeftModel, folder: Path) -> None:
    """Write the current adapter weights atomically, so that a reader sees the old file or the new one, whole."""
    own = get_peft_model_state_dict(model, adapter_name="default")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
    aside = folder / "adapter_model.new"
    save_file(tensors, aside)
    let_read([aside])
    os.replace(aside, folder / WEIGHTS)
