"""The quantize command in this process: its refusals, its files, and how transformers reads them."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from packed_layers import tiny_model
from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.grammar import parse_options
from qerl_lab.config.option import ConfigError
from qerl_lab.evaluate.evaluate_options import EntropyOptions
from qerl_lab.model import policy
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.quantize import __main__ as quantize
from qerl_lab.quantize.quantize_model import training_overrides
from qerl_lab.quantize.quantize_options import QuantizeOptions
from qerl_lab.tools.warmup import WarmupOptions
from qerl_lab.tools.warmup import check as check_warmup
from refusals import refusal_of
from small_checkpoints import edit_config, edit_tensors, write_dense, write_random

NO_MODEL = "transformers makes no causal language model of model/config"
SHARDS = "shard_gb=2e-5"  # 20 kB: several files


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Change to an empty directory."""
    monkeypatch.chdir(tmp_path)
    with torch.compiler.set_stance("force_eager"):  # compressed-tensors compiles
        yield tmp_path


@pytest.fixture
def model(here) -> str:
    (here / "model").mkdir()
    write_dense(here / "model", tiny_model(dtype=torch.bfloat16))
    return "model=model"


def tree(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def run(*words: str) -> int:
    return quantize.main(list(words))


def refused(capsys, *words: str, code: int = 2) -> str:
    return refusal_of(quantize.main, words, capsys, code)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("model=pocket out=out format=nvfp5", ["format=nvfp5", "mxfp4, nf4, nvfp4", "Did you mean nvfp4?"]),
        (
            "model=pocket out=out format=bf16",
            ["format=bf16 is not allowed; allowed: fp8, mxfp4", "Type for example format=nvfp4"],
        ),
        ("model=pocket out=out format=nf4 method=gptq", ["method=gptq with format=nf4", "Type method=rtn"]),
        (
            "model=pocket out=out double_quant=false",
            ["double_quant=false", "option of format=nf4", "Leave double_quant out"],
        ),
        (
            "model=pocket out=out scale_rule=four_over_six method=awq",
            ["scale_rule=four_over_six is an option of format=nvfp4 with method=rtn, and format=nvfp4 method=awq was"],
        ),
        ("model=pocket out=out method=awq", ["needs llmcompressor", "extra `quantize`", "Type make quantize-env"]),
        ("model=pocket out=/dev/null/out", ["out=/dev/null/out cannot be written (Not a directory", "Type another"]),
        ("model=pocket out=out samples=5", ["samples=5 is an option of method=awq and", "Leave samples out"]),
        ("model=./nowhere out=out", ["model=./nowhere is no directory", "Type model=DIRECTORY"]),
        ("model=/dev out=out", ["model=/dev holds no config.json, so it is no model directory"]),
        ("model=pocket out=out ignore=[lm_hed]", ["no Linear layer is called lm_hed", "Did you mean lm_head?", "re:"]),
        ('model=pocket out=out ignore=["re:("]', ["'re:(' is no regular expression (missing )"]),
        ("model=pocket out=out ignore=[re:.*]", ["has no Linear layer outside of ignore=[re:.*]. Type another model"]),
    ],
)
def test_a_wrong_command_is_refused(words, parts, capsys):
    text = refused(capsys, *words.split())
    for part in parts:
        assert part in text


def test_a_folder_that_may_not_be_overwritten_is_refused(here, model, capsys):
    (here / "out").mkdir()
    (here / "out" / "config.json").write_text('{"quantization_config": {}}')  # of another program
    for words in (["out=out"], ["out=out", "overwrite=true"]):
        assert "was not made by this command" in refused(capsys, model, *words)
    for out in ("model", "model/out", "."):
        assert "lie within each other" in refused(capsys, model, f"out={out}", "overwrite=true")
    (here / "out" / "quality.json").touch()
    assert "Type another out, or overwrite=true to replace it" in refused(capsys, model, "out=out")
    (here / "out" / "model.gguf").touch()
    text = refused(capsys, "model=out/model.gguf", "out=out", "overwrite=true")
    assert "out=out and model=out/model.gguf lie within each other" in text


def test_a_quantized_model_is_not_quantized_again(model, capsys):
    assert run(model, "out=once") == 0
    capsys.readouterr()
    assert "once is quantized already" in refused(capsys, "model=once", "out=out")


def test_a_list_that_would_pack_the_head_is_refused(model, capsys):
    text = refused(capsys, model, "out=out", "ignore=[down_proj]")
    assert text.startswith("error: ignore=[down_proj] would pack lm_head, the output layer, ")
    assert text.endswith("; allowed: lists that name it. Type 'ignore=[down_proj,lm_head]'.\n")


@pytest.mark.parametrize(
    ("damage", "code", "parts"),
    [
        # no model
        (lambda f: (f / "config.json").unlink(), 2, ["model=model holds no config.json, so it is no model directory"]),
        (lambda f: (f / "model.safetensors").unlink(), 2, ["model=model holds no weights in safetensors"]),
        (lambda f: (f / "tokenizer.json").unlink(), 2, ["model=model holds no tokenizer; allowed: tokenizer.json"]),
        (lambda f: edit_config(f, model_type="nosuch"), 2, [NO_MODEL]),
        # a damaged model
        (
            lambda f: edit_tensors(f, model__layers__1__mlp__up_proj__weight=None),
            1,
            ["dense according to config.json: model.layers.1.mlp.up_proj.weight missing"],
        ),
        (
            lambda f: edit_tensors(f, model__layers__1__mlp__up_proj__weight=torch.ones(64, 64)),
            1,
            ["model.safetensors: model.layers.1.mlp.up_proj.weight is [64, 64], the model has [128, 64]"],
        ),
        (
            lambda f: edit_tensors(f, model__layers__0__mlp__up_proj__weight=torch.full((128, 64), float("inf"))),
            1,
            ["model.safetensors", "model.layers.0.mlp.up_proj: 8192 values"],
        ),
        (
            lambda f: edit_tensors(f, model__layers__0__mlp__up_proj__weight=torch.ones(128, 64).to(torch.float8_e5m2)),
            1,
            ["model.safetensors: model.layers.0.mlp.up_proj.weight is torch.float8_e5m2; allowed: float64, float32"],
        ),
        (lambda f: os.truncate(f / "model.safetensors", 9000), 1, ["model.safetensors", "is not whole"]),
    ],
)
def test_a_damaged_model_is_named_by_file_and_tensor(here, model, capsys, damage, code, parts):
    damage(here / "model")
    text = refused(capsys, model, "out=out", code=code)
    for part in parts:
        assert part in text


def test_all_files_of_a_model_are_written_and_no_others(here, model):
    for name in ("tokenizer.model", "LICENSE", "chat_template.jinja", "generation_config.json", "notes.md", "x.bin"):
        (here / "model" / name).write_text(json.dumps({"name": name}))
    assert run(model, "out=out", SHARDS) == 0
    source, out = tree("model"), tree("out")
    weights = sorted(name for name in out if name.endswith(".safetensors"))
    copied = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "LICENSE", "chat_template.jinja",
              "generation_config.json"}  # fmt: skip
    own = {"config.json", "model.safetensors.index.json", "quality.json"}
    assert len(weights) > 2
    assert out.keys() == copied | own | set(weights)
    assert {name: out[name] for name in copied} == {name: source[name] for name in copied}
    assert sorted(os.listdir(here)) == ["model", "out"]
    config = json.loads(out["config.json"])
    del config["quantization_config"]
    assert config == json.loads(source["config.json"])


def test_records_of_the_source_are_not_copied(here, model):
    """A command recognizes the folders that it may replace by its records, so a copy must not have them."""
    noted = {"warmup.json", "export.json", "recipe.json", "gguf.json", "quality.json"}
    for name in noted:
        (here / "model" / name).write_text('{"of": "the source"}')
    assert run(model, "out=out", SHARDS) == 0
    assert noted & tree("out").keys() == {"quality.json"}
    origin = json.loads(Path("out/quality.json").read_text())["began_from"]
    assert origin == {name: {"of": "the source"} for name in noted}
    with pytest.raises(ConfigError, match="was not made by this command, so overwrite=true does not remove it"):
        check_warmup(WarmupOptions(model="pocket", task="arithmetic", out="out", overwrite=True))


def test_ignored_layers_stay_dense_and_the_printed_commands_are_accepted(here, model, capsys):
    """The last two lines of the output are commands: one measures the checkpoint, one trains on it."""
    assert run(model, "out='out, 2'", "format=nf4", "ignore=[lm_head,v_proj]", "double_quant=false") == 0
    *_, measure, train = capsys.readouterr().out.splitlines()
    options = parse_options(EntropyOptions, shlex.split(measure.split("-m qerl_lab.evaluate entropy ")[1]))
    assert (options.model, options.checkpoints, options.formats) == ("model", ["out, 2"], [])
    words = shlex.split(train.split("-m qerl_lab ")[1])
    assert "format.double_quant=false" in words
    plan = make_plan(words, multirun=False)
    loaded, _ = policy.load_base(plan.jobs[0].config, torch.device("cpu"))
    kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in loaded.named_modules()}
    assert (kinds["v_proj"], kinds["lm_head"], kinds["q_proj"]) == ("Linear", "Linear", "PackedLinear")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "pocket"}, ["+experiment=nvfp4_aqn", "scale=pocket"]),
        ({"format": "fp8", "activations": "fp8"}, ["rollout=vllm", "format.activations=fp8"]),
        ({"format": "mxfp4", "exponent_rule": "floor"}, ["+experiment=mxfp4_aqn", "format.exponent_rule=floor"]),
    ],
)
def test_the_printed_overrides_are_those_that_the_checkpoint_needs(options, words):
    usual = ["+experiment=fp8_aqn", "scale=custom", "model.path=out"]
    usual += ["task=gsm8k"] if options.get("model") != "pocket" else []
    written = training_overrides(QuantizeOptions(**{"model": "m", "out": "out"} | options))
    changed = {word.partition("=")[0]: word for word in (*usual, *words)}
    assert sorted(written) == sorted(changed.values())


@pytest.mark.parametrize("entry", ["model.layers.1", "re:model[.]layers[.]1[.]"])
def test_transformers_reads_ignore_of_nf4_as_the_lab_does(here, entry):
    """transformers compares the beginnings of names, so layers.1 would match layers.10; it knows no patterns."""
    (here / "model").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 11, "num_attention_heads": 4}
    write_random(here / "model", **sizes)
    assert run("model=model", "out=out", "format=nf4", f'ignore=[lm_head,"{entry}"]') == 0
    skipped = AutoConfig.from_pretrained("out").quantization_config["llm_int8_skip_modules"]
    names = WeightFiles(Path("out")).names
    packed = [name.removesuffix(".weight.absmax") for name in names if name.endswith(".weight.absmax")]
    assert len(packed) == 7 * 10
    assert all(should_convert_module(name, skipped) for name in packed)
    assert not should_convert_module("model.layers.1.mlp.up_proj", skipped)


def test_a_tied_head_is_left_dense_and_listed_as_ignored(here):
    (here / "model").mkdir()
    write_dense(here / "model", tiny_model(tied=True))
    assert run("model=model", "out=out", "ignore=[]") == 0
    assert AutoConfig.from_pretrained("out").quantization_config["ignore"] == ["lm_head"]
    assert not any("lm_head" in name for name in WeightFiles(Path("out")).names)


def test_an_interrupted_calibration_leaves_nothing_and_a_complete_one_all_files(here, model, monkeypatch):
    """A stand-in writes the files of llmcompressor. Its first call is interrupted."""
    from qerl_lab.quantize import llmcompressor

    assert run(model, "out=rtn") == 0
    calls = []

    def stand_in(options: QuantizeOptions, source: Path, left_dense: list[str], folder: Path) -> None:
        assert left_dense == ["lm_head"]
        (folder / "model.safetensors").write_bytes(tree("rtn")["model.safetensors"])
        calls.append(options.samples)
        if len(calls) == 1:
            raise KeyboardInterrupt
        (folder / "config.json").write_bytes(tree("rtn")["config.json"])

    monkeypatch.setattr(llmcompressor, "check", lambda options: None)
    monkeypatch.setattr(llmcompressor, "run", stand_in)
    words = (model, "out=out", "method=gptq", "samples=3")
    assert run(*words) == 130
    os.chdir(here)
    assert sorted(os.listdir()) == ["model", "rtn"]
    assert run(*words) == 0
    assert tree("out").keys() == tree("rtn").keys()
    report = json.loads(tree("out")["quality.json"])
    assert report["calibration"]["samples"] == 3
    assert report["sqnr_db"] == json.loads(tree("rtn")["quality.json"])["sqnr_db"]
