"""The calibration of sigma, and models for which it is refused."""

import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_lab.evaluate import __main__ as evaluate
from qerl_lab.evaluate import sigma
from qerl_lab.formats import FORMATS
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.quantize import __main__ as quantize
from small_checkpoints import write_dense


def test_a_model_that_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert quantize.main(["model=pocket", "device=cpu", f"out={tmp_path / 'packed'}"]) == 0
    capsys.readouterr()
    shutil.copytree(ASSETS, tmp_path / "wordless", ignore=shutil.ignore_patterns("tokenizer*"))
    for name, message in (("packed", "is packed; allowed: the dense model"), ("wordless", "holds no tokenizer")):
        for command in ("sigma", "entropy"):
            assert evaluate.main([command, f"model={tmp_path / name}"]) == 2
            assert message in capsys.readouterr().err


def test_formats_and_sigmas_are_measured_on_the_same_completions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """BF16 has KL 0 to the base. More noise has a larger KL, and MXFP4 a larger one than NVFP4."""
    monkeypatch.setattr(sigma, "QUESTIONS", 8)
    monkeypatch.setattr(sigma, "DRAWS", 2)
    assert evaluate.main(["sigma", "sigmas=[0.05,0.3]"]) == 0
    _, header, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"8 completions, \d+ tokens, on cpu", header)
    form = r"(format|sigma) (\S+) +KL to (?:bf16|clean) +(\S+) (?:\+- (\S+) )?nats(?:, \S+ to \S+ over 2 draws)?"
    found = [re.fullmatch(form, line).groups() for line in lines]
    rows = {(kind, name): (float(nats), error) for kind, name, nats, error in found}
    assert [name for kind, name in rows if kind == "format"] == list(FORMATS)
    assert rows["format", "bf16"] == (0.0, "0.00000")
    assert 1e-4 < rows["format", "nvfp4"][0] < rows["format", "mxfp4"][0]
    assert float(rows["format", "nvfp4"][1]) > 0
    assert 1e-4 < rows["sigma", "0.05"][0] < rows["sigma", "0.3"][0] / 10
    least, most = re.search(r"(\S+) to (\S+) over 2 draws", lines[-1]).groups()
    assert float(least) < float(most), "the two draws differ"


def test_relative_noise_has_another_kl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sigma, "QUESTIONS", 4)
    monkeypatch.setattr(sigma, "DRAWS", 2)
    monkeypatch.setattr(sigma, "FORMATS", {})
    lines = set()
    for relative in ("false", "true"):
        assert evaluate.main(["sigma", "sigmas=[0.1]", f"relative={relative}"]) == 0
        lines.add(capsys.readouterr().out.splitlines()[-1])
    assert len(lines) == 2


@pytest.mark.parametrize(("kind", "norms"), [("gemma2", "[input_layernorm,pre_feedforward_layernorm]"), ("olmo2", "")])
def test_a_model_with_other_norms_can_be_measured(
    kind: str, norms: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """These commands have no option aqn.norms."""
    vocabulary = AutoConfig.from_pretrained(ASSETS).vocab_size
    config = AutoConfig.for_model(
        kind, vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = f"model={write_dense(tmp_path / 'm', AutoModelForCausalLM.from_config(config))}"
    few = ["questions=2", "max_completion_tokens=4", "device=cpu", f"out={tmp_path / 'out'}"]
    assert evaluate.main(["accuracy", model, "benchmarks=arithmetic", "format=nvfp4", "common=true", *few]) == 0
    assert evaluate.main(["entropy", model, "formats=nvfp4", *few, "overwrite=true"]) == 0
    monkeypatch.setattr(sigma, "QUESTIONS", 2)
    monkeypatch.setattr(sigma, "DRAWS", 1)
    monkeypatch.setattr(sigma, "FORMATS", {})
    assert evaluate.main(["sigma", model, "sigmas=[0.1]"]) == (0 if norms else 2)
    said = capsys.readouterr()
    assert (f"a run needs aqn.norms={norms}\n" in said.out) if norms else ("no norm to which AQN can add" in said.err)
