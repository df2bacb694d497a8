"""The packed bytes of a checkpoint depend neither on the compute dtype nor on the command that packs."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from packed_layers import ALL, LAYER_NAMES, NF4, NVFP4, tiny_model
from qerl_lab.config.schema import RunConfig
from qerl_lab.formats.format import Format
from qerl_lab.formats.mxfp4 import Mxfp4
from qerl_lab.formats.nvfp4 import Nvfp4
from qerl_lab.model import policy
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.quantize import __main__ as quantize
from small_checkpoints import edit_tensors, equal, write_dense

FOUR_OVER_SIX = Nvfp4("four_over_six")
# Stored dtypes that bfloat16 does not hold, and a fused layer in two dtypes. Tensors are read alike in all formats.
CASES = [("float32", each) for each in (*ALL, FOUR_OVER_SIX, Mxfp4("ceil"), Mxfp4("floor"))]
CASES += [(stored, each) for stored in ("float16", "mixed") for each in (NVFP4, NF4)]
COMPUTED = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dense checkpoint in a dtype, or in two if "mixed"."""
    dtype = getattr(torch, request.param, torch.bfloat16)
    folder = write_dense(tmp_path_factory.mktemp(request.param), tiny_model(hidden=128, dtype=dtype))
    if request.param == "mixed":
        key = "model.layers.0.self_attn.k_proj.weight"
        edit_tensors(folder, **{key: WeightFiles(folder).tensor(key).float() * 1.001})
    return folder


def loaded(tiny: Callable[..., RunConfig], folder: Path, weight_format: Format, dtype: str) -> Any:
    keys = {f"format__{key}": value for key, value in asdict(weight_format).items()}
    cfg = tiny(model__path=str(folder), model__dtype=dtype, format__name=weight_format.NAME, **keys)
    return policy.load_base(cfg, torch.device("cpu"))[0]


def linears(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the packed tensors of a model by their names in a checkpoint; under BF16 the weights."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            tensors |= {f"{path}.{key}": tensor for key, tensor in module.packed().items()}
        elif path.endswith(LAYER_NAMES):
            tensors[f"{path}.weight"] = module.weight.bfloat16()
    return tensors


def assert_same(own: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert own.keys() == other.keys()
    assert [name for name in own if not equal(own[name], other[name])] == []


@pytest.mark.parametrize(("checkpoint", "weight_format"), CASES, indirect=["checkpoint"], ids=str)
def test_the_packed_bytes_do_not_depend_on_the_compute_dtype(
    tiny: Callable[..., RunConfig], checkpoint: Path, tmp_path: Path, weight_format: Format
) -> None:
    models = [loaded(tiny, checkpoint, weight_format, dtype) for dtype in COMPUTED]
    in_float32, in_bfloat16 = map(linears, models)
    assert [model.model.layers[0].self_attn.q_proj.bias.dtype for model in models] == [torch.float32, torch.bfloat16]
    assert_same(in_float32, in_bfloat16)
    if weight_format == FOUR_OVER_SIX:  # test_rtn.py has the other formats, with their default rules
        words = [f"{key}={str(value).lower()}" for key, value in asdict(weight_format).items()]
        out = tmp_path / "packed"
        command = [f"model={checkpoint}", f"format={weight_format.NAME}", f"out={out}", "device=cpu"]
        assert quantize.main([*command, *words]) == 0
        files = WeightFiles(out)
        assert_same(in_float32, {key: files.tensor(key) for key in in_float32})
    if weight_format.NAME == "nvfp4":
        names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
        weights = [WeightFiles(checkpoint).tensor(name).float() for name in names]
        scales = {in_float32[f"{name}_global_scale"].item() for name in names}
        assert scales == {weight_format.global_scale(weights).item()}
