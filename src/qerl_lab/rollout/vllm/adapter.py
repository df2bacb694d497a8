"""Put the policy's adapter into vLLM: as dense products in vLLM's layers, or through vLLM's own LoRA.

Either way vLLM holds exactly one adapter, in buffers with fixed addresses, because CUDA graphs contain the addresses.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from vllm import LLM
from vllm.lora.request import LoRARequest

from qerl_lab.config.schema import RunConfig
from qerl_lab.model.linear import packed_layers
from qerl_lab.rollout.vllm import one_adapter
from qerl_lab.rollout.vllm.backends import FP4_TILES
from qerl_lab.rollout.vllm.base import scratch_folder
from qerl_lab.rollout.vllm.one_adapter import AdapterBuffers
from qerl_lab.rollout.vllm.transfer import adapter_bytes, max_rank, write_adapter_config, write_adapter_weights

NAME, ID = "policy", 1


class DenseAdapter:
    """Puts the policy's adapter into buffers of vLLM's layers (`one_adapter`), which `sync` updates in place."""

    request = None

    def __init__(self, model: PeftModel, cfg: RunConfig) -> None:
        self.model, self.lora, self.cfg = model, cfg.lora, cfg

    def arguments(self, folder: Path, backend: str) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` that this adapter needs.

        `folder` is the model's directory, `backend` the kernel from `backends.choose_backend`.
        """
        vllm_cfg = self.cfg.rollout.vllm
        routes = one_adapter.Routes(backend == FP4_TILES, vllm_cfg.dense_rows, vllm_cfg.dense_dtype)
        return one_adapter.llm_arguments(folder, self.lora.rank, self.lora.target_modules, routes)

    def attach(self, vllm_model: nn.Module) -> None:
        """Find the adapter's buffers in `vllm_model`, and let its layers use the policy's packed weights.

        The layers unpack these for calls with many rows (`use_packed_layers`). With FP8 activations they do not,
        because the product with unpacked weights would take activations in 16 bits.
        """
        layers, adapter = packed_layers(self.model.get_base_model()), one_adapter.lora_modules(self.model)
        if self.cfg.format.activations != "fp8":
            one_adapter.use_packed_layers(vllm_model, layers)
        self.buffers = AdapterBuffers(vllm_model, adapter)

    def sync(self, llm: LLM) -> None:
        """Copy the policy's adapter into vLLM's layers."""
        self.buffers.write((self.lora.alpha or self.lora.rank) / self.lora.rank)

    def close(self) -> None:
        """Drop the references to vLLM's buffers."""
        del self.buffers


class AdapterFile:
    """Puts the policy's adapter into files, which vLLM's own LoRA loads."""

    def __init__(self, model: PeftModel, cfg: RunConfig) -> None:
        self.model, self.rank, self._open = model, cfg.lora.rank, ExitStack()
        self.folder: Path = self._open.enter_context(scratch_folder(adapter_bytes(model)))
        # To send with a prompt. With `load_inplace` vLLM would read the files again at every token.
        self.request = LoRARequest(NAME, ID, str(self.folder))
        write_adapter_config(model, self.folder)

    def arguments(self, folder: Path, backend: str) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` for this adapter. Raises ConfigError if vLLM allows no rank that high."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank(self.rank)}

    def sync(self, llm: LLM) -> None:
        """Write the policy's adapter to files and let vLLM reload them. Raises EngineFailed if writing fails."""
        write_adapter_weights(self.model, self.folder)
        llm.llm_engine.add_lora(LoRARequest(NAME, ID, str(self.folder), load_inplace=True))

    def close(self) -> None:
        """Remove the adapter's files."""
        self._open.close()
