"""The numbers of quality.json against independent computations in float64."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from packed_layers import NVFP4, tiny_model
from qerl_lab.model.linear import packable_linears
from qerl_lab.model.weight_error import remove_scales
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.quantize import quality
from qerl_lab.quantize.quantize_options import QuantizeOptions
from small_checkpoints import write_dense, write_packed

CPU = torch.device("cpu")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Write a tiny model with random weights, dense and in NVFP4 with a dense lm_head."""
    folder = tmp_path_factory.mktemp("quality")
    return write_dense(folder / "dense", dense_model()), write_packed(folder / "packed", dense_model(), NVFP4)


def dense_model():
    return tiny_model(dtype=torch.bfloat16)


def options_for(folders: tuple[Path, Path], **changes) -> QuantizeOptions:
    return QuantizeOptions(model=str(folders[0]), out=str(folders[1]), **changes)


def nvfp4_by_hand(files: WeightFiles, name: str) -> np.ndarray:
    """Dequantize in float64 by the definition of the format."""
    packed = files.tensor(f"{name}.weight_packed").numpy()
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = np.array([*E2M1, *(-value for value in E2M1)])[codes]
    scale = files.tensor(f"{name}.weight_scale").double().numpy()
    return values * np.repeat(scale, 16, axis=1) / files.tensor(f"{name}.weight_global_scale").double().numpy()


def test_bits_sizes_and_sqnr_equal_computations_by_hand(folders):
    dense, packed = map(WeightFiles, folders)
    names = packable_linears(dense_model(), ["lm_head"])
    result = quality.measure(options_for(folders), folders[0], names, folders[1], CPU)
    signal, error = {}, {}
    for name in names:
        weight = dense.tensor(f"{name}.weight").double().numpy()
        signal[name], error[name] = (weight**2).sum(), ((weight - nvfp4_by_hand(packed, name)) ** 2).sum()
    expected = {name: 10 * np.log10(signal[name] / error[name]) for name in names}
    levels = result["sqnr_db"]
    assert levels["layers"] == pytest.approx(expected, abs=1e-4)
    assert levels["all"] == pytest.approx(10 * np.log10(sum(signal.values()) / sum(error.values())), abs=1e-4)
    assert [layer["layer"] for layer in levels["lowest"]] == sorted(names, key=expected.__getitem__)[:5]
    count = sum(dense.tensor(f"{name}.weight").numel() for name in names)
    assert result["weights"] == {"quantized": count, "all": sum(dense.tensor(name).numel() for name in dense.names)}
    assert result["bits_per_weight"]["quantized"] == 4.5 + 32 * len(names) / count
    after = sum(packed.tensor(name).nbytes for name in packed.names)
    assert result["bytes"] == {"before": 2 * result["weights"]["all"], "after": after}
    assert result["bits_per_weight"]["model"] == 8 * after / result["weights"]["all"]
    assert result["options"] == {"scale_rule": "max"}
    assert json.loads((folders[1] / "quality.json").read_text()) == result


@pytest.mark.parametrize(("fitted", "said"), [(False, ""), (True, ", after the scales that AWQ moves")])
def test_the_table_has_the_numbers_of_the_result(fitted: bool, said: str):
    lowest = [{"layer": "a.q_proj", "db": 18.254}, {"layer": "b.q_proj", "db": None}]
    result = {
        "weights": {"all": 3000, "quantized": 2000}, "bytes": {"before": 6000, "after": 2600},
        "bits_per_weight": {"quantized": 4.5, "model": 6.9333},
        "sqnr_db": {"all": 20.0, "lowest": lowest, "scales_fitted": fitted},
    }  # fmt: skip
    table = quality.table(QuantizeOptions(format="mxfp4", method="awq"), result)
    assert [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in table.splitlines()] == [
        ["quantized", "2,000 of 3,000 weights to mxfp4 by awq"],
        ["bits per weight", "4.500 where quantized, 6.933 over the whole model"],
        ["size", "6.00kB -> 2.60kB"],
        ["SQNR", f"20.00 dB over all weights{said}; the lowest:"],
        ["18.25 dB", "a.q_proj"],
        ["inf dB", "b.q_proj"],
    ]


def test_a_layer_without_error_has_an_infinite_sqnr():
    levels = quality.sqnr_summary({"a": (4.0, 0.0), "b": (4.0, 1.0)})
    assert levels["layers"] == {"a": None, "b": pytest.approx(6.0206)}
    assert levels["lowest"][0]["layer"] == "b"
    assert levels["all"] == pytest.approx(10 * math.log10(8))


@pytest.mark.parametrize("fit_scales", [False, True])
@pytest.mark.parametrize(("part", "at_fault", "said"), [
    ("weight", 0, " has weights that are NaN"), ("weight_scale", 1, ".weight_scale has negative numbers or NaN"),
])  # fmt: skip
def test_a_weight_that_is_nan_is_an_error_and_no_infinite_sqnr(folders, tmp_path, part, at_fault, said, fit_scales):
    """GPTQ and AWQ are of another library, and their results are read here first."""
    name = packable_linears(dense_model(), ["lm_head"])[3]
    broken = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    file = broken[at_fault] / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{name}.{part}"][3, 1] = math.nan
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file}: {name}{said}')}"):
        quality.measure_layer(NVFP4, *map(WeightFiles, broken), name, CPU, fit_scales=fit_scales)


def test_weights_that_float32_cannot_square_have_an_sqnr(folders, tmp_path):
    """Formats take weights up to 2**100. quality.json and `evaluate entropy` share one computation of the error."""
    name, large = packable_linears(dense_model(), ["lm_head"])[3], dense_model()
    large.get_submodule(name).weight.data *= 2.0**80
    files = [WeightFiles(write(tmp_path / sort, large, *how)) for write, sort, *how in (
        (write_dense, "dense"), (write_packed, "packed", NVFP4),
    )]  # fmt: skip
    signal, error = quality.measure_layer(NVFP4, *files, name, CPU, fit_scales=False)
    as_usual = quality.measure_layer(NVFP4, *map(WeightFiles, folders), name, CPU, fit_scales=False)
    assert (signal, error) == pytest.approx([square * 2.0**160 for square in as_usual])


def test_scales_that_awq_moves_are_undone_and_errors_stay():
    """W' = R (W + E) C, if both the inputs and the outputs of a layer were rescaled."""
    torch.manual_seed(0)
    weight = torch.randn(256, 192)
    noise = 0.1 * torch.randn_like(weight)
    rows, columns = torch.rand(256, 1) * 3 + 0.2, torch.rand(1, 192) * 3 + 0.2
    moved = rows * (weight + noise) * columns
    plain = (noise**2).sum().item()
    assert ((remove_scales(weight, moved) - weight) ** 2).sum() == pytest.approx(plain, rel=0.02)
    assert ((remove_scales(weight, weight + noise) - weight) ** 2).sum() == pytest.approx(plain, rel=0.02)
    assert ((moved - weight) ** 2).sum() > 100 * plain
    dead = moved.clone()
    dead[:, 3] = 0
    assert remove_scales(weight, dead).isfinite().all()


def test_only_awq_is_compared_after_its_scales_are_undone(folders, tmp_path):
    twice = dense_model()
    for layer in twice.model.layers:
        layer.mlp.down_proj.weight.data *= 2
    packed, name = write_packed(tmp_path / "twice", twice, NVFP4), "model.layers.0.mlp.down_proj"
    levels = {}
    for method in ("awq", "gptq"):
        options = options_for(folders, method=method)
        levels[method] = quality.measure(options, folders[0], [name], packed, CPU)["sqnr_db"]
    assert levels["awq"]["layers"][name] > 18
    assert levels["gptq"]["layers"][name] < 1
    assert (levels["awq"]["scales_fitted"], levels["gptq"]["scales_fitted"]) == (True, False)
