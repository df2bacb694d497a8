"""The worker class with noisy float32 norms, over a fake of vLLM's worker. tests/gpu has the real one."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from played_modules import play
from qerl_lab.aqn import Noise
from qerl_lab.rollout.vllm.transfer import decode_tensor

NAMES = ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.25, 8, 512).bfloat16())


class Worker:
    """A fake worker that loads a block with three norms and a linear layer, all in bfloat16."""

    vllm_config = SimpleNamespace(
        additional_config={"qerl_lab_float32_norms": ["input_layernorm", "post_attention_layernorm", "proj"]}
    )

    def load_model(self, **_: object) -> None:
        parts = {"input_layernorm": RMSNorm(), "post_attention_layernorm": RMSNorm(), "q_norm": RMSNorm(),
                 "proj": nn.Linear(2, 2, dtype=torch.bfloat16)}  # fmt: skip
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(parts)])})

    def get_model(self) -> nn.Module:
        return self.model


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    play(monkeypatch, {
        "vllm": {}, "vllm.lora": {}, "vllm.lora.request": {"LoRARequest": object}, "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": type("GemmaRMSNorm", (), {})},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)}, "vllm.v1": {},
        "vllm.v1.worker": {}, "vllm.v1.worker.gpu_worker": {"Worker": Worker},
    })  # fmt: skip
    monkeypatch.delitem(sys.modules, "qerl_lab.rollout.vllm.worker", raising=False)
    built = importlib.import_module("qerl_lab.rollout.vllm.worker").NormWorker()
    built.load_model()
    yield built
    sys.modules.pop("qerl_lab.rollout.vllm.worker", None)


def test_only_the_named_norms_are_float32_after_loading(worker: Any) -> None:
    dtypes = {name: weight.dtype for name, weight in worker.get_model().named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {f"{name}.weight" for name in NAMES}


def test_noise_is_written_in_place_without_rounding(worker: Any) -> None:
    weights = {name: worker.get_model().get_parameter(f"{name}.weight") for name in NAMES}
    clean = {name: weight.detach().clone() for name, weight in weights.items()}
    addresses = [weight.data_ptr() for weight in weights.values()]
    elsewhere = "layers.7.input_layernorm"  # in another pipeline stage
    worker.qerl_noise([*NAMES, elsewhere], "0.0001", 3, 4, False)
    expected = Noise(1e-4, 3, 4).onto_norms(clean)
    held = {name: decode_tensor(*one) for name, one in worker.qerl_norms([*NAMES, elsewhere]).items()}
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], weight) for name, weight in expected.items())
    worker.qerl_noise(NAMES[:1], "0.0001", 3, 5, False)  # the other norm is clean again
    assert torch.equal(weights[NAMES[1]], clean[NAMES[1]])
    assert not torch.equal(weights[NAMES[0]], clean[NAMES[0]])
    worker.qerl_noise([elsewhere], "0.0001", 3, 6, False)
    assert all(torch.equal(weights[name], clean[name]) for name in NAMES)
    assert [weight.data_ptr() for weight in weights.values()] == addresses
