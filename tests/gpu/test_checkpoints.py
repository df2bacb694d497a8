"""Checkpoints on a GPU: loading needs little memory and packs the bits of a CPU; vLLM computes the same log-probs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import load_elsewhere
from packed_layers import BF16, BY_NAME, FP8, MXFP4, NF4, NVFP4
from qerl_lab.formats.format import Format, PackedAs
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.formats.nvfp4 import Nvfp4
from qerl_lab.model.linear import PackedLinear, total_bytes
from qerl_lab.model.loading import empty_model, fill, stored_as
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.rollout.vllm.backends import humming_races
from small_checkpoints import equal, write_dense, write_packed
from vllm_engines import NEEDS_VLLM

pytestmark = pytest.mark.gpu

GPU, CPU = torch.device("cuda"), torch.device("cpu")
FORMATS = ["nvfp4", "mxfp4", "nf4", "fp8", "bf16"]
# One Linear besides the head stays dense. It is given by its full name, and both engines must find it.
IGNORE = ["lm_head", "model.layers.1.mlp.down_proj"]
# Nats per token between two engines that order their bfloat16 sums differently. On the same model, bfloat16 and float32
# differ by 0.006 in the mean and 0.025 at most; quantizing it, to any of the formats, changes 0.2 in the mean.
BAND_MEAN, BAND_MAX = 0.02, 0.12


def random_model(seed: int = 0, **shape: Any) -> Qwen2ForCausalLM:
    """Return a model with random bfloat16 weights. Its logits have a standard deviation of 0.7."""
    config = Qwen2Config(num_attention_heads=8, num_key_value_heads=2, initializer_range=0.03, eos_token_id=2, **shape)
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def load(
    folder: Path, weight_format: Format, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Load `folder` as it is stored, or packed on the way if it is dense."""
    stored = stored_as(folder)
    packed_as = stored or PackedAs(weight_format, ("lm_head",))
    empty = empty_model(AutoConfig.from_pretrained(folder), dtype)
    return fill(empty, WeightFiles(folder), packed_as, is_packed=stored is not None, device=device)


# Loading a dense directory.


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twelve layers with the proportions of Qwen2.5-7B. Packed they have a third of the dense size."""
    model = random_model(vocab_size=1024, hidden_size=1024, intermediate_size=5376, num_hidden_layers=12)
    return write_dense(tmp_path_factory.mktemp("dense"), model)


@pytest.mark.parametrize("name", FORMATS)
def test_gpu_memory_stays_below_the_packed_size_plus_one_layer(dense: Path, name: str) -> None:
    load(dense, BY_NAME[name], GPU)  # libraries allocate some memory once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(dense, BY_NAME[name], GPU)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    packed = total_bytes(model)
    layer = sum(2 * tensor.numel() for name, tensor in dense_tensors(dense) if name.startswith("model.layers.0."))
    whole = sum(2 * tensor.numel() for _, tensor in dense_tensors(dense))
    print(f"{name}: peak {peak / 2**20:.1f} MiB, packed {packed / 2**20:.1f}, one dense layer {layer / 2**20:.1f}, "
          f"the dense model {whole / 2**20:.1f}")  # fmt: skip
    assert packed < peak <= packed + layer
    assert packed + layer < {"bf16": 1.2, "fp8": 0.7}.get(name, 0.5) * whole


def dense_tensors(folder: Path) -> list[tuple[str, Tensor]]:
    files = WeightFiles(folder)
    return [(name, files.tensor(name)) for name in files.names]


@pytest.mark.parametrize(
    "weight_format", [NVFP4, Nvfp4("four_over_six"), MXFP4, BF16, NF4, Nf4(double_quant=False), FP8], ids=repr
)
def test_a_gpu_in_bfloat16_packs_the_bits_that_a_cpu_in_float32_packs(dense: Path, weight_format: Format) -> None:
    on_gpu = packed_tensors(load(dense, weight_format, GPU))
    on_cpu = packed_tensors(load(dense, weight_format, CPU, torch.float32))
    assert on_gpu.keys() == on_cpu.keys()
    assert [key for key in on_cpu if not equal(on_gpu[key], on_cpu[key])] == []


def packed_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return packed tensors on the CPU by their names in a checkpoint; under BF16 the weights in bfloat16."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            tensors |= {f"{path}.{key}": tensor.cpu() for key, tensor in module.packed().items()}
        elif getattr(module, "weight_format", None) is not None:
            tensors[f"{path}.weight"] = module.weight.bfloat16().cpu()
    assert tensors
    return tensors


# One directory, two engines.


def own_logprobs(folder: Path, name: str, prompts: list[list[int]]) -> Tensor:
    """Return log-probs of each prompt's tokens except the first, `[prompts, tokens - 1]`."""
    ids = torch.tensor(prompts, device=GPU)
    with torch.no_grad():
        logprobs = load(folder, BY_NAME[name], GPU)(ids).logits.float().log_softmax(-1)
    return logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].cpu()


def vllm_logprobs(folder: Path, prompts: list[list[int]], scratch: Path) -> Tensor:
    asked, out = scratch / "job.json", scratch / "logprobs.json"
    # The size of the cache is fixed, so that vLLM does not measure memory, which other processes use too.
    how = {"dtype": "bfloat16", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**29}
    asked.write_text(json.dumps({"prompts": prompts, "models": [[str(folder), None]], "vllm": how}))
    command = [sys.executable, load_elsewhere.__file__, "vllm", str(asked), str(out)]
    ran = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, f"vLLM could not serve {folder}:\n{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    return torch.tensor(json.loads(out.read_text())[0])


@NEEDS_VLLM
@pytest.mark.parametrize("name", FORMATS)
def test_vllm_computes_the_same_from_the_same_directory(tmp_path: Path, name: str) -> None:
    if name == "fp8" and humming_races():
        pytest.skip("vLLM itself chooses Humming, which has races on this GPU")
    model = random_model(vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=4)
    folder = tmp_path / "checkpoint"
    weight_format = BY_NAME[name]
    packs = weight_format.BLOCK is not None
    write_packed(folder, model, weight_format, ignore=IGNORE) if packs else write_dense(folder, model)
    prompts = torch.randint(3, 1024, (4, 120), generator=torch.Generator().manual_seed(1)).tolist()
    ours, theirs = own_logprobs(folder, name, prompts), vllm_logprobs(folder, prompts, tmp_path)
    gap = (ours - theirs).abs()
    where = divmod(int(gap.argmax()), gap.shape[1])
    said = (
        f"{name}: gap to vLLM {gap.mean():.4f} nats in the mean, {gap.max():.4f} at most, at prompt {where[0]}, token "
        f"{where[1] + 1} (ours {ours[where]:.4f}, vLLM's {theirs[where]:.4f})"
    )
    print(said)
    assert ours.std() > 0.5, "the log-probabilities hardly vary"
    assert gap.mean() <= BAND_MEAN, said
    assert gap.max() <= BAND_MAX, said
