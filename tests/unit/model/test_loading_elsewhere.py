"""One packed directory, two readers: our model, and transformers with compressed-tensors or bitsandbytes."""

from collections.abc import Sequence
from pathlib import Path

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

from packed_layers import MXFP4, NVFP4, each_packed
from qerl_lab.formats.format import Format
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.loading import load_model, stored_as
from qerl_lab.model.weight_files import WeightFiles
from small_checkpoints import write_packed

# Nats of log-probability, where those of the model spread with a standard deviation of 0.8. compressed-tensors rounds
# the NVFP4 weights to bfloat16 after the global scale, ours are exact before it: each differs by up to 2**-8 of itself.
# MXFP4 has no second scale: both compute with the same bfloat16 weights in the same order. With NF4 bitsandbytes has a
# CPU kernel of its own, which adds in another order: 0.062 at most and 0.009 in the mean on a Xeon with AMX.
BAND = {"nvfp4": 0.1, "mxfp4": 0.0, "nf4": 0.1}


def both(
    folder: Path, weight_format: Format, layers: int = 3, ignore: Sequence[str] = ("lm_head",)
) -> tuple[PreTrainedModel, PreTrainedModel]:
    config = Qwen2Config(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    write_packed(folder, Qwen2ForCausalLM(config).to(torch.bfloat16), weight_format, ignore)
    packed_as = stored_as(folder)
    assert packed_as is not None
    ours = load_model(
        AutoConfig.from_pretrained(folder), WeightFiles(folder), packed_as, is_packed=True,
        device=torch.device("cpu"), dtype=torch.bfloat16,
    )  # fmt: skip
    is_theirs = weight_format.QUANT_METHOD == "compressed-tensors"
    decompress = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_theirs else {}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **decompress)
    return ours, theirs


def logprobs(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 300, (4, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits.float().log_softmax(-1)


@each_packed
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_the_same_directory_gives_the_same_logits(tmp_path: Path, weight_format: Format) -> None:
    ours, theirs = both(tmp_path, weight_format)
    a, b = logprobs(ours), logprobs(theirs)
    assert b.std() > 0.5  # logits that say something
    assert (a - b).abs().max() <= BAND[weight_format.NAME]
    assert (a - b).abs().mean() <= BAND[weight_format.NAME] / 5
    if weight_format.NAME == "nf4":
        assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    else:
        assert_decompressed_weights_equal(ours, theirs, weight_format)


@pytest.mark.parametrize("weight_format", [NVFP4, MXFP4], ids=repr)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_a_whole_module_may_be_left_dense(tmp_path: Path, weight_format: Format) -> None:
    """And the eleventh layer, whose name begins as that of the second, is packed."""
    ours, theirs = both(tmp_path, weight_format, layers=11, ignore=["lm_head", "model.layers.1", "v_proj"])
    assert_decompressed_weights_equal(ours, theirs, weight_format)
    dense = [name for name, module in ours.named_modules() if type(module) is nn.Linear]
    assert len(dense) == 7 + 10 + 1
    assert all(torch.equal(ours.get_submodule(name).weight, theirs.get_submodule(name).weight) for name in dense)


def assert_decompressed_weights_equal(ours: PreTrainedModel, theirs: PreTrainedModel, weight_format: Format) -> None:
    """Bit-equal to our `dequantize`, and to alpha * W', which our Linear computes with, up to the rounding of NVFP4."""
    for path, layer in ours.named_modules():
        if isinstance(layer, PackedLinear):
            shape, other = (layer.out_features, layer.in_features), theirs.get_submodule(path)
            assert type(other) is nn.Linear
            assert torch.equal(other.weight, weight_format.dequantize(layer.packed(), shape, torch.bfloat16)), path
            computed = layer.unpack(torch.bfloat16).double() * layer.decoder.alpha
            rounding = 2**-8 if weight_format.NAME == "nvfp4" else 0.0  # half a step of bfloat16
            assert ((computed - other.weight.double()).abs() <= rounding * computed.abs()).all(), path
