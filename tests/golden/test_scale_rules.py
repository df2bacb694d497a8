"""The rules of NVFP4 and MXFP4 for the scale of a block."""

from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
from torch import Tensor

import reference_formats as reference
from packed_layers import BY_NAME, NVFP4
from qerl_lab import formats
from qerl_lab.config import schema
from qerl_lab.formats import FORMATS, fp8, mxfp4, nvfp4
from qerl_lab.formats.mxfp4 import Mxfp4
from qerl_lab.formats.nvfp4 import Nvfp4
from qerl_lab.model import policy
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.weight_files import WeightFiles
from reference_formats import nibbles, normal

FOUR_OVER_SIX = Nvfp4("four_over_six")
RULES = ["round", "floor", "ceil"]


def block_errors(weight: Tensor, packed: dict[str, Tensor]) -> np.ndarray:
    """Return the squared error per NVFP4 block, in float64."""
    values = NVFP4.dequantize(packed, tuple(weight.shape), torch.float32)
    return ((values.double() - weight.double()) ** 2).unflatten(1, (-1, NVFP4.BLOCK)).sum(-1).numpy()


def awkward() -> dict[str, Tensor]:
    weight = normal(64, 256)
    zeros = weight.clone()
    zeros[::2, :64] = 0
    zeros[1::2, 64:96] = -0.0
    sizes = torch.exp2(torch.arange(64) // 8 - 4.0).unsqueeze(1)
    powers = torch.exp2((torch.arange(256) % 11) - 9.0) * sizes
    return {
        "normal": weight,
        "cauchy": weight / normal(64, 256, seed=1),
        "blocks_of_many_sizes": weight * torch.logspace(-4, 2, 256),
        "zeros": zeros,
        "powers_of_two": powers * torch.sign(weight),
        "huge": weight.clamp(-0.01, 0.01) * 1e32,
        "tiny": weight * 1e-30,
    }


@pytest.mark.parametrize("sample", awkward())
def test_four_over_six_equals_the_reference(sample: str) -> None:
    weight = awkward()[sample]
    packed = FOUR_OVER_SIX.quantize(weight)
    expected = reference.four_over_six(weight.double().numpy())
    assert packed["weight_global_scale"].item() == pytest.approx(256 * 6 / weight.abs().max().item(), rel=1e-6)
    stable = expected.stable.reshape(64, -1, 16).all(-1) | (sample == "powers_of_two")  # float32 holds these exactly
    in_blocks = stable & (expected.scale > 0)  # a scale of 0 is written as 0.125
    assert in_blocks.mean() > {"zeros": 0.8, "blocks_of_many_sizes": 0.85}.get(sample, 0.97)
    np.testing.assert_array_equal(packed["weight_scale"].double().numpy()[in_blocks], expected.scale[in_blocks])
    elements = np.repeat(in_blocks, 16, -1)
    np.testing.assert_array_equal(nibbles(packed["weight_packed"])[elements], expected.codes[elements])
    values = NVFP4.dequantize(packed, (64, 256), torch.float32).double().numpy()
    np.testing.assert_allclose(values[elements], expected.values[elements], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sample", awkward())
def test_four_over_six_is_never_worse_in_a_block(sample: str, dtype: torch.dtype) -> None:
    weight = awkward()[sample].to(dtype)
    scale = FOUR_OVER_SIX.global_scale([weight])
    best = FOUR_OVER_SIX.quantize(weight, global_scale=scale)
    six = NVFP4.quantize(weight, global_scale=scale)
    errors, of_six = block_errors(weight, best), block_errors(weight, six)
    assert (errors <= of_six * (1 + 1e-4)).all()
    if sample == "normal":
        assert (errors < 0.9 * of_six).mean() > 0.3  # and often much better


def test_the_order_of_a_sum_does_not_choose_between_four_and_six() -> None:
    """A GPU adds the errors of a block in another order than a CPU. In float32 that decided a block of this weight."""
    generator = torch.Generator().manual_seed(2)
    weight = (0.02 * torch.randn(1024, 4096, generator=generator)).bfloat16()
    order = torch.randperm(16, generator=generator)
    shuffled = weight.unflatten(1, (-1, 16))[..., order].flatten(1)
    own, other = (FOUR_OVER_SIX.quantize(w)["weight_scale"] for w in (weight, shuffled))
    assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))


def test_four_over_six_keeps_six_on_a_tie() -> None:
    weight = torch.zeros(2, 16)
    weight[:, 3] = torch.tensor([6.0, -6.0])  # exact either way
    packed = FOUR_OVER_SIX.quantize(weight)
    assert packed["weight_scale"].flatten().tolist() == [256.0, 256.0]
    assert nibbles(packed["weight_packed"])[:, 3].tolist() == [7, 15]


@pytest.mark.parametrize("rule", RULES)
def test_mxfp4_scale_equals_the_reference_for_every_exponent(rule: str) -> None:
    """Check each binade at and beside powers of two and the other mantissas at which a rule changes the exponent."""
    edges = torch.tensor([1.0, 1.5, 1.75, 2.0])
    below, above = torch.nextafter(edges, torch.zeros(4)), torch.nextafter(edges, torch.full((4,), 9.0))
    mantissas = torch.cat([below, edges, above])
    largest = (torch.exp2(torch.arange(-125.0, 98.0)).unsqueeze(1) * mantissas).flatten()
    weight = largest.unsqueeze(1).repeat(1, 32)
    expected = reference.mxfp4(weight.double().numpy(), rule)
    packed = Mxfp4(rule).quantize(weight)
    np.testing.assert_array_equal(packed["weight_scale"].numpy(), expected.scale)
    np.testing.assert_array_equal(nibbles(packed["weight_packed"]), expected.codes)


@pytest.mark.parametrize("rule", RULES)
def test_mxfp4_subnormals_and_zeros_equal_the_reference(rule: str) -> None:
    weight = torch.zeros(5, 32)
    weight[0] = 2.0**-126
    weight[1] = 2.0**-129
    weight[2] = 2.0**-140
    weight[3] = -0.0
    expected = reference.mxfp4(weight.double().numpy(), rule)
    packed = Mxfp4(rule).quantize(weight)
    np.testing.assert_array_equal(packed["weight_scale"].numpy()[:3], expected.scale[:3])
    np.testing.assert_array_equal(nibbles(packed["weight_packed"]), expected.codes)
    assert packed["weight_scale"][3:].count_nonzero() == 0


def test_the_schema_has_the_options_of_the_formats() -> None:
    assert schema.SCALE_RULES == nvfp4.SCALE_RULES
    assert schema.EXPONENT_RULES == mxfp4.EXPONENT_RULES
    assert tuple(fp8.INPUT_ACTIVATIONS) == schema.AUTO_OR_FP8
    own = {name: {option.name for option in fields(kind)} for name, kind in FORMATS.items()}
    keys = fields(schema.FormatConfig)
    assert own == {name: {key.name for key in keys if key.metadata["only"] == name} for name in FORMATS}
    assert [name for name, kind in FORMATS.items() if kind.BLOCK is None] == [schema.DENSE_FORMAT]


def test_the_configured_rules_reach_the_weights() -> None:
    for weight_format in (FOUR_OVER_SIX, Mxfp4("ceil")):
        cfg = schema.RunConfig(format=schema.FormatConfig(name=weight_format.NAME, **asdict(weight_format)))
        assert formats.build(cfg.format) == weight_format
        model, _ = policy.load_base(cfg, torch.device("cpu"))
        dense = WeightFiles(ASSETS).tensor("model.layers.0.mlp.down_proj.weight")
        expected = weight_format.quantize(dense)
        packed = model.model.layers[0].mlp.down_proj.packed()
        assert all(torch.equal(packed[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected)
        assert not torch.equal(packed["weight_packed"], BY_NAME[weight_format.NAME].quantize(dense)["weight_packed"])
