"""How the policy's adapter gets into vLLM: as dense products in its layers, or through vLLM's own LoRA.

Both keep exactly one adapter, in buffers that stay where CUDA graphs read them.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peft import PeftModel
from vllm import LLM
from vllm.lora.request import LoRARequest

from qerl_lab.config.schema import RunConfig
from qerl_lab.model.linear import packed_layers
from qerl_lab.rollout.vllm import one_adapter
from qerl_lab.rollout.vllm.backends import FP4_TILES
from qerl_lab.rollout.vllm.base import scratch_folder
from qerl_lab.rollout.vllm.lora_files import adapter_bytes, max_rank, write_settings, write_weights

NAME, ID = "policy", 1


class DenseAdapter:
    """The adapter in buffers of vLLM's layers (`one_adapter`), written in place."""

    request = None

    def __init__(self, model: PeftModel, cfg: RunConfig) -> None:
        self.model, self.lora, self.cfg = model, cfg.lora, cfg

    def arguments(self, folder: Path, backend: str) -> dict[str, Any]:
        """`backend` is that of `backends.chosen`."""
        routes = one_adapter.Routes(backend == FP4_TILES, self.cfg.rollout.vllm.dense_rows)
        return one_adapter.llm_arguments(folder, self.lora.rank, self.lora.target_modules, routes)

    def begin(self, llm: LLM) -> None:
        """Find the places of the adapter, and let vLLM's layers read the policy's packed weights too."""
        layers, adapter = packed_layers(self.model.get_base_model()), one_adapter.adapter_of(self.model)
        llm.apply_model(lambda model: one_adapter.lend(model, layers))
        self.link: one_adapter.Link = llm.apply_model(lambda model: one_adapter.Link(model, adapter))[0]
        modules = (module for pair in one_adapter.learned(self.model).values() for module in pair)
        self.read = [(module, module.weight) for module in modules]

    def sync(self, llm: LLM) -> None:
        if any(module.weight is not weight for module, weight in self.read):
            raise AssertionError("the policy's adapter has other tensors than when the engine began")
        scaling = (self.lora.alpha or self.lora.rank) / self.lora.rank
        llm.apply_model(lambda model: self.link.write(scaling))

    def close(self) -> None:
        """Let go of vLLM's buffers."""
        del self.link


class AdapterFile:
    """The adapter as a LoRARequest takes it (`lora_files`)."""

    def __init__(self, model: PeftModel, cfg: RunConfig) -> None:
        self.model, self.rank, self._open = model, cfg.lora.rank, ExitStack()
        self.folder: Path = self._open.enter_context(scratch_folder(adapter_bytes(model)))
        write_settings(model, self.folder)

    @property
    def request(self) -> LoRARequest:
        """What a prompt is sent with. Without `load_inplace`, which would read the files again at every token."""
        return LoRARequest(NAME, ID, str(self.folder))

    def arguments(self, folder: Path, backend: str) -> dict[str, Any]:
        """Raises ConfigError for a rank that vLLM makes no buffers for."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank(self.rank)}

    def begin(self, llm: LLM) -> None:
        """vLLM's LoRA reads what `sync` writes."""

    def sync(self, llm: LLM) -> None:
        """Write the policy's adapter of now, and have vLLM read it in the place of the last."""
        write_weights(self.model, self.folder)
        llm.llm_engine.add_lora(LoRARequest(NAME, ID, str(self.folder), load_inplace=True))
        if (held := llm.llm_engine.list_loras()) != {ID}:
            raise AssertionError(f"vLLM holds the adapters {held}; allowed: the one")

    def close(self) -> None:
        self._open.close()
