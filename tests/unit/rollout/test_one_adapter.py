"""The dense products of one adapter in vLLM, on the CPU, against PEFT.

tests/gpu/test_vllm_engine.py tests packed formats and CUDA graphs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm import LLM, SamplingParams
from vllm.config import LoadConfig, ModelConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.weight_utils import get_quant_config

from packed_layers import BY_NAME
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.model.on_disk import ASSETS, read_model_json
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.vllm import one_adapter
from qerl_lab.rollout.vllm.transfer import (
    adapted_layers,
    check_adapter,
    write_adapter_config,
    write_adapter_weights,
)
from qerl_lab.rollout.vllm.vllm_engine import IN_THIS_PROCESS
from small_checkpoints import edit_config

IDS = list(range(5, 45))
NATS = 1e-4  # between two ways to sum in float32
RANK, ALPHA = 3, 5.0
SCALING = ALPHA / RANK
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def learner(tiny, build_policy) -> Policy:
    return build_policy(tiny(format__name="bf16", lora__rank=RANK, lora__alpha=ALPHA))


@contextmanager
def serving(**arguments: Any) -> Iterator[LLM]:
    """Start vLLM with the embedded policy in this process, as `VllmEngine` does."""
    os.environ.update(IN_THIS_PROCESS)
    llm = LLM(model=str(ASSETS), dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
              kv_cache_memory_bytes=2**24, enable_prefix_caching=False, distributed_executor_backend="uni",
              use_tqdm_on_load=False, **arguments)  # fmt: skip
    yield llm
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with serving(**one_adapter.llm_arguments(ASSETS, RANK, ALL)) as llm:
        yield llm


def logprobs(llm: LLM) -> Tensor:
    """Return the log-probs of the tokens of `IDS` after the first."""
    how = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    out = llm.generate([{"prompt_token_ids": IDS}], how, use_tqdm=False)[0]
    return torch.tensor([at[token].logprob for at, token in zip(out.prompt_logprobs[1:], IDS[1:], strict=True)])


def of_peft(learner: Policy) -> Tensor:
    with torch.no_grad():
        logits = learner.model.eval()(torch.tensor([IDS])).logits[0].double()
    return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(IDS)[1:, None])[:, 0].float()


def pair(A: Tensor, B: Tensor) -> tuple[Any, Any]:
    """Return modules with these weights, like those of PEFT."""
    return SimpleNamespace(weight=A), SimpleNamespace(weight=B)


def write(llm: LLM, adapter: dict[str, tuple[Any, Any]], scaling: float = SCALING) -> None:
    def worker(model: nn.Module) -> None:
        one_adapter.AdapterBuffers(model, adapter).write(scaling)

    llm.apply_model(worker)


def test_writing_keeps_the_buffers_of_the_engine_and_the_tensors_of_the_learner(llm: LLM, learner: Policy) -> None:
    def buffers(model: nn.Module) -> dict[str, int]:
        return {name: buffer.data_ptr() for name, buffer in model.named_buffers() if "adapter_" in name}

    adapter = one_adapter.lora_modules(learner.model)
    before, held = (
        llm.apply_model(buffers)[0],
        {name: (A.weight.clone(), B.weight.clone()) for name, (A, B) in adapter.items()},
    )
    write(llm, adapter)
    assert llm.apply_model(buffers)[0] == before
    assert len(before) == 2 * 4 * 3  # A and B of qkv, o, gate_up and down in three layers
    for name, (A, B) in adapter.items():
        assert torch.equal(A.weight, held[name][0])
        assert torch.equal(B.weight, held[name][1])


def without(name: str) -> Callable[[dict], dict]:
    return lambda adapter: {key: pair for key, pair in adapter.items() if key != name}


DOWN = "model.layers.1.mlp.down_proj"
UNFIT = {
    f"1 layers have another adapter .*, the first {DOWN}: shapes None": without(DOWN),
    "1 layers have another adapter .*, the first lm_head: .*; allowed: None": lambda own: own | {"lm_head": own[DOWN]},
    rf"1 layers have another adapter .*, the first {DOWN}: shapes \[": lambda own: own | {
        DOWN: pair(own[DOWN][0].weight[:2], own[DOWN][1].weight[:, :2])
    },
}  # fmt: skip


@pytest.mark.parametrize("said", UNFIT)
def test_an_adapter_that_does_not_fit_is_refused_and_nothing_is_written(llm: LLM, learner: Policy, said: str) -> None:
    adapter = one_adapter.lora_modules(learner.model)
    write(llm, adapter)
    before = logprobs(llm)
    with pytest.raises(ConfigError, match=said):
        write(llm, UNFIT[said]({name: pair(2 * A.weight, B.weight) for name, (A, B) in adapter.items()}))
    assert torch.equal(logprobs(llm), before)


def test_a_part_of_a_fused_layer_may_have_no_adapter(tiny, build_policy) -> None:
    targets = ["self_attn.k_proj", "gate_proj", "o_proj"]
    learner = build_policy(tiny(format__name="bf16", lora__rank=RANK, lora__target_modules=targets))
    with serving(**one_adapter.llm_arguments(ASSETS, RANK, targets)) as llm:
        write(llm, one_adapter.lora_modules(learner.model), 1.0)
        assert (logprobs(llm) - of_peft(learner)).abs().max() < NATS
        own = one_adapter.lora_modules(learner.model)
        more = own | {name.replace("gate", "up"): pair for name, pair in own.items()}
        with pytest.raises(ConfigError, match=r"3 layers have another adapter .*, the first .*0\.mlp\.up_proj"):
            write(llm, more, 1.0)


# --- vLLM's own LoRA


def test_an_adapter_that_vllm_ignores_is_refused(learner: Policy, tmp_path: Path) -> None:
    """vLLM looks at the last part of a name when it loads an adapter, and leaves out what has no layer."""
    write_adapter_config(learner.model, tmp_path)
    write_adapter_weights(learner.model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    with serving(enable_lora=True, max_loras=1, max_lora_rank=8) as llm:

        def load(renamed: dict[str, Tensor]) -> list[str]:
            save_file(renamed, tmp_path / WEIGHTS)
            llm.llm_engine.add_lora(LoRARequest("policy", 1, str(tmp_path), load_inplace=True))
            return llm.apply_model(adapted_layers)[0]

        assert sorted(load(tensors)) == sorted(one_adapter.lora_modules(learner.model))
        check_adapter(load(tensors), learner.model, "vLLM", "Type x.")
        for part, count, first in ((".layers.", 21, "model.layers.0.self_attn.q_proj"),
                                   (".1.mlp.up", 1, "model.layers.1.mlp.up_proj")):  # fmt: skip
            held = load({name.replace(part, f".renamed{part}"): tensor for name, tensor in tensors.items()})
            said = f"^vLLM holds no adapter in {count} of 21 layers that have one, the first {first}: .* Type x.$"
            with pytest.raises(ConfigError, match=said):
                check_adapter(held, learner.model, "vLLM", "Type x.")


# --- how vLLM reads a directory


def model_config(folder: Path, rank: int = RANK) -> ModelConfig:
    arguments = one_adapter.llm_arguments(folder, rank, ALL)
    assert arguments.pop("enable_lora") is False
    arguments.pop("load_format", None)
    return ModelConfig(model=str(folder), **arguments)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_packed_directory_keeps_its_own_quantization_method_as_base(name: str, tmp_path: Path) -> None:
    packed = BY_NAME[name].quantization_config(["lm_head"], torch.bfloat16)
    (tmp_path / "config.json").write_bytes((ASSETS / "config.json").read_bytes())
    edit_config(tmp_path, quantization_config=packed)
    config = model_config(tmp_path)
    assert config.quantization == one_adapter.NAME
    found = get_quant_config(config, LoadConfig())
    assert found.base.get_name() == "compressed-tensors"
    assert found.base.quant_format == packed["format"]
    assert found.base.ignore == ["lm_head"]
    assert read_model_json(tmp_path / "config.json")["quantization_config"] == packed


def test_bitsandbytes_gets_its_own_loader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((ASSETS / "config.json").read_bytes())
    edit_config(tmp_path, quantization_config=BY_NAME["nf4"].quantization_config(["lm_head"], torch.bfloat16))
    arguments = one_adapter.llm_arguments(tmp_path, RANK, ALL)
    assert arguments["load_format"] == "bitsandbytes"
    assert arguments["hf_overrides"]["quantization_config"]["quant_method"] == "bitsandbytes"


def test_ranks_have_separate_caches_of_compiled_graphs() -> None:
    """A cached graph contains the shapes of its buffers."""
    assert model_config(ASSETS, 8).compute_hash() == model_config(ASSETS, 8).compute_hash()
    assert model_config(ASSETS, 8).compute_hash() != model_config(ASSETS, 16).compute_hash()
