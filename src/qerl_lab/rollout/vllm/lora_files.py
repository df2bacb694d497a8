"""Write the adapter as files for vLLM's own LoRA: PEFT's two files in a folder, the weights anew at every sync.

Imports no vllm, because the server that reads the files may run elsewhere.
"""

import os
from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.disk import let_read

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # allowed by vLLM's LoRAConfig


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
