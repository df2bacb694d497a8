"""One packed directory, two readers: our model, and transformers with compressed-tensors or bitsandbytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from packed_layers import each_packed
from qerl_lab.formats import PackedLinear, codec
from qerl_lab.formats.files import WeightFiles
from qerl_lab.formats.loading import load_model, stored_as
from small_checkpoints import write_packed

# Nats of log-probability, where those of the model spread with a standard deviation of 0.8. compressed-tensors rounds
# the NVFP4 weights to bfloat16 after the global scale, ours are exact before it: each differs by up to 2**-8 of itself.
# MXFP4 has no second scale: both compute with the same bfloat16 weights in the same order. So they do with NF4, as long
# as bitsandbytes does not choose a CPU kernel of its own.
BAND = {"nvfp4": 0.1, "mxfp4": 0.0, "nf4": 0.05}


def both(folder: Path, name: str, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedModel]:
    config = Qwen2Config(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    write_packed(folder, Qwen2ForCausalLM(config).to(torch.bfloat16), name, **options)
    packed_as = stored_as(folder)
    assert packed_as is not None
    ours = load_model(
        AutoConfig.from_pretrained(folder), WeightFiles(folder), packed_as, is_packed=True,
        device=torch.device("cpu"), dtype=torch.bfloat16,
    )  # fmt: skip
    decompress = {} if name == "nf4" else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **decompress)
    return ours, theirs


def logprobs(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 300, (4, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits.float().log_softmax(-1)


@each_packed
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_the_same_directory_gives_the_same_logits(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    ours, theirs = both(tmp_path, name, options)
    a, b = logprobs(ours), logprobs(theirs)
    assert b.std() > 0.5  # logits that say something
    assert (a - b).abs().max() <= BAND[name]
    assert (a - b).abs().mean() <= BAND[name] / 5
    if name == "nf4":
        assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    else:
        assert_decompressed_weights_equal(ours, theirs, name)


def assert_decompressed_weights_equal(ours: PreTrainedModel, theirs: PreTrainedModel, name: str) -> None:
    """Bit-equal to our `dequantize`, and to alpha * W', which our Linear computes with, up to the rounding of NVFP4."""
    for path, layer in ours.named_modules():
        if isinstance(layer, PackedLinear):
            shape, other = (layer.out_features, layer.in_features), theirs.get_submodule(path)
            assert type(other) is nn.Linear
            assert torch.equal(other.weight, codec(name).dequantize(layer.packed(), shape, torch.bfloat16)), path
            computed = layer.unpack(torch.bfloat16).double() * layer.decoder.alpha
            rounding = 2**-8 if name == "nvfp4" else 0.0  # half a step of bfloat16
            assert ((computed - other.weight.double()).abs() <= rounding * computed.abs()).all(), path
