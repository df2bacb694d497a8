"""A checkpoint of the quantize command remembers by which rule it was rounded, and a run cannot claim another."""

import dataclasses
from pathlib import Path

import pytest
import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.model import on_disk, policy
from qerl_lab.quantize import __main__ as quantize


def test_a_run_says_the_rule_of_its_checkpoint(tmp_path: Path, tiny) -> None:
    out = tmp_path / "packed"
    words = ["model=pocket", "format=mxfp4", "exponent_rule=floor", "quality=weights", "device=cpu", f"out={out}"]
    assert quantize.main(words) == 0
    cfg = tiny(model__path=str(out), format__name="mxfp4")
    with pytest.raises(ConfigError, match=r"exponent_rule=floor, and format.exponent_rule=round was given\. Type form"):
        policy.load_base(cfg, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"exponent_rule=floor, and format.exponent_rule=round was given\. Type form"):
        on_disk.check(out, cfg)  # before anything starts: of a sweep each job would fail by itself
    cfg = dataclasses.replace(cfg, format=dataclasses.replace(cfg.format, exponent_rule="floor"))
    on_disk.check(out, cfg)
    loaded, _ = policy.load_base(cfg, torch.device("cpu"))
    dense = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path="pocket"))
    packed_here, _ = policy.load_base(dense, torch.device("cpu"))
    name = "model.layers.0.mlp.up_proj"
    for key, tensor in loaded.get_submodule(name).packed().items():
        assert torch.equal(tensor, packed_here.get_submodule(name).packed()[key]), key
    (out / "quality.json").unlink()  # as of a checkpoint that others made: nothing is claimed
    cfg = tiny(model__path=str(out), format__name="mxfp4", format__exponent_rule="ceil")
    policy.load_base(cfg, torch.device("cpu"))
