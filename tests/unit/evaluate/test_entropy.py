"""Entropy and KL of quantized models on the same tokens: compared with float64, and as a command."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from scipy import stats as scipy_stats

from qerl_lab.config.option import ConfigError
from qerl_lab.evaluate import __main__ as evaluate
from qerl_lab.evaluate import entropy
from qerl_lab.evaluate.evaluate_options import EntropyOptions
from qerl_lab.model.weight_files import local_folder
from qerl_lab.quantize import __main__ as quantize

SMALL = ["questions=8", "max_completion_tokens=24", "device=cpu"]


def test_entropy_and_kl_equal_those_in_float64(texts: entropy.Texts) -> None:
    """The float64 values are over the whole vocabulary, text by text without padding."""
    other = copy.deepcopy(texts.model)
    generator = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    entropies, divergences = entropy.compare_to_dense(other, texts)
    p_model, q_model = copy.deepcopy(texts.model).double(), copy.deepcopy(other).double()
    expected = []
    for given, compared in texts.pairs:
        with torch.no_grad():
            ids, span = torch.tensor([given + compared]), slice(len(given) - 1, -1)
            p, q = (model(input_ids=ids).logits[0, span].log_softmax(-1) for model in (p_model, q_model))
        expected.append(torch.stack([-(q.exp() * q).sum(-1), (q.exp() * (q - p)).sum(-1), -(p.exp() * p).sum(-1)]))
    direct = torch.cat(expected, 1)
    assert (entropies - direct[0]).abs().max() < 1e-4
    assert (divergences - direct[1]).abs().max() < 1e-4
    assert (texts.entropies_T - direct[2]).abs().max() < 1e-4
    assert divergences.mean() > 0.01


@pytest.mark.parametrize("texts_of", [8, 4])
def test_interval_and_p_value_follow_students_t_over_texts(texts_of: int) -> None:
    """If all changes are equal, p is that of a sign test, which over four texts cannot be less than 0.125."""
    values = 1 + torch.randn(5 * texts_of, generator=torch.Generator().manual_seed(0)).double()
    of_texts = values.view(texts_of, 5).mean(1).numpy()
    expected = scipy_stats.ttest_1samp(of_texts, 0)
    low, high = expected.confidence_interval()
    assert entropy.interval(values, [5] * texts_of) == pytest.approx((of_texts.mean(), low, high))
    fake = entropy.Texts(None, [([1], [1] * 5)] * texts_of, values, torch.zeros(40), 8)  # type: ignore[arg-type]
    assert entropy.mean_change(values, fake)["p"] == pytest.approx(expected.pvalue)
    equal = entropy.mean_change(torch.full_like(values, 0.01), fake)
    assert (equal["low"], equal["high"]) == pytest.approx((0.01, 0.01))
    assert equal["p"] == 2 * 0.5**texts_of


def test_forking_tokens_are_the_fifth_with_the_highest_entropy() -> None:
    """The expected means are by hand in float64: 3 of 11 tokens are forking tokens."""
    values = torch.tensor([0.1, 2.0, 0.0, 1.5, 0.3, 0.2, 0.4, 0.5, 1.0, 0.6, 0.7], dtype=torch.float64)
    fake = entropy.Texts(None, [([1], [1] * 5), ([1], [1] * 6)], values, torch.zeros(11), 8)  # type: ignore[arg-type]
    found = entropy.entropy_columns(values, fake)
    assert (found["entropy_forking"], found["entropy_rest"]) == pytest.approx((4.5 / 3, 2.8 / 8), abs=1e-12)


def test_a_checkpoint_has_the_same_values_as_the_model_packed_during_loading(tmp_path: Path, capsys) -> None:
    packed = tmp_path / "packed"
    assert quantize.main(["model=pocket", "format=mxfp4", "device=cpu", f"out={packed}"]) == 0
    out = tmp_path / "out"
    assert evaluate.main(["entropy", "formats=mxfp4", f"checkpoints={packed}", f"out={out}", *SMALL]) == 0
    rows = json.loads((out / "entropy.json").read_text())["rows"]
    dense, loaded, read = rows
    assert [row["arm"] for row in (dense, loaded, read)] == ["dense", "mxfp4 rtn", "mxfp4 rtn"]
    for key in ("entropy", "entropy_change", "kl", "weight_error"):
        assert loaded[key] == read[key]
    assert loaded["entropy"]["mean"] - dense["entropy"]["mean"] == pytest.approx(loaded["entropy_change"]["mean"])
    assert loaded["kl"]["mean"] > 1e-4
    assert loaded["entropy_rest"] < loaded["entropy"]["mean"] < loaded["entropy_forking"]
    assert (out / "entropy.png").stat().st_size > 10_000
    assert [entropy.row_name(row) for row in (dense, loaded, read)] == ["dense", "mxfp4 rtn", f"mxfp4 rtn in {packed}"]
    table = capsys.readouterr().out
    assert f"\nmxfp4 rtn in {packed} " in table
    assert "8 completions of arithmetic, " in table
    assert "sampling 8 completions of at most " in table


def test_a_model_with_logits_that_are_not_finite_has_null_values(tmp_path: Path, monkeypatch, capsys) -> None:
    measured = entropy.compare_to_dense

    def compared(*asked) -> tuple[torch.Tensor, torch.Tensor]:
        entropies_T, kl_T = measured(*asked)
        return torch.full_like(entropies_T, math.nan), torch.full_like(kl_T, math.inf)

    monkeypatch.setattr(entropy, "compare_to_dense", compared)
    assert evaluate.main(["entropy", "formats=mxfp4", f"out={tmp_path}", *SMALL]) == 0
    dense, arm = json.loads((tmp_path / "entropy.json").read_text(), parse_constant=pytest.fail)["rows"]
    unknown = dict.fromkeys(("mean", "low", "high"))
    assert (arm["entropy"], arm["entropy_change"], arm["kl"]) == (unknown, unknown | {"p": None}, unknown)
    assert dense["entropy"]["mean"] > 0
    assert arm["weight_error"]["relative"] > 0
    printed = capsys.readouterr().out
    assert re.search(r"\nmxfp4 rtn( +nan){3} +\+nan \[\+nan, \+nan\] +nan +inf +0\.\d+\n", printed)


@pytest.mark.parametrize(("words", "name", "unrecorded"), [
    ("format=nvfp4 scale_rule=four_over_six", "nvfp4 scale_rule=four_over_six rtn", "nvfp4 unknown"),
    ("format=nf4 double_quant=false", "nf4 double_quant=false rtn", "nf4 double_quant=false unknown"),
])  # fmt: skip
def test_a_checkpoint_is_named_by_its_own_record(tmp_path: Path, words: str, name: str, unrecorded: str) -> None:
    packed = tmp_path / "packed"
    line = ["model=pocket", *words.split(), "device=cpu", f"out={packed}"]
    assert quantize.main(line) == 0
    (arm,) = entropy.arms_to_measure(EntropyOptions(formats=[], checkpoints=[str(packed)]))
    assert arm.name == name
    (
        packed / "quality.json"
    ).unlink()  # as in a checkpoint of another program: config.json names neither method nor rule
    (arm,) = entropy.arms_to_measure(EntropyOptions(formats=[], checkpoints=[str(packed)]))
    assert arm.name == unrecorded


def test_the_default_formats_are_all_packed_ones_and_a_dense_checkpoint_is_refused() -> None:
    arms = entropy.arms_to_measure(EntropyOptions(checkpoints=["pocket"]))
    names = [next(arms).name for _ in range(4)]
    assert sorted(names) == ["fp8 rtn", "mxfp4 rtn", "nf4 rtn", "nvfp4 rtn"]
    with pytest.raises(ConfigError, match="in checkpoints is dense; allowed: packed ones"):
        next(arms)
    assert list(entropy.arms_to_measure(EntropyOptions(formats=["bf16"]))) == []


def test_another_seed_samples_other_completions() -> None:
    one, other = (
        entropy.sample_texts(EntropyOptions(questions=2, max_completion_tokens=8, seed=seed), torch.device("cpu"))
        for seed in (0, 1)
    )
    assert one.pairs != other.pairs


@pytest.mark.parametrize(("method", "fits"), [("awq", True), ("gptq", False)])
def test_scales_that_awq_moved_do_not_count_as_weight_error(
    texts: entropy.Texts, monkeypatch: pytest.MonkeyPatch, method: str, fits: bool
) -> None:
    asked: list[bool] = []

    def of_layers(*_: object, fit_scales: bool) -> dict[str, float]:
        asked.append(fit_scales)
        return {"relative": 0}

    monkeypatch.setattr(entropy.weight_error, "of_layers", of_layers)
    cfg = entropy.run_config(EntropyOptions(), "nf4")
    row = entropy.measure_arm(entropy.Arm(cfg, method), texts, local_folder("pocket", None))
    assert (asked, row["weight_error"]["relative"]) == ([fits], 0)


def test_each_configuration_has_its_own_directory() -> None:
    folders = {
        entropy.results_folder(EntropyOptions(seed=seed, formats=[name])) for seed in (0, 1) for name in ("all", "nf4")
    }
    assert len(folders) == 4
    assert entropy.results_folder(EntropyOptions(overwrite=True)) == entropy.results_folder(EntropyOptions())


def test_results_are_replaced_only_with_overwrite(tmp_path: Path, capsys) -> None:
    words = ["entropy", f"out={tmp_path}", *SMALL, "formats=nf4"]
    (tmp_path / "entropy.json").write_text("earlier")
    assert evaluate.main(words) == 2
    told = f"error: out={tmp_path} holds results. Type another out, or overwrite=true to replace them.\n"
    assert capsys.readouterr().err == told
    assert (tmp_path / "entropy.json").read_text() == "earlier"
    assert evaluate.main([*words, "overwrite=true"]) == 0
    assert json.loads((tmp_path / "entropy.json").read_text())["rows"][1]["arm"] == "nf4 rtn"
