"""The choice of vLLM's kernels: which shapes and rows are timed, and that they are timed once."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from qerl_lab import formats
from qerl_lab.config.schema import FormatConfig
from qerl_lab.rollout.vllm import backends

AUTO = {"rollout__vllm__linear_backend": "auto"}


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """What a GPU would measure; `asked` in it counts how often."""
    found = {"marlin": 3.0, "humming": 2.0}
    asked = []

    def milliseconds(weight_format: object, shapes: object, rows: object) -> dict[str, float]:
        asked.append((shapes, rows))
        return {name: found[name] for name in ("marlin", "humming")}

    monkeypatch.setattr(backends, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found["asked"] = asked
    return found


@pytest.fixture
def model(tiny, build_policy) -> nn.Module:
    return build_policy(tiny()).model


def test_shapes_are_those_of_fused_layers_under_the_adapter(model: nn.Module) -> None:
    shapes = backends.shapes_of(model)
    config = model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    expected = {(hidden, keys, keys): hidden, (inner, inner): hidden, (hidden,): inner}
    assert {sizes: columns for sizes, columns in shapes if (sizes, columns) != ((hidden,), hidden)} == expected
    assert shapes.total() == 4 * config.num_hidden_layers


def test_the_fastest_is_taken_and_timed_once(times: dict, tiny, model: nn.Module, tmp_path: Path, capsys) -> None:
    cfg = tiny(format__name="nvfp4", rollout__prompts_per_step=3, rollout__group_size=3,
               optim__micro_batch_size=3, **AUTO)  # fmt: skip
    assert backends.chosen(cfg, model) == "humming"
    assert "linear_backend=humming: the model's products at 9, 5, 3 rows take marlin 3.00 ms" in capsys.readouterr().out
    times |= {"marlin": 1.0}
    assert backends.chosen(cfg, model) == "humming"
    assert len(times["asked"]) == 1
    assert len(json.loads((tmp_path / "qerl-lab" / "linear_backend.json").read_text())) == 1
    assert backends.chosen(tiny(format__name="mxfp4", rollout__prompts_per_step=3, **AUTO), model) == "marlin"
    assert backends.chosen(tiny(format__name="nvfp4", **AUTO), model) == "marlin", "other rows"
    assert len(times["asked"]) == 3


@pytest.mark.parametrize(("name", "asked", "told"), [
    ("nf4", "auto", "auto"), ("bf16", "vllm", "auto"), ("nvfp4", "vllm", "auto"), ("nvfp4", "humming", "humming"),
])  # fmt: skip
def test_nothing_is_timed_for_other_formats_or_unless_asked(
    times: dict, tiny, model: nn.Module, name: str, asked: str, told: str
) -> None:
    assert backends.chosen(tiny(format__name=name, rollout__vllm__linear_backend=asked), model) == told
    assert times["asked"] == []


def test_a_random_weight_has_the_layout_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    real = {name: getattr(torch, name) for name in ("randint", "full")}
    for name, function in real.items():
        monkeypatch.setattr(torch, name, lambda *a, _f=function, **k: _f(*a, **k | {"device": "cpu"}))
    for name in backends.KERNELS:
        weight_format = formats.build(FormatConfig(name=name))
        packed = backends.random_weight(weight_format, (64, 128))
        layout = {key: (tuple(t.shape), t.dtype) for key, t in packed.items()}
        assert layout == {key: (tuple(size), dtype) for key, (size, dtype) in weight_format.layout((64, 128)).items()}
        assert weight_format.dequantize(packed, (64, 128), torch.float32).isfinite().all()
