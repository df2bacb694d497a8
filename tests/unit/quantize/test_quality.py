"""The numbers of quality.json against computations of another kind, in float64."""

import json
import math
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from packed_layers import NVFP4, tiny_model
from qerl_lab import tasks
from qerl_lab.evaluate.weight_error import remove_scales
from qerl_lab.model.linear import packable
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.quantize import divergence, quality
from qerl_lab.quantize.quantize_options import QuantizeOptions
from qerl_lab.tasks import arithmetic
from small_checkpoints import write_dense, write_packed

CPU = torch.device("cpu")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The pocket's architecture with random weights, dense and in NVFP4, with lm_head in full."""
    folder = tmp_path_factory.mktemp("quality")
    return write_dense(folder / "dense", large_enough()), write_packed(folder / "packed", large_enough(), NVFP4)


def large_enough():
    model = tiny_model(dtype=torch.bfloat16)
    model.resize_token_embeddings(427)
    torch.manual_seed(1)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight.data.normal_(0, 0.3)
    return model


def options_for(folders: tuple[Path, Path], **changes) -> QuantizeOptions:
    return QuantizeOptions(model=str(folders[0]), out=str(folders[1]), **changes)


def nvfp4_by_hand(files: WeightFiles, name: str) -> np.ndarray:
    """Float64, from the definition of the format."""
    packed = files.tensor(f"{name}.weight_packed").numpy()
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = np.array([*E2M1, *(-value for value in E2M1)])[codes]
    scale = files.tensor(f"{name}.weight_scale").double().numpy()
    return values * np.repeat(scale, 16, axis=1) / files.tensor(f"{name}.weight_global_scale").double().numpy()


def test_bits_sizes_and_sqnr(folders):
    dense, packed = map(WeightFiles, folders)
    names = packable(large_enough(), ["lm_head"])
    result = quality.measure(options_for(folders, quality="weights"), folders[0], names, folders[1], CPU)
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
    assert result["kl"] is None


def test_kl_and_entropy(folders):
    result = divergence.compare(options_for(folders), *folders, 10**5, CPU)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    dense, packed = folders[0], WeightFiles(folders[1])
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64)
    other = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64)
    for name in packable(other, ["lm_head"]):
        other.get_parameter(f"{name}.weight").data = torch.from_numpy(nvfp4_by_hand(packed, name))
    kl, entropies = [], []
    for given, compared in divergence.word_problem_pairs(tokenizer):
        ids = torch.tensor([given + compared])
        with torch.no_grad():
            p, q = (each(ids).logits[0].softmax(-1).numpy() for each in (model, other))
        p, q = p[len(given) - 1 : -1], q[len(given) - 1 : -1]
        kl += list((q * np.log(q / p)).sum(-1))
        entropies += list(zip(-(p * np.log(p)).sum(-1), -(q * np.log(q)).sum(-1), strict=True))
    assert 200 < len(kl) == result["tokens"] < 1000
    assert 1e-3 < np.mean(kl) == pytest.approx(result["nats_per_token"], rel=1e-4)
    expected = pytest.approx([result["entropy_original"], result["entropy_quantized"]], rel=1e-5)
    assert list(np.mean(entropies, axis=0)) == expected
    assert (result["device"], result["dtype"], result["text"]) == ("cpu", "float32", "word problems")


def test_a_model_against_itself_has_no_kl_and_infinite_sqnr(folders):
    options = options_for(folders, format="bf16", quality="full")
    assert divergence.compare(options, folders[0], folders[0], 10**5, CPU)["nats_per_token"] == 0
    layers = [quality.MeasuredLayer("a", 4.0, 0.0, 1, 1), quality.MeasuredLayer("b", 4.0, 1.0, 1, 1)]
    levels = quality.sqnr_summary(layers)
    assert levels["layers"] == {"a": None, "b": pytest.approx(6.0206)}
    assert levels["lowest"][0]["layer"] == "b"
    assert levels["all"] == pytest.approx(10 * math.log10(8))


@pytest.mark.parametrize("fit_scales", [False, True])
@pytest.mark.parametrize(("part", "at_fault", "said"), [
    ("weight", 0, " has weights that are NaN"), ("weight_scale", 1, ".weight_scale has negative numbers or NaN"),
])  # fmt: skip
def test_a_weight_that_is_nan_is_an_error_and_no_infinite_sqnr(folders, tmp_path, part, at_fault, said, fit_scales):
    """GPTQ and AWQ are other libraries, whose results are read here first."""
    name = packable(large_enough(), ["lm_head"])[3]
    broken = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    file = broken[at_fault] / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{name}.{part}"][3, 1] = math.nan
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file}: {name}{said}')}"):
        quality.measure_layer(NVFP4, *map(WeightFiles, broken), name, CPU, fit_scales=fit_scales)


def test_the_scales_that_awq_moves_are_undone_and_nothing_else():
    """W' = R (W + E) C, as where both the inputs and the outputs of a layer were rescaled."""
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


def test_awq_alone_is_compared_after_its_scales(folders, tmp_path):
    twice = large_enough()
    for layer in twice.model.layers:
        layer.mlp.down_proj.weight.data *= 2
    packed, name = write_packed(tmp_path / "twice", twice, NVFP4), "model.layers.0.mlp.down_proj"
    levels = {}
    for method in ("awq", "gptq"):
        options = options_for(folders, method=method, quality="weights")
        levels[method] = quality.measure(options, folders[0], [name], packed, CPU)["sqnr_db"]
    assert levels["awq"]["layers"][name] > 18
    assert levels["gptq"]["layers"][name] < 1
    assert (levels["awq"]["scales_fitted"], levels["gptq"]["scales_fitted"]) == (True, False)


def test_problems_are_asked_through_the_chat_template_or_without_one():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    (given, compared), *others = divergence.word_problem_pairs(tokenizer)
    assert len(others) == 15
    cfg = tasks.read_task_config("arithmetic")
    question = arithmetic.problem(random.Random(0), cfg).text
    chat = [{"role": "system", "content": cfg.instruction}, {"role": "user", "content": question}]
    assert tokenizer.decode(given) == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(compared).endswith("</answer>")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    )  # as Gemma 2's
    alone = tokenizer.decode(divergence.word_problem_pairs(tokenizer)[0][0])
    assert alone == f"<user>{cfg.instruction}\n\n{question}"
    tokenizer.chat_template = None
    plain = tokenizer.decode(divergence.word_problem_pairs(tokenizer)[0][0])
    assert plain == f"{cfg.instruction}\n\n{question}\n\n"


@pytest.mark.parametrize(
    ("free", "place"),
    [(10e9, "float32"), (4e9, "bfloat16"), (2e9, None)],
)
def test_the_models_go_where_there_is_room(monkeypatch, free, place):
    monkeypatch.setattr(divergence.memory, "available_bytes", lambda: free)
    assert divergence.find_device_and_dtype(10**9, CPU) == (None if place is None else (CPU, place))


def test_logits_that_are_not_finite_are_null(folders, monkeypatch):
    monkeypatch.setattr(divergence, "logprobs", lambda model, pair: torch.full((len(pair[1]), 4), math.nan))
    options = options_for(folders)
    result = quality.measure(options, folders[0], packable(large_enough(), ["lm_head"]), folders[1], CPU)
    assert json.loads((folders[1] / "quality.json").read_text())["kl"]["nats_per_token"] is None
    assert "KL to the original  nan" in quality.table(options, result)


def test_without_room_the_table_says_so_and_the_rest_is_there(folders, monkeypatch):
    monkeypatch.setattr(divergence.memory, "available_bytes", lambda: 1000)
    options = options_for(folders)
    result = quality.measure(options, folders[0], packable(large_enough(), ["lm_head"]), folders[1], CPU)
    assert "fit neither" in result["kl"]["skipped"]
    assert "not measured: 0.0 billion weights" in quality.table(options, result)
    assert json.loads((folders[1] / "quality.json").read_text()) == result
    assert (folders[1] / "sqnr.png").stat().st_size > 10_000
    assert result["options"] == {"scale_rule": "max"}
