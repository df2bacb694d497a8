"""A new format takes one file, one line in the table and one YAML option. Then every command knows it."""

import importlib
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from packed_layers import LAYER_NAMES, dense_twin, tiny_model, tokens
from qerl_lab.cli import compose
from qerl_lab.config import conf_folder
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.formats import FORMATS
from qerl_lab.model import on_disk, policy
from qerl_lab.model.linear import PackedLinear
from qerl_lab.quantize import __main__ as quantize
from small_checkpoints import equal, write_dense

CPU = torch.device("cpu")
YAML = "# INT4: 15 even steps, a bfloat16 scale per 32\nname: int4\n"
FILE = '''
from dataclasses import dataclass

import torch

from qerl_lab.formats.format import Format, PackedAs, checked, layer_names


@dataclass(frozen=True)
class Int4(Format):
    """Whole numbers from -7 to 7 times a bfloat16 scale per 32 of a row."""

    NAME = "int4"
    BLOCK = 32
    QUANT_METHOD = "int4"
    BY_ROWS = True

    @property
    def bits_per_weight(self):
        return 4 + 16 / 32

    def quantize(self, weight, *, name="weight"):
        blocks = checked(weight, self, name=name).float().unflatten(1, (-1, 32))
        scale = (blocks.abs().amax(-1) / 7).bfloat16()
        steps = torch.where(scale == 0, 1, scale).float().unsqueeze(-1)
        codes = ((blocks / steps).round().clamp(-7, 7) + 8).to(torch.uint8).flatten(1)
        return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale}

    def dequantize(self, packed, shape, dtype):
        codes = torch.stack([packed["weight_packed"] & 15, packed["weight_packed"] >> 4], -1)
        values = (codes.float() - 8).reshape(shape[0], -1, 32) * packed["weight_scale"].float().unsqueeze(-1)
        return values.reshape(shape).to(dtype)

    def layout(self, shape):
        rows, columns = shape
        return {
            "weight_packed": ((rows, columns // 2), torch.uint8),
            "weight_scale": ((rows, columns // 32), torch.bfloat16),
        }

    def quantization_config(self, ignore, dtype):
        return {"quant_method": "int4", "ignore": list(ignore)}

    @classmethod
    def recognize(cls, config):
        return PackedAs(cls(), layer_names("ignore", config.get("ignore")))
'''


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory with a dense model, and add the format to the lab."""
    lab = tmp_path / "lab"
    for name in ("conf", "sweeps"):
        shutil.copytree(conf_folder.package_data(name), lab / name)
    (lab / "conf" / "format" / "int4.yaml").write_text(YAML)
    for module in (conf_folder, compose):
        monkeypatch.setattr(module, "package_data", lambda name: lab / name)
    (lab / "int4.py").write_text(FILE)
    monkeypatch.syspath_prepend(lab)
    monkeypatch.setitem(FORMATS, "int4", importlib.import_module("int4").Int4)
    monkeypatch.delitem(sys.modules, "int4")
    monkeypatch.chdir(tmp_path)
    write_dense(tmp_path / "dense", tiny_model(dtype=torch.bfloat16))
    return tmp_path


def composed(*words: str) -> RunConfig:
    return compose.make_plan([*words, "device=cpu", "lora.rank=4"], multirun=False).jobs[0].config


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def test_a_run_packs_a_dense_model_in_the_new_format_and_trains_adapters() -> None:
    learner = policy.build(composed("format=int4", "model.path=dense", "scale=custom"), CPU)
    packed = packed_layers(learner.model)
    assert len(packed) == 2 * len(LAYER_NAMES)
    loss = learner.model(tokens(), labels=tokens()).loss
    loss.backward()
    grads = [parameter.grad for name, parameter in learner.model.named_parameters() if "lora_B" in name]
    assert len(grads) == 2 * len(LAYER_NAMES)
    assert all(grad.isfinite().all() and grad.count_nonzero() for grad in grads)
    for name, layer in packed.items():
        learner.model.set_submodule(name, dense_twin(layer))
    assert torch.equal(learner.model(tokens(), labels=tokens()).loss, loss)


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_vllm_without_a_kernel_for_the_new_format_is_refused_before_a_run(engine: str) -> None:
    said = (
        f"format.name=int4 with rollout.engine={engine} .* no kernel for it; .* Type rollout=transformers, or format="
    )
    with pytest.raises(ConfigError, match=said):
        compose.make_plan(["format=int4", f"rollout={engine}"], multirun=False)


def test_a_run_loads_a_model_that_the_quantize_command_wrote_in_the_new_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert quantize.main(["model=dense", "format=int4", "out=out", "device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "4.500 where quantized" in printed
    words = shlex.split(printed.splitlines()[-1].split("-m qerl_lab ")[1])
    assert words[0] == "format=int4"
    on_disk.check(Path("out"), composed(*words))
    assert on_disk.count_parameters(Path("out")) == on_disk.count_parameters(Path("dense"))
    dense = ["format=int4", "model.path=dense", "scale=custom"]
    loaded, own = (packed_layers(policy.load_base(composed(*each), CPU)[0]) for each in (words, dense))
    assert loaded.keys() == own.keys()
    for name, layer in loaded.items():
        assert all(equal(tensor, own[name].packed()[key]) for key, tensor in layer.packed().items()), name
