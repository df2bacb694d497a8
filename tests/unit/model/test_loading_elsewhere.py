"""A packed directory gives the same logits in the lab and in transformers with compressed-tensors or bitsandbytes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from packed_layers import each_packed
from qerl_lab.formats.format import Format
from qerl_lab.model.linear import PackedLinear
from small_checkpoints import load, write_packed

# Nats; the log-probs of the model have a standard deviation of 0.8. compressed-tensors rounds NVFP4 weights to bfloat16
# after the global scale, and ours are exact before it, so a weight differs by up to 2**-8 of itself. MXFP4 and FP8 have
# no second scale, so both readers compute with the same bfloat16 weights in the same order. For NF4 bitsandbytes has
# its own CPU kernel, which adds in another order: 0.062 at most and 0.009 in the mean on a Xeon with AMX.
BAND = {"nvfp4": 0.1, "mxfp4": 0.0, "nf4": 0.1, "fp8": 0.0}


def logprobs(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 300, (4, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits.float().log_softmax(-1)


@each_packed
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_the_same_directory_gives_the_same_logits(tmp_path: Path, weight_format: Format) -> None:
    config = Qwen2Config(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    write_packed(tmp_path, Qwen2ForCausalLM(config).to(torch.bfloat16), weight_format)
    is_theirs = weight_format.QUANT_METHOD == "compressed-tensors"
    decompress = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_theirs else {}
    ours = load(tmp_path, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **decompress)
    a, b = logprobs(ours), logprobs(theirs)
    assert b.std() > 0.5  # the log-probs vary
    assert (a - b).abs().max() <= BAND[weight_format.NAME]
    assert (a - b).abs().mean() <= BAND[weight_format.NAME] / 5
    if weight_format.NAME == "nf4":
        assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    else:
        assert_decompressed_weights_equal(ours, theirs, weight_format)


def assert_decompressed_weights_equal(ours: PreTrainedModel, theirs: PreTrainedModel, weight_format: Format) -> None:
    """Assert that weights equal our `dequantize`, and alpha * W' of our Linear up to the rounding of NVFP4."""
    for path, layer in ours.named_modules():
        if isinstance(layer, PackedLinear):
            shape, other = (layer.out_features, layer.in_features), theirs.get_submodule(path)
            assert type(other) is nn.Linear
            assert torch.equal(other.weight, weight_format.dequantize(layer.packed(), shape, torch.bfloat16)), path
            computed = layer.unpack(torch.bfloat16).double() * layer.decoder.alpha
            rounding = 2**-8 if weight_format.NAME == "nvfp4" else 0.0  # half a step of bfloat16
            assert ((computed - other.weight.double()).abs() <= rounding * computed.abs()).all(), path
