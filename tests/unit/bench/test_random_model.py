"""Random checkpoints, as the quantize command writes them and the lab loads them, and prompts of a given length."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench_jobs import ARCHITECTURE, job
from packed_layers import BY_NAME
from qerl_lab.bench import random_model
from qerl_lab.bench.bench_options import RolloutOptions
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import build_config
from qerl_lab.config.schema import FormatConfig
from qerl_lab.model import policy
from qerl_lab.model.linear import packed_layers
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.quantize import quantize_model
from qerl_lab.quantize.quantize_options import QuantizeOptions

CPU = torch.device("cpu")
FORMATS = list(BY_NAME)
PACKED = ["nvfp4", "nf4"]  # one of each library's layout


def written(folder: Path, name: str, mean_tokens: float = 0, **changes: object) -> Path:
    random_model.write(folder, ARCHITECTURE | changes, FormatConfig(name=name), CPU, mean_tokens)
    return folder


def policy_of(folder: Path, name: str) -> policy.Policy:
    cfg = build_config({"model": {"path": str(folder)}, "format": {"name": name}, "lora": {"rank": 4}, "device": "cpu"})
    return policy.build(cfg, CPU)


@pytest.mark.parametrize("name", FORMATS)
def test_the_lab_loads_a_random_checkpoint_and_its_logits_vary(tmp_path: Path, name: str) -> None:
    loaded = policy_of(written(tmp_path / "model", name), name)
    random_model.write_adapter(tmp_path / "adapter", ARCHITECTURE, 4)
    ids = torch.tensor(random_model.prompt_ids(2, 9, 300, seed=0))
    with torch.no_grad():
        before = loaded.model(ids).logits
        policy.load_adapter(loaded.model, tmp_path / "adapter")
        after = loaded.model(ids).logits
    assert after.isfinite().all()
    assert 0.05 < after.std() < 3
    assert (after - before).abs().max() > 1e-3  # the adapter acts
    entropy = torch.distributions.Categorical(logits=after).entropy()
    assert entropy.min() > 0.5 * math.log(300)


@pytest.mark.parametrize(
    "arm",
    [
        "nvfp4 format.scale_rule=four_over_six", "mxfp4 format.exponent_rule=floor", "nf4 format.double_quant=false",
        "fp8 format.activations=fp8", "nvfp4 format.ignore=[lm_head,down_proj]",
    ],
)  # fmt: skip
def test_an_arm_loads_the_checkpoint_of_its_own_options(tmp_path: Path, arm: str) -> None:
    """The loader refuses a checkpoint with other options."""
    made = job(tmp_path, arm, RolloutOptions())
    loaded = policy.build(made.config(), CPU)
    assert len(packed_layers(loaded.base)) == 2 * (6 if "down_proj" in arm else 7)


def test_an_arm_is_measured_in_the_format_under_which_its_rows_are_listed(tmp_path: Path) -> None:
    made = job(tmp_path, "nvfp4 format.name=nf4", RolloutOptions())
    assert made.about["format"] == "nvfp4"
    with pytest.raises(ConfigError, match=r"is packed in nvfp4, and this run has format\.name=nf4"):
        policy.build(made.config(), CPU)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_checkpoint_equals_the_dense_one_quantized_by_the_command(tmp_path: Path, name: str) -> None:
    dense, own = written(tmp_path / "bf16", "bf16"), WeightFiles(written(tmp_path / name, name))
    quantize_model.run(QuantizeOptions(model=str(dense), format=name, out=str(tmp_path / "quantized"), device="cpu"))
    quantized = WeightFiles(tmp_path / "quantized")
    assert set(own.names) == set(quantized.names)
    for tensor in own.names:
        assert own.dtype(tensor) is quantized.dtype(tensor)
        assert torch.equal(own.tensor(tensor).view(torch.uint8), quantized.tensor(tensor).view(torch.uint8)), tensor
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / name, tmp_path / "quantized")]
    assert configs[0] == configs[1]


def test_a_model_with_tied_embeddings_stores_no_head(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "nvfp4", tie_word_embeddings=True)
    assert "lm_head.weight" not in WeightFiles(folder).names
    policy_of(folder, "nvfp4")


def test_a_prompt_has_the_requested_number_of_tokens(tmp_path: Path) -> None:
    loaded = policy_of(written(tmp_path / "model", "bf16"), "bf16")
    texts = random_model.prompt_texts(3, 50)
    assert len(set(texts)) == 3
    for text in texts:
        ids = loaded.chat.prompt_ids([{"role": "user", "content": text}])
        assert len(ids) == 50
        assert loaded.decode_completion(ids) == text
    assert isinstance(loaded.decode_completion(list(range(301))), str)  # a random model may sample any id


def test_the_padding_token_is_in_no_prompt_and_ends_no_completion() -> None:
    assert {token for prompt in random_model.prompt_ids(8, 20, 5, 0) for token in prompt} == {1, 2, 3, 4}
    assert random_model.end_ids(5, 1) == [5, 1, 2, 3, 4]
