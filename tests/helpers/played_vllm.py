"""vLLM's engine over an `LLM` that a test makes, where vLLM is not installed."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from played_modules import play
from qerl_lab.rollout import vllm as room


class NoAdapter:
    """An adapter that does nothing."""

    request = None

    def __init__(self, model: nn.Module, cfg: Any) -> None: ...

    def arguments(self, folder: Path, backend: str) -> dict[str, Any]:
        return {}

    def attach(self, vllm_model: nn.Module) -> None: ...

    def sync(self, llm: Any) -> None: ...

    def close(self) -> None: ...


class AdapterFile(NoAdapter):
    """The same for rollout.vllm.lora=request."""


class PlayedLlm:
    """The part of vLLM's LLM that `VllmEngine` uses, over a given model."""

    def __init__(self, model: nn.Module, kv_cache_memory_bytes: int = 0) -> None:
        self.model = model
        cache = SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(cache_config=cache), engine_core=SimpleNamespace(shutdown=lambda: None)
        )

    def apply_model(self, function: Callable[[nn.Module], Any]) -> list[Any]:
        return [function(self.model)]

    def reset_prefix_cache(self) -> bool:
        return True


@contextmanager
def played_engine(monkeypatch: pytest.MonkeyPatch, llm: Callable[..., Any]) -> Iterator[ModuleType]:
    """Yield the module `vllm_engine`, with `llm` as vLLM's LLM."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed: tests/gpu has the real one")
    play(monkeypatch, {
        "vllm": {"LLM": llm, "RequestOutput": object, "SamplingParams": lambda **how: SimpleNamespace(**how)},
        "vllm.distributed": {}, "vllm.distributed.parallel_state": {"destroy_model_parallel": None},
        "vllm.envs": {"disable_envs_cache": lambda: None},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=0)},
        "vllm.v1": {}, "vllm.v1.engine": {}, "vllm.v1.engine.exceptions": {"EngineDeadError": RuntimeError},
        "qerl_lab.rollout.vllm.adapter": {"AdapterFile": AdapterFile, "DenseAdapter": NoAdapter},
    })  # fmt: skip
    module = importlib.import_module("qerl_lab.rollout.vllm.vllm_engine")
    monkeypatch.setattr(module, "check_engine_on_cpu", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    yield module
    sys.modules.pop(module.__name__, None)
    vars(room).pop("vllm_engine", None)
