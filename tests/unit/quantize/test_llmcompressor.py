"""AWQ and GPTQ: checkpoints that llmcompressor wrote, and new ones if it is installed.

Tests of new ones need the environment of `make quantize-env`. Type
`.venv-quantize/bin/python -m pip install pytest pytest-timeout`, then
`.venv-quantize/bin/python -m pytest tests/unit/quantize/test_llmcompressor.py`.
"""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

from packed_layers import BY_NAME, pack_model, tiny_model
from played_modules import play
from qerl_lab.config.option import ConfigError
from qerl_lab.formats import recognize
from qerl_lab.formats.format import PackedAs
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.loading import stored_as
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.quantize import llmcompressor
from qerl_lab.quantize.quantize_options import QuantizeOptions
from small_checkpoints import load, write_dense

DATA = Path(__file__).parents[2] / "data"
# A random Qwen2, written with method=awq, llmcompressor 0.14.0.1 and compressed-tensors 0.19.0.
WRITTEN = DATA / "llmcompressor_nvfp4"


def test_error_on_more_tokens_than_the_model_reads(tmp_path: Path) -> None:
    model = tiny_model()
    longest = model.config.max_position_embeddings
    options = QuantizeOptions(model="m", method="gptq", tokens=longest + 1)
    with pytest.raises(ConfigError, match=rf"Type tokens={longest}\."):
        llmcompressor.run(options, write_dense(tmp_path, model), [], tmp_path / "out")


def test_device_cpu_is_refused_with_a_visible_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    llmcompressor.check(QuantizeOptions(method="gptq"))
    with pytest.raises(ConfigError, match=r"device=cpu with method=gptq: .* Put CUDA_VISIBLE_DEVICES= before"):
        llmcompressor.check(QuantizeOptions(method="gptq", device="cpu"))


def test_files_have_at_most_the_typed_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for llmcompressor leaves the model dense."""
    kinds = dict.fromkeys(("GPTQModifier", "QuantizationModifier"), lambda **_: None)
    names = ("llmcompressor", "llmcompressor.modifiers", "llmcompressor.modifiers.gptq",
             "llmcompressor.modifiers.quantization", "loguru")  # fmt: skip
    logger = SimpleNamespace(remove=lambda: None, add=lambda *_, **__: None)
    play(monkeypatch, dict.fromkeys(names, kinds | {"oneshot": lambda **_: None, "logger": logger}))
    model = tiny_model()
    model.resize_token_embeddings(AutoConfig.from_pretrained(ASSETS).vocab_size)
    (tmp_path / "text.txt").write_text("two eggs " * 20)
    options = QuantizeOptions(model="m", method="gptq", dataset=str(tmp_path / "text.txt"), samples=1, tokens=8)
    options.shard_gb = 1e-4
    llmcompressor.run(options, write_dense(tmp_path / "dense", model), [], tmp_path / "out")
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert 1 < len(files) < len(model.state_dict())


def test_checkpoints_of_llmcompressor_are_recognized() -> None:
    for name in ("nvfp4", "mxfp4"):
        config = json.loads((DATA / f"llmcompressor_{name}" / "config.json").read_text())["quantization_config"]
        assert config["version"] == "0.19.0"
        assert recognize(config) == PackedAs(type(BY_NAME[name])(None), ("lm_head",))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_a_checkpoint_of_llmcompressor_gives_the_logits_of_transformers() -> None:
    """The band is for transformers, which rounds value * scale / global scale to bfloat16: 0.4% of the logits."""
    ours = load(WRITTEN)
    theirs = AutoModelForCausalLM.from_pretrained(
        WRITTEN, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).float()
    assert sum(isinstance(layer, PackedLinear) for layer in ours.modules()) == 14
    tokens = torch.arange(48).view(2, 24) * 5 % 300
    with torch.no_grad():
        logits, expected = ours(tokens).logits, theirs(tokens).logits
    assert expected.std() > 0.3
    assert 0 < (logits - expected).norm() < 0.008 * expected.norm()


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_calibrated_checkpoint_loads_and_gptq_is_better_than_rounding(name: str, method: str, tmp_path: Path) -> None:
    """Compare logits on the calibration text. AWQ may be slightly worse than rounding."""
    pytest.importorskip("llmcompressor", reason="llmcompressor is not installed: make quantize-env")
    model = tiny_model(dtype=torch.bfloat16)
    model.resize_token_embeddings(AutoConfig.from_pretrained(ASSETS).vocab_size)
    write_dense(tmp_path / "dense", model)
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{n} eggs + {n * n} is"}) for n in range(200)))
    options = QuantizeOptions(
        model=str(tmp_path / "dense"),
        format=name,
        method=method,
        dataset=str(tmp_path / "text.jsonl"),
        samples=8,
        tokens=32,
    )
    (tmp_path / "out").mkdir()
    llmcompressor.run(options, tmp_path / "dense", ["lm_head"], tmp_path / "out")
    stored = stored_as(tmp_path / "out")
    assert stored == PackedAs(type(BY_NAME[name])(None), ("lm_head",))
    written = load(tmp_path / "out")  # it refuses parts of a fused layer with different global scales
    tokens = llmcompressor.calibration.sequences(
        options.dataset, llmcompressor.AutoTokenizer.from_pretrained(ASSETS), samples=8, tokens=32, seed=0
    )
    rounded = model.float()
    with torch.no_grad():
        expected = rounded(tokens).logits
        pack_model(rounded, BY_NAME[name])
        ours, rtn = ((each(tokens).logits - expected).norm() / expected.norm() for each in (written, rounded))
    assert ours < (0.9 * rtn if method == "gptq" else 1.1 * rtn)
    packed = BY_NAME[name].layout((64, 64))
    assert {f"model.layers.0.self_attn.q_proj.{key}" for key in packed} <= {*WeightFiles(tmp_path / "out").names}
