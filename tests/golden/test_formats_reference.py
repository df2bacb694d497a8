"""The formats against a float64 reference written from the definitions of the formats."""

import json

import numpy as np
import pytest
import torch

import reference_formats as reference
from packed_layers import BF16, FP8, MXFP4, NF4, NVFP4
from qerl_lab.formats import e2m1
from qerl_lab.formats.mxfp4 import Mxfp4
from qerl_lab.formats.nf4 import Nf4
from reference_formats import QLORA_TABLE, nibbles, normal


@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_nvfp4_equals_the_reference(spread: float) -> None:
    weight = normal(64, 256) * torch.logspace(0, float(np.log10(spread)), 256)
    packed, expected = NVFP4.quantize(weight), reference.nvfp4(weight.double().numpy())
    stable = expected.stable
    assert stable.mean() > 0.999
    assert packed["weight_global_scale"].item() == pytest.approx(448 * 6 / weight.abs().max().item(), rel=1e-6)
    stable_blocks = stable.reshape(64, -1, 16).all(-1)
    np.testing.assert_array_equal(packed["weight_scale"].double().numpy()[stable_blocks], expected.scale[stable_blocks])
    np.testing.assert_array_equal(nibbles(packed["weight_packed"])[stable], expected.codes[stable])
    values = NVFP4.dequantize(packed, (64, 256), torch.float32).double().numpy()
    np.testing.assert_allclose(values[stable], expected.values[stable], rtol=1e-6)


@pytest.mark.parametrize("rule", ["round", "floor", "ceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spread", [1.0, 1e30])
def test_mxfp4_equals_the_reference_in_every_value(spread: float, dtype: torch.dtype, rule: str) -> None:
    weight = (normal(64, 256) * torch.logspace(0, float(np.log10(spread)), 64).unsqueeze(1)).to(dtype)
    packed = Mxfp4(rule).quantize(weight)
    expected = reference.mxfp4(weight.double().numpy(), rule)
    np.testing.assert_array_equal(packed["weight_scale"].numpy(), expected.scale)
    np.testing.assert_array_equal(nibbles(packed["weight_packed"]), expected.codes)
    for out in (torch.float32, torch.bfloat16):
        np.testing.assert_array_equal(MXFP4.dequantize(packed, (64, 256), out).double().numpy(), expected.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spread", [1.0, 1e30, 1e-30])
def test_fp8_equals_the_reference_in_every_value(spread: float, dtype: torch.dtype) -> None:
    """A float32 quotient by a bfloat16 scale is on a midpoint only if the exact quotient is."""
    weight = (normal(64, 256) * torch.logspace(0, float(np.log10(spread)), 64).unsqueeze(1)).to(dtype)
    weight[7], weight[8, 1:] = 0.0, -1e-3 * weight[8, :1].abs()
    packed, expected = FP8.quantize(weight), reference.fp8(weight.double().numpy())
    np.testing.assert_array_equal(packed["weight_scale"].double().numpy(), expected.scale)
    np.testing.assert_array_equal(packed["weight"].view(torch.uint8).numpy(), expected.codes)
    np.testing.assert_array_equal(FP8.dequantize(packed, (64, 256), torch.float32).double().numpy(), expected.values)


def test_fp8_ties_go_to_even_codes_and_large_values_saturate() -> None:
    values = reference.e4m3_values()
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(stored.double().numpy(), values)
    assert (np.nanmax(values), values[1], np.isnan(values).sum()) == (448, 2**-9, 2)
    ties = torch.from_numpy((values[:126] + values[1:127]) / 2).float()
    row = torch.stack([ties, torch.nextafter(ties, torch.zeros(())), torch.nextafter(ties, torch.full((), 500.0))])
    for sign in (1, -1):
        weight = sign * torch.cat([torch.full((3, 1), 448.0), row], 1)  # its scale is 1
        codes = FP8.quantize(weight)["weight"].view(torch.uint8)[:, 1:].int() - (0 if sign == 1 else 128)
        below = torch.arange(126)
        assert codes.tolist() == [(below + below % 2).tolist(), below.tolist(), (below + 1).tolist()]
    weight = torch.tensor([[449.0, -449.0, 1.0]])  # the scale is 1.0022, and in bfloat16 1
    assert FP8.dequantize(FP8.quantize(weight), (1, 3), torch.float32).tolist() == [[448.0, -448.0, 1.0]]


def test_nf4_codebook_is_the_qlora_table() -> None:
    table = NF4.quantize(normal(4, 64))["weight.quant_map"].double().numpy()
    np.testing.assert_allclose(table, QLORA_TABLE, rtol=1e-7)
    np.testing.assert_allclose(reference.nf4_codebook(), QLORA_TABLE, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 256), (6, 96), (160, 160)], ids=["rows_of_blocks", "across_rows", "pocket"])
def test_nf4_equals_the_reference(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    packed = Nf4(False).quantize(weight)
    expected = reference.nf4(weight.double().numpy(), np.array(QLORA_TABLE))
    stable = expected.stable
    assert stable.mean() > 0.999
    np.testing.assert_array_equal(packed["weight.absmax"].double().numpy(), expected.scale)
    array = packed["weight"].numpy()
    codes = np.concatenate([array >> 4, array & 15], 1).reshape(shape)  # here the high nibble comes first
    np.testing.assert_array_equal(codes[stable], expected.codes[stable])
    values = NF4.dequantize(packed, shape, torch.float32).double().numpy()
    np.testing.assert_allclose(values[stable], expected.values[stable], rtol=1e-6)


def test_nf4_double_quantization_equals_the_reference() -> None:
    """Compare the largest value of each dequantized block, which shows the scale of the block."""
    weight = normal(300, 128) * torch.linspace(0.5, 2, 300).unsqueeze(1)  # 600 blocks: three nested ones, one partial
    single, double = (Nf4(flag).quantize(weight) for flag in (False, True))
    assert torch.equal(single["weight"], double["weight"])
    codebook = double["weight.nested_quant_map"].double().numpy()
    assert len(codebook) == 256
    expected, stable = reference.double_quantized(single["weight.absmax"].double().numpy(), codebook)
    values = NF4.dequantize(double, (300, 128), torch.float32).double().numpy()
    assert stable.mean() > 0.99
    largest = np.abs(values).reshape(-1, 64).max(-1)
    np.testing.assert_allclose(largest[stable], expected[stable], rtol=1e-5)


def test_bitsandbytes_dequantizes_the_tensors_of_nf4() -> None:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    weight = normal(32, 64)
    packed = NF4.quantize(weight)
    header = json.loads(bytes(packed["weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert header["quant_type"] == "nf4"
    assert (header["blocksize"], header["nested_blocksize"], header["shape"]) == (64, 256, [32, 64])
    state = QuantState.from_dict({k: v for k, v in packed.items() if k != "weight"}, torch.device("cpu"))
    assert torch.equal(dequantize_4bit(packed["weight"], state), NF4.dequantize(packed, (32, 64), torch.float32))


def test_bf16_rounds_to_nearest_even() -> None:
    weight = torch.tensor([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]])
    packed = BF16.quantize(weight)
    assert packed["weight"].dtype is torch.bfloat16
    assert BF16.dequantize(packed, (1, 4), torch.float32).tolist() == [[1.0, 1.0, 1 + 2**-6, 1 + 2**-7]]


def test_e2m1_all_codes_survive_a_round_trip() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 2)[:, :18].contiguous()
    codes[:, 0] = torch.arange(16)  # every code beside every other
    packed = e2m1.pack(codes)
    assert packed[3, 0].item() == 3 + 16 * 1  # low nibble: even column
    np.testing.assert_array_equal(nibbles(packed), codes.numpy())
    values = e2m1.decode(packed, torch.float32)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[0, 1:17].tolist() == [*table[1:], *[-v for v in table], 0.0]
    kept = codes.clone()
    kept[kept == 8] = 0  # -0.0 is written as 0
    assert torch.equal(e2m1.encode(values), kept)


def test_e2m1_ties_go_to_even_codes() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for dtype in (torch.float32, torch.bfloat16):
        assert e2m1.encode(ties.to(dtype)).tolist() == [0, 2, 2, 4, 4, 6, 6]
        assert e2m1.encode(-ties.to(dtype)).tolist() == [8, 10, 10, 12, 12, 14, 14]
    below, above = torch.nextafter(ties, torch.zeros(7)), torch.nextafter(ties, torch.full((7,), 9.0))
    assert e2m1.encode(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert e2m1.encode(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1.encode(torch.tensor([6.0, 7.0, 1e30, -1e30, -0.0])).tolist() == [7, 7, 7, 15, 0]
    samples = torch.linspace(-7, 7, 4001, dtype=torch.float64)
    np.testing.assert_array_equal(e2m1.encode(samples).numpy(), reference.e2m1_codes(samples.numpy()))


def test_decoded_nvfp4_is_exact_for_every_value_and_scale() -> None:
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # all positive E4M3, 0 to 448
    packed = {
        "weight_packed": torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8).repeat(
            127, 1
        ),
        "weight_scale": scale.unsqueeze(1),
        "weight_global_scale": torch.tensor([3.0]),
    }
    unpack = NVFP4.decoder(packed, (127, 16)).unpack
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(unpack(dtype).float(), unpack(torch.float32))
