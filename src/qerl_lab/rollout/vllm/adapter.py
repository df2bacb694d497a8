"""How the policy's adapter gets into vLLM: as dense products in its layers, or through vLLM's own LoRA.

Both keep exactly one adapter, in buffers that stay where CUDA graphs read them.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from vllm import LLM
from vllm.lora.request import LoRARequest

from qerl_lab.config.schema import ConfigError, RunConfig
from qerl_lab.rollout.vllm import one_adapter
from qerl_lab.rollout.vllm.base import scratch_folder

NAME, ID = "policy", 1
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's LoRAConfig allows


def max_rank(rank: int) -> int:
    """The smallest rank that vLLM makes buffers for and that holds `rank`. Raises ConfigError above the largest."""
    if rank > MAX_RANKS[-1]:
        raise ConfigError(
            f"lora.rank={rank} is more than vLLM takes; allowed: up to {MAX_RANKS[-1]}. "
            f"Type lora.rank={MAX_RANKS[-1]}, or rollout=transformers."
        )
    return next(allowed for allowed in MAX_RANKS if allowed >= rank)


class DenseAdapter:
    """The adapter in buffers of vLLM's layers (`one_adapter`), written in place."""

    request = None

    def __init__(self, model: PeftModel, cfg: RunConfig) -> None:
        self.model, self.lora = model, cfg.lora

    def arguments(self, folder: Path) -> dict[str, Any]:
        return one_adapter.llm_arguments(folder, self.lora.rank, self.lora.target_modules)

    def sync(self, llm: LLM) -> None:
        adapter, scaling = one_adapter.adapter_of(self.model), (self.lora.alpha or self.lora.rank) / self.lora.rank
        llm.apply_model(lambda model: one_adapter.write(model, adapter, scaling))

    def close(self) -> None:
        """The buffers are vLLM's."""


class AdapterFile:
    """The adapter as a LoRARequest takes it: PEFT's two files in a folder, the weights written anew at every sync."""

    def __init__(self, model: PeftModel, cfg: RunConfig) -> None:
        self.model, self.rank, self._open = model, cfg.lora.rank, ExitStack()
        own = get_peft_model_state_dict(model, adapter_name="default")
        self.folder: Path = self._open.enter_context(scratch_folder(sum(tensor.nbytes for tensor in own.values())))
        model.peft_config["default"].save_pretrained(self.folder)

    @property
    def request(self) -> LoRARequest:
        """What a prompt is sent with. Without `load_inplace`, which would read the files again at every token."""
        return LoRARequest(NAME, ID, str(self.folder))

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Raises ConfigError for a rank that vLLM makes no buffers for."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank(self.rank)}

    def sync(self, llm: LLM) -> None:
        """Write the policy's adapter of now, and have vLLM read it in the place of the last."""
        own = get_peft_model_state_dict(self.model, adapter_name="default")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
        save_file(tensors, self.folder / "adapter_model.safetensors")
        llm.llm_engine.add_lora(LoRARequest(NAME, ID, str(self.folder), load_inplace=True))
        if (held := llm.llm_engine.list_loras()) != {ID}:
            raise AssertionError(f"vLLM holds the adapters {held}; allowed: the one")

    def close(self) -> None:
        self._open.close()
