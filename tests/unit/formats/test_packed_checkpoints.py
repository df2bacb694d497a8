"""The quantization_config of a packed checkpoint equals the dump of the libraries, is read back, or is refused."""

import copy
import re
from typing import Any

import pytest
import torch

from packed_layers import FP8, MXFP4, NF4, NVFP4
from qerl_lab.formats import format as machinery
from qerl_lab.formats import recognize
from qerl_lab.formats.format import Format, PackedAs
from qerl_lab.formats.fp8 import W8A8
from qerl_lab.formats.mxfp4 import Mxfp4
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.formats.nvfp4 import Nvfp4
from qerl_lab.model.on_disk import is_ignored

UNKNOWN_RULE = {NVFP4: Nvfp4(None), MXFP4: Mxfp4(None)}


@pytest.mark.parametrize(("weight_format", "preset", "layout"), [
    (NVFP4, "NVFP4A16", "nvfp4-pack-quantized"), (MXFP4, "MXFP4A16", "mxfp4-pack-quantized"),
    (FP8, "FP8_DYNAMIC", "float-quantized"), (W8A8, "FP8_DYNAMIC", "float-quantized"),
])  # fmt: skip
def test_the_config_equals_the_dump_of_compressed_tensors(weight_format: Format, preset: str, layout: str) -> None:
    """W8A16 has no preset. It is the preset of W8A8 without activations."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = layout
    if weight_format == FP8:
        scheme.input_activations = None
    dumped = QuantizationConfig(
        config_groups={"group_0": scheme}, quantization_status="compressed", format=layout, ignore=["lm_head"]
    ).to_dict()
    assert weight_format.quantization_config(["lm_head"], torch.bfloat16) == dumped


def test_the_config_of_nf4_equals_the_dump_of_transformers() -> None:
    from transformers import BitsAndBytesConfig

    dumped = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=["lm_head"],
    ).to_dict()  # fmt: skip
    dumped = {key: value for key, value in dumped.items() if not key.startswith("_")}
    assert NF4.quantization_config(["lm_head"], torch.bfloat16) == dumped


@pytest.mark.parametrize("weight_format", [NVFP4, MXFP4, Nf4(True), Nf4(False), FP8, W8A8], ids=repr)
def test_a_written_config_is_recognized(weight_format: Format) -> None:
    """The rounding rule stays unknown, because compressed-tensors does not record it."""
    ignore = ("lm_head", "down_proj", "model.layers.1.self_attn.q_proj", "model.layers.1")
    written = weight_format.quantization_config(ignore, torch.bfloat16)
    assert recognize(written) == PackedAs(UNKNOWN_RULE.get(weight_format, weight_format), ignore)


ENTRIES = ["lm_head", "down_proj", "mlp.down_proj", "model.layers.3", "model.layers.3.mlp", "re:lm_|mlp"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_ignore_entry_matches_the_same_layers_in_compressed_tensors(entry: str) -> None:
    """A plain entry is a full name in compressed-tensors. The lab also takes the end of a name, or a parent module."""
    from compressed_tensors.utils.match import match_name

    (written,) = NVFP4.quantization_config([entry], torch.bfloat16)["ignore"]
    parts = ("self_attn.q_proj", "mlp.down_proj", "mlp.up_down_proj", "mlp.down_proj.0", "mlpx.up_proj",
             "mlp_down_proj")  # fmt: skip
    modules = ["lm_head", *(f"model.layers.{layer}.{part}" for layer in (3, 30) for part in parts)]
    ours = [module for module in modules if is_ignored(module, [entry])]
    assert ours
    assert [module for module in modules if match_name(module, written)] == ours


@pytest.mark.parametrize(("weight_format", "written", "read"), [
    (NVFP4, {"ignore": [r"re:(.*\.)?down_.*$"]}, r"re:(.*\.)?down_.*$"),
    (NVFP4, {"ignore": [r"re:(.*\.)?a$|b\..*"]}, r"re:(.*\.)?a$|b\..*"),
    (NF4, {"llm_int8_skip_modules": None}, "lm_head"),
])  # fmt: skip
def test_ignore_lists_of_other_programs_are_read(weight_format: Format, written: dict, read: str) -> None:
    config = weight_format.quantization_config([], torch.bfloat16) | written
    assert recognize(config).ignore == (read,)


@pytest.mark.parametrize(("written", "read"), [({}, False), ({"bnb_4bit_use_double_quant": True}, True)])
def test_scales_of_nf4_are_quantized_only_if_the_config_says_so(written: dict[str, bool], read: bool) -> None:
    config = NF4.quantization_config([], torch.bfloat16)
    del config["bnb_4bit_use_double_quant"]
    assert recognize(config | written).weight_format.double_quant == read


@pytest.mark.parametrize(
    ("weight_format", "change", "says"),
    [
        (NVFP4, {"quant_method": "gptq"},
         "quant_method='gptq' cannot be loaded; allowed: compressed-tensors, bitsandbytes"),
        (NVFP4, {"format": "pack-quantized", "group.format": None}, "format='pack-quantized'"),
        (NVFP4, {"group.format": "mixed"}, "format='mixed'"),
        (NVFP4, {"quantization_status": "frozen"},
         "quantization_status='frozen' cannot be loaded; allowed: compressed"),
        (NVFP4, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        (NVFP4, {"transform_config": {"config_groups": {"u": {}}}}, "transform_config="),
        (NVFP4, {"ignore": [3]}, "ignore=[3] cannot be loaded; allowed: a list of names"),
        (NVFP4, {"config_groups": {}}, "config_groups=[]"),
        (NVFP4, {"config_groups": {"a": {"format": "nvfp4-pack-quantized"}, "b": {}}}, "config_groups=['a', 'b']"),
        (NVFP4, {"group.targets": ["re:.*q_proj"]}, "targets=['re:.*q_proj']"),
        (NVFP4, {"group.input_activations": {"num_bits": 4}},
         "input_activations={'num_bits': 4} cannot be loaded; allowed: None in nvfp4"),
        (NVFP4, {"group.output_activations": {"num_bits": 8}}, "output_activations={'num_bits': 8}"),
        (NVFP4, {"group.weights.group_size": 32}, "weights.group_size=32 cannot be loaded; allowed: 16 in nvfp4"),

        (NVFP4, {"group.weights.scale_dtype": "torch.uint8"}, "weights.scale_dtype='torch.uint8'"),
        (NVFP4, {"group.weights.actorder": "group"}, "weights.actorder='group'"),
        (W8A8, {"group.weights.strategy": "tensor"},
         "weights.strategy='tensor' cannot be loaded; allowed: channel in fp8"),

        (W8A8, {"group.input_activations.dynamic": False}, "allowed: null or {'num_bits': 8, 'type': 'float', "),
        (W8A8, {"group.input_activations.strategy": "tensor"}, "input_activations={'num_bits': 8, "),
        (NF4, {"load_in_4bit": False}, "load_in_4bit=False"),
        (NF4, {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4' cannot be loaded; allowed: nf4"),
        (NF4, {"llm_int8_skip_modules": "lm_head"},
         "llm_int8_skip_modules='lm_head' cannot be loaded; allowed: a list"),
    ],
)  # fmt: skip
def test_unsupported_configs_are_refused(weight_format: Format, change: dict[str, Any], says: str) -> None:
    config = copy.deepcopy(weight_format.quantization_config(["lm_head"], torch.bfloat16))
    for key, value in change.items():
        *parents, leaf = key.split(".")
        part = config
        for parent in parents:
            part = part["config_groups"]["group_0"] if parent == "group" else part[parent]
        part[leaf] = value
    with pytest.raises(ValueError, match=re.escape(says)):
        recognize(config)


# The tensors

SHAPE = (48, 96)


def packed(weight_format: Format) -> dict[str, torch.Tensor]:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return weight_format.quantize(weight)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize(("weight_format", "key", "at"), [(NVFP4, "weight_global_scale", 0), (FP8, "weight_scale", 5)])
def test_a_scale_that_is_no_positive_finite_number_is_refused(
    weight_format: Format, key: str, at: int, value: float
) -> None:
    tensors = packed(weight_format)
    tensors[key][at] = value
    with pytest.raises(ValueError, match=rf"q_proj\.{key} (is|has zero,) .*; allowed: positive finite numbers"):
        weight_format.accept(tensors, SHAPE, name="q_proj")


@pytest.mark.parametrize(("weight_format", "key", "byte", "says"), [
    *[(NVFP4, "weight_scale", byte, "negative numbers or NaN; allowed: 0 to 448") for byte in (0x7F, 0x80, 0xB8, 0xFF)],
    *[(FP8, "weight", byte, "NaN; allowed: -448 to 448") for byte in (0x7F, 0xFF)],
    *[(MXFP4, "weight_scale", byte, "NaN or huge numbers; allowed: bytes of 0 to 224") for byte in (0xE1, 0xFF)],
])  # fmt: skip
def test_a_byte_that_stands_for_no_allowed_number_is_refused(
    weight_format: Format, key: str, byte: int, says: str
) -> None:
    tensors = packed(weight_format)
    tensors[key].view(torch.uint8)[1, 0] = byte
    with pytest.raises(ValueError, match=rf"q_proj\.{key} has {says}"):
        weight_format.accept(tensors, SHAPE, name="q_proj")
    tensors[key].view(torch.uint8)[1, 0] = 0x7E
    assert weight_format.accept(tensors, SHAPE, name="q_proj")


@pytest.mark.parametrize(("weight_format", "key"), [
    (Nf4(double_quant=True), "weight.nested_absmax"), (Nf4(double_quant=False), "weight.absmax"),
])  # fmt: skip
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_scale_of_bitsandbytes_that_is_not_finite_is_refused(weight_format: Format, key: str, value: float) -> None:
    tensors = packed(weight_format)
    tensors[key][0] = value
    with pytest.raises(ValueError, match=rf"q_proj\.{key}: 1 values that float32 cannot hold"):
        weight_format.accept(tensors, SHAPE, name="q_proj")


def test_the_header_that_bitsandbytes_writes_is_padded() -> None:
    """bitsandbytes stores the header without the spaces."""
    key = "weight.quant_state.bitsandbytes__nf4"
    tensors = packed(NF4)
    short = torch.tensor(list(bytes(tensors[key].tolist()).rstrip()), dtype=torch.uint8)
    assert short.numel() < 256
    assert torch.equal(NF4.accept(tensors | {key: short}, SHAPE, name="q_proj")[key], tensors[key])


def test_a_layer_that_is_packed_by_rows_is_named_in_errors() -> None:
    with pytest.raises(ValueError, match=r"^w: K=40 is not divisible by 32"):
        machinery.quantized_by_rows(MXFP4.quantize, torch.ones(48, 40), 7, name="w")
