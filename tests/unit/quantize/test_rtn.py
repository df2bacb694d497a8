"""Packing a checkpoint file by file gives the bits of packing it whole. Fused layers are packed together."""

import json
import re
import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from packed_layers import NVFP4, each_packed, pack_model, tiny_model
from qerl_lab.formats.format import Format
from qerl_lab.model.linear import fused_groups, packable_linears
from qerl_lab.model.weight_files import DTYPES, WeightFiles
from qerl_lab.quantize import rtn
from small_checkpoints import equal, write_dense

CPU = torch.device("cpu")


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return tiny_model(dtype=dtype)


def write_all(source: WeightFiles, folder: Path, weight_format: Format, shard_bytes: float = 1e9) -> None:
    folder.mkdir()
    rtn.write(source, packable_linears(model_of(), ["lm_head"]), weight_format, CPU, folder, shard_bytes)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@each_packed
@pytest.mark.parametrize(("dtype", "source_shard"), [(torch.float32, "5KB"), (torch.bfloat16, "2GB")])
def test_the_files_hold_the_bits_of_a_model_packed_whole(tmp_path, weight_format, dtype, source_shard):
    """The parts of fused layers are in different files if source files have 5 KB."""
    model = model_of(dtype=dtype)
    write_dense(tmp_path / "dense", model, max_shard_size=source_shard)
    source = WeightFiles(tmp_path / "dense")
    homes = {source.where(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"}
    assert len(homes) == (1 if source_shard == "2GB" else 3)
    write_all(source, tmp_path / "out", weight_format, shard_bytes=15e3)
    pack_model(model, weight_format)
    written, expected = tensors_in(tmp_path / "out"), model.state_dict()
    assert written.keys() == expected.keys()
    assert [key for key in written if not equal(written[key], expected[key])] == []


def test_the_parts_of_a_fused_layer_share_the_largest_scale(tmp_path):
    model = model_of()
    for part, size in (("q", 1.0), ("k", 2.0), ("v", 4.0)):
        model.get_parameter(f"model.layers.1.self_attn.{part}_proj.weight").data[0, 0] = size
    write_dense(tmp_path / "dense", model, max_shard_size="5KB")
    write_all(WeightFiles(tmp_path / "dense"), tmp_path / "out", NVFP4, shard_bytes=1)
    written = tensors_in(tmp_path / "out")
    scales = [written[f"model.layers.1.self_attn.{part}_proj.weight_global_scale"].item() for part in "qkv"]
    assert scales == [448 * 6 / 4.0] * 3
    own = written["model.layers.1.self_attn.o_proj.weight_global_scale"]
    assert own == NVFP4.global_scale([model.model.layers[1].self_attn.o_proj.weight])


@each_packed
def test_files_keep_to_the_size_limit_and_the_index_lists_every_tensor(tmp_path, weight_format):
    source, limit = WeightFiles(write_dense(tmp_path / "dense", model_of())), 15e3
    write_all(source, tmp_path / "out", weight_format, shard_bytes=limit)
    written = WeightFiles(tmp_path / "out")  # refuses an index that does not fit the files
    unit_of = {part: group[0] for group in fused_groups(packable_linears(model_of(), ["lm_head"])) for part in group}
    assert len(written.files) > 3
    sizes = []
    for file in written.files:
        names = [name for name in written.names if written.where(name) == str(file)]
        held = {next((unit for part, unit in unit_of.items() if name.startswith(f"{part}.")), name) for name in names}
        sizes.append(sum(map(written.bytes, names)))
        assert len(held) == 1 or sizes[-1] <= limit
    assert all(size + following > limit for size, following in pairwise(sizes)), "two files would be one"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: Path(written.where(name)).name for name in written.names}
    assert index["metadata"]["total_size"] == sum(map(written.bytes, written.names))


def test_tensors_of_every_dtype_are_copied_unchanged(tmp_path):
    (tmp_path / "dense").mkdir()
    tensors = {f"a.{dtype}": torch.arange(1, 7).reshape(2, 3).float().to(dtype) for dtype in DTYPES.values()}
    tensors |= {f"b.{dtype}": torch.ones(()).to(dtype) for dtype in DTYPES.values()}
    save_file(tensors, tmp_path / "dense" / "model.safetensors")
    write_all(WeightFiles(tmp_path / "dense"), tmp_path / "out", NVFP4)
    written = tensors_in(tmp_path / "out")
    assert all(equal(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("name", "said"),
    [("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj"), ("model.norm.weight", "model.norm.weight")],
)
def test_a_weight_that_is_not_finite_is_named_with_its_file(tmp_path, name: str, said: str):
    """One weight is packed, and one is copied."""
    model = model_of()
    model.get_parameter(name).data.view(-1)[5] = float("nan")
    source = WeightFiles(write_dense(tmp_path / "dense", model))
    with pytest.raises(ValueError, match=re.escape(f"model.safetensors: {said}: 1 values")):
        write_all(source, tmp_path / "out", NVFP4)


def test_a_full_disk_is_named_with_its_file(tmp_path):
    """A limit on the size of files stands for the disk."""
    source = WeightFiles(write_dense(tmp_path / "dense", model_of()))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"out/model\.safetensors cannot be written: .*File too large"):
            write_all(source, tmp_path / "out", NVFP4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
