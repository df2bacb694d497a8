"""One adapter as dense products on a GPU, on every format: what vLLM's own LoRA computes, eager and in CUDA graphs."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from packed_layers import BY_NAME
from small_checkpoints import with_biases, write_dense, write_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
# Nats a token between two ways to round bfloat16 sums, as between two engines in test_checkpoints.py.
BAND_MEAN, BAND_MAX = 0.02, 0.12
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module", params=["nvfp4", "mxfp4", "nf4", "bf16"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model in a format, and an adapter of rank 16 that moves its log-probabilities by far more than a band."""
    config = Qwen2Config(
        vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.03, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    folder, adapter = (tmp_path_factory.mktemp(name) for name in ("base", "adapter"))
    model, weight_format = with_biases(Qwen2ForCausalLM(config)).to(torch.bfloat16), BY_NAME[request.param]
    learner = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=16, lora_alpha=32, target_modules=ALL))
    for name, parameter in learner.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    learner.save_pretrained(adapter)
    packs = weight_format.BLOCK is not None
    write_packed(folder, model, weight_format) if packs else write_dense(folder, model)
    return folder, adapter


def served(folders: tuple[Path, Path], scratch: Path, how: str) -> dict[str, Tensor]:
    asked, out = scratch / "prompts.json", scratch / f"{how}.json"
    prompts = torch.randint(3, 1024, (4, 120), generator=torch.Generator().manual_seed(1))
    asked.write_text(json.dumps(prompts.tolist()))
    script = Path(__file__).with_name("vllm_logprobs.py")
    folder, adapter = map(str, folders)
    command = [sys.executable, str(script), folder, str(asked), str(out), how, adapter]
    ran = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, f"{how}:\n{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    return {name: torch.tensor(values) for name, values in json.loads(out.read_text()).items()}


@pytest.mark.parametrize("how", ["dense", "dense_graphs"])
def test_it_computes_what_vllms_lora_computes_and_follows_each_write(
    folders: tuple[Path, Path], tmp_path: Path, how: str
) -> None:
    stock, dense = served(folders, tmp_path, "request")["adapter"], served(folders, tmp_path, how)
    gap, moved = (dense["adapter"] - stock).abs(), (dense["adapter"] - dense["before"]).abs()
    print(f"{how}: gap to LoRARequest {gap.mean():.4f} nats in the mean, {gap.max():.4f} at most; the adapter moves "
          f"{moved.mean():.3f}; a write takes {dense['write_ms']:.2f} ms")  # fmt: skip
    assert moved.mean() > 5 * BAND_MEAN
    assert gap.mean() <= BAND_MEAN
    assert gap.max() <= BAND_MAX
    assert (dense["zero"] - dense["before"]).abs().mean() <= BAND_MEAN / 4


# Qwen2.5-7B: inputs, and outputs of the parts, of the linear layers of a block.
BLOCKS, RANK = 28, 32
LAYERS = {
    "self_attn": (3584, {"q_proj": 3584, "k_proj": 512, "v_proj": 512}), "self_attn.o": (3584, {"o_proj": 3584}),
    "mlp": (3584, {"gate_proj": 18944, "up_proj": 18944}), "mlp.down": (18944, {"down_proj": 3584}),
}  # fmt: skip


def test_an_adapter_of_7b_is_written_in_10_ms() -> None:
    from qerl_lab.rollout.vllm import one_adapter

    model, adapter = nn.Module(), {}
    for block in range(BLOCKS):
        for name, (columns, parts) in LAYERS.items():
            layer, sizes = nn.Module(), list(parts.values())
            paths = [f"model.layers.{block}.{name}.{part}" for part in parts]
            layer.quant_method = one_adapter.OneAdapterMethod(None, RANK, paths, [True] * len(parts))
            layer.quant_method.sizes = sizes
            layer.adapter_A = torch.zeros(len(parts) * RANK, columns, dtype=torch.bfloat16, device="cuda")
            layer.adapter_B = torch.zeros(sum(sizes), RANK, dtype=torch.bfloat16, device="cuda")
            model.add_module(f"{block}_{name}".replace(".", "_"), layer)
            adapter |= {
                path: (torch.randn(RANK, columns, device="cuda"), torch.randn(size, RANK, device="cuda"))
                for path, size in zip(paths, sizes, strict=True)
            }
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        one_adapter.AdapterBuffers(model, adapter).write(2.0)
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - started))
    print(f"write of {len(adapter)} layers: {min(taken):.2f} ms at best, first {taken[0]:.2f} ms")
    path, (A, B) = next(iter(adapter.items()))
    held = next(layer for layer in model.children() if path in layer.quant_method.parts)
    assert torch.equal(held.adapter_A[:RANK], A.bfloat16())
    assert torch.equal(held.adapter_B[: len(B)], (2 * B).bfloat16())
    assert min(taken) <= 10


@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="needs NVIDIA's MPS")
def test_the_driver_says_whether_mps_shares_the_gpu(tmp_path: Path) -> None:
    """Where it does, `fp4_tiles` is not taken: launches of two processes would wait for each other's blocks."""
    ask = "from qerl_lab.rollout.vllm import fp4_tiles; print(fp4_tiles.shared_by_mps())"
    command = [sys.executable, "-c", f"import torch; torch.zeros(1, device='cuda'); {ask}"]

    def told(environment: dict[str, str]) -> str:
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    daemon = os.environ | {f"CUDA_MPS_{what}_DIRECTORY": str(tmp_path / what.lower()) for what in ("PIPE", "LOG")}
    assert told(dict(os.environ)) == "False"
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=daemon, check=True)
    try:
        assert told(daemon) == "True"
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=daemon, text=True)
