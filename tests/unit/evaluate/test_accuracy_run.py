"""`python -m qerl_lab.evaluate accuracy`: models, questions, refusals, and the files that it writes."""

import json
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_lab import rollout, tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.config.schema import FormatConfig, RunConfig, TaskConfig
from qerl_lab.config.units import GIB
from qerl_lab.evaluate import __main__ as evaluate
from qerl_lab.evaluate import accuracy_run, subject
from qerl_lab.evaluate.evaluate_options import AccuracyOptions
from qerl_lab.evaluate.summary import ABOUT, ROWS, SCHEMA
from qerl_lab.formats import Nvfp4
from qerl_lab.formats.format import PackedAs
from qerl_lab.model import policy
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.quantize import __main__ as quantize
from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.engine import EngineFailed, Rollout, Sampling
from rollouts import ids_of
from run_directories import write_config

MATH500 = '{"problem": "What is $1+1$?", "answer": "2", "unique_id": "a/1"}\n'
AIME = '{"problem": "What is 1+1?", "answer": "2", "id": 1}\n'


@pytest.fixture(scope="module")
def run_dir(tiny, build_policy, tmp_path_factory) -> Path:
    """Make a finished run in NVFP4 with an adapter far from zero, evaluated at temperature 1 and at most 16 tokens."""
    usual = {"rollout__batch_size": 8, "eval__temperature": 1.0, "eval__top_p": 1.0, "eval__samples": 3}
    cfg = tiny(format__name="nvfp4", seed=4, **usual)
    directory = RunDirectory(tmp_path_factory.mktemp("runs"))
    cfg.run_dir = str(directory.path)
    write_config(directory.path, cfg)
    policy.save_adapter(build_policy(cfg).model, directory.adapter)
    directory.finish({"seconds": 1.0})
    return directory.path


def go(*words: str) -> int:
    return evaluate.main(["accuracy", "device=cpu", *words])


def read(out: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    return pd.read_parquet(out / ROWS), json.loads((out / ABOUT).read_text())


def test_a_run_is_evaluated_with_its_adapter_and_without_noise(run_dir, build_policy, tmp_path, capsys) -> None:
    """The rows equal direct samples of the run's final policy with the same draw."""
    out = tmp_path / "out"
    assert go(f"run={run_dir}", "questions=4", "samples=2", f"out={out}") == 0
    rows, about = read(out)
    cfg = RunDirectory(run_dir).config()
    learner = build_policy(cfg)  # draws the same adapter as the run
    task = tasks.load(cfg.task)
    prompts = [learner.chat.prompt_ids(task.messages(question)) for question in task.heldout[:4]]
    sampling = Sampling(16, accuracy_run.evaluation_seed(4, "arithmetic", 0), 1.0, 1.0)
    ids = ids_of(rollout.build(cfg, learner).generate(prompts, 2, sampling))
    assert rows["completion"].tolist() == [learner.decode_completion(one) for group in ids for one in group]
    assert rows["id"].tolist() == [question.id for question in task.heldout[:4] for _ in range(2)]
    assert rows["tokens"].tolist() == [len(one) for group in ids for one in group]
    assert about["results"][0]["questions"] == 4
    assert "run" in capsys.readouterr().out
    assert go(f"run={run_dir}", "questions=4", "samples=2", "adapter=false") == 0
    (base,) = (run_dir / "evaluations").iterdir()
    assert read(base)[0]["completion"].tolist() != rows["completion"].tolist()
    assert ", its base alone is evaluated: nvfp4" in capsys.readouterr().out
    shutil.rmtree(run_dir / "evaluations")


@pytest.mark.parametrize(("held_by_others", "jobs"), [(0.5, 1), (3.0, 4)])  # GiB, with the context of this process
def test_a_run_that_shared_its_gpu_is_evaluated_with_the_whole_gpu_if_no_other_process_uses_it(
    held_by_others: float, jobs: int, tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two evaluations that start at once see each other, because they look after they have loaded their models."""
    asked, others = [], [0.0]
    sharing = subject.Subject("a run", tiny(device="cuda", jobs_per_gpu=4))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int((76 - others[-1]) * GIB), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * GIB)

    def load_policy(_: subject.Subject) -> SimpleNamespace:
        others.append(held_by_others)
        return SimpleNamespace(device=torch.device("cuda"))

    def build(cfg: RunConfig, _: SimpleNamespace) -> SimpleNamespace:
        asked.append(cfg.jobs_per_gpu)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(subject, "load_policy", load_policy)
    monkeypatch.setattr(rollout, "build", build)
    monkeypatch.setattr(accuracy_run, "answer_missing_parts", lambda *_: {})
    accuracy_run.ask_engine(sharing, [], {}, "own", None)
    assert asked == [jobs]


def test_prompts_of_a_model_may_fill_the_context_that_completions_leave() -> None:
    for typed, longest in ((None, 1024), (1500, 1500)):
        options = AccuracyOptions(model="pocket", max_completion_tokens=typed, device="cpu")
        lengths = subject.resolve_subject(options).cfg.rollout
        assert (lengths.max_prompt_tokens, lengths.max_completion_tokens) == (2048 - longest, longest)


def test_a_template_that_prints_the_date_gives_a_model_the_same_prompts_every_day(tmp_path: Path) -> None:
    """Otherwise an evaluation that continues tomorrow would mix two prompts."""
    model = shutil.copytree(ASSETS, tmp_path / "dated")
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}\n" + template.read_text())
    asked = subject.load_policy(subject.resolve_subject(AccuracyOptions(model=str(model), device="cpu")))
    ids = asked.chat.prompt_ids([{"role": "user", "content": "1+1?"}])
    assert asked.decode_prompt(ids).startswith("01 Jan 2026\n")


def test_the_released_codes_grading_counts_the_first_character(run_dir, tmp_path, capsys) -> None:
    words = ["questions=4", "samples=2", "max_completion_tokens=40", "grading=first_character"]
    assert go(f"run={run_dir}", *words, f"out={tmp_path / 'out'}") == 0
    assert "grading: by first character" in capsys.readouterr().out
    rows, about = read(tmp_path / "out")
    assert rows["accuracy"].tolist() == accuracy_run.same_first_character(rows["completion"], rows["answer"])
    assert about["identity"]["grading"] == "first_character"
    said = [f"<think>a</think><answer>{answer}</answer>" for answer in ("16", "18", " 18", "28", "", "$18")] + ["18"]
    assert accuracy_run.same_first_character(said, ["18"] * 7) == [1, 1, 1, 0, 0, 0, 0]
    assert accuracy_run.same_first_character(["no answer"], [""]) == [0]


def test_a_run_is_evaluated_with_its_own_sampling_unless_another_is_typed(run_dir, tmp_path, capsys) -> None:
    assert go(f"run={run_dir}", "questions=2", f"out={tmp_path / 'own'}") == 0
    (own,) = read(tmp_path / "own")[1]["results"]
    assert (own["sampling"], own["samples"]) == ("temperature 1, top-p 1, 16 tokens", 3)
    assert "temperature 1, top-p 1, 16 tokens" in capsys.readouterr().out
    words = ["temperature=0.6", "max_completion_tokens=20", f"out={tmp_path / 'typed'}"]
    assert go(f"run={run_dir}", "questions=2", *words) == 0
    rows, about = read(tmp_path / "typed")
    assert [one["sampling"] for one in about["results"]] == ["temperature 0.6, top-p 1, 20 tokens"]
    assert rows["tokens"].max() == 20


def test_each_typed_option_replaces_the_value_of_the_run(run_dir) -> None:
    def asked(**typed: float) -> tuple[float, ...]:
        cfg = subject.resolve_subject(AccuracyOptions(run=str(run_dir), device="cpu", **typed)).cfg
        lengths = cfg.rollout.max_prompt_tokens, cfg.rollout.max_completion_tokens
        return cfg.seed, cfg.eval.temperature, cfg.eval.top_p, cfg.rollout.batch_size, *lengths

    typed = {
        "seed": 7, "temperature": 0.2, "top_p": 0.3, "batch_size": 5, "max_prompt_tokens": 99,
        "max_completion_tokens": 9,
    }  # fmt: skip
    assert asked() == (4, 1.0, 1.0, 8, 256, 16)
    assert asked(**typed) == tuple(typed.values())


def test_a_benchmark_has_the_instruction_of_the_run_unless_its_own_file_has_one() -> None:
    own = TaskConfig(name="gsm8k", path="/a", instruction="mine")
    assert subject.task_config(own, "gsm8k", None) == own
    assert subject.task_config(own, "gsm8k", "/b") == replace(own, path="/b")
    math, arithmetic = (subject.task_config(own, name, None) for name in ("math500", "arithmetic"))
    assert (math.path, math.instruction) == (None, "mine"), "the file of math500 has no instruction"
    assert arithmetic.instruction.startswith("Reply as <think>")
    (brief,) = subject.load_benchmarks(AccuracyOptions(benchmarks=["arithmetic"], instruction=""), RunConfig())
    assert brief.messages(brief.heldout[0]) == [{"role": "user", "content": brief.heldout[0].prompt}]


def test_a_directory_that_no_evaluation_made_is_never_replaced(run_dir, tmp_path, capsys) -> None:
    (kept := tmp_path / "thesis.tex").write_text("mine")
    assert go(f"run={run_dir}", "questions=2", "samples=1", f"out={tmp_path}", "overwrite=true") == 2
    assert f"out={tmp_path} was not made by this command" in capsys.readouterr().err
    assert kept.read_text() == "mine"


def test_every_configuration_has_its_own_directory_and_is_evaluated_once(run_dir, capsys) -> None:
    words = [f"run={run_dir}", "questions=3", "samples=1"]
    for further, count in (([], 1), (["temperature=0"], 2), ([], 2)):
        assert go(*words, *further) == 0
        assert len(list((run_dir / "evaluations").iterdir())) == count
    assert "was evaluated before" in capsys.readouterr().out
    (first, *_) = sorted((run_dir / "evaluations").iterdir())
    assert go(*words, "seed=7", f"out={first}") == 2
    assert f"out={first} exists. Type another out, or overwrite=true" in capsys.readouterr().err
    assert go(*words, "seed=7", f"out={first}", "overwrite=true") == 0
    about = read(first)[1]
    assert (about["identity"]["seed"], about["run_seed"]) == (7, 4)  # the seed of the draw, and the seed of the run
    assert (about["arm"]["aqn.schedule"], "seed" in about["arm"]) == ("off", False)
    (first / ABOUT).write_text(json.dumps(about | {"schema": 1}))  # an older version's is evaluated again
    assert go(*words, "seed=7", f"out={first}") == 2
    assert go(*words, "seed=7", f"out={first}", "overwrite=true") == 0
    assert read(first)[1]["schema"] == SCHEMA
    shutil.rmtree(run_dir / "evaluations")


def test_the_common_engine_has_the_dequantized_base_with_the_adapter(run_dir, build_policy, tmp_path) -> None:
    """Its logits equal the packed base's up to rounding in bfloat16, and not bit for bit."""
    found = subject.resolve_subject(AccuracyOptions(run=str(run_dir), device="cpu"))
    own = subject.load_policy(found)
    ids = torch.tensor([own.chat.prompt_ids([{"role": "user", "content": "Ann has 2 pens."}])])
    with torch.no_grad(), subject.dequantized_subject(found) as common:
        other = subject.load_policy(common)
        assert common.is_dense
        assert not found.is_dense
        assert other.end_ids() == own.end_ids()
        tensors = load_file(Path(common.cfg.model.path) / "model.safetensors")
        assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("_proj.weight")} == {torch.bfloat16}
        packed, dense = own.model(input_ids=ids).logits, other.model(input_ids=ids).logits
        without = other.model.get_base_model()
        with other.model.disable_adapter():
            base = without(input_ids=ids).logits
    assert 0 < (packed - dense).abs().max() < 0.05
    assert (dense - base).abs().max() > 0.5, "the adapter acts"
    assert not Path(common.cfg.model.path).exists(), "the copy is gone"


def test_no_two_engines_are_in_memory_together(run_dir, tmp_path, monkeypatch) -> None:
    """The packed base is built twice: for its own engine, and to be dequantized for the common engine."""
    built, alive, build = list[weakref.ref[torch.nn.Module]](), list[int](), policy.build

    def build_and_count(cfg: RunConfig, device: torch.device, **given: Any) -> policy.Policy:
        alive.append(sum(model() is not None for model in built))
        made = build(cfg, device, **given)
        built.append(weakref.ref(made.model))
        return made

    monkeypatch.setattr(policy, "build", build_and_count)
    assert go(f"run={run_dir}", "questions=2", "samples=1", "common=true", f"out={tmp_path / 'out'}") == 0
    assert alive == [0, 0, 0]
    rows, about = read(tmp_path / "out")
    assert rows["engine"].unique().tolist() == ["own", "common"]
    assert about["own_is_common"] is False


@pytest.mark.parametrize("common", [True, False])
def test_a_dense_base_is_evaluated_once_and_a_note_says_why(tmp_path: Path, common: bool) -> None:
    words = ["benchmarks=arithmetic", "questions=2", "samples=1", "max_completion_tokens=4", f"common={common}".lower()]
    assert go("model=pocket", *words, f"out={tmp_path / 'out'}") == 0
    rows, about = read(tmp_path / "out")
    assert (rows["engine"].unique().tolist(), about["own_is_common"]) == (["own"], True)
    assert about["notes"] == ["its own engine is the common one: bf16 is dense"] * common


def test_a_run_is_evaluated_with_the_date_on_which_it_started(run_dir, tmp_path) -> None:
    """A chat template may print the date."""
    copy = shutil.copytree(run_dir, tmp_path / "run")
    RunDirectory(copy).begin_session(datetime(2020, 5, 5, 12).timestamp())  # in local time
    for adapter in (True, False):
        found = subject.resolve_subject(AccuracyOptions(run=str(copy), adapter=adapter, device="cpu"))
        assert found.day == date(2020, 5, 5)


def test_a_model_without_a_run_has_the_seed_of_its_sampling() -> None:
    """Two evaluations of models are paired by this seed."""
    for seed in (None, 3):
        found = subject.resolve_subject(AccuracyOptions(model="pocket", seed=seed, device="cpu"))
        assert (found.run_seed, found.cfg.seed) == (seed or 0, seed or 0)


def test_a_checkpoint_is_loaded_with_the_layers_that_it_leaves_dense() -> None:
    stored = PackedAs(Nvfp4("max"), ("lm_head", "down_proj"))
    assert subject.packed_format(stored) == FormatConfig(name="nvfp4", ignore=["lm_head", "down_proj"])


def lose_a_matrix(copy: Path) -> None:
    file = copy / "adapter" / WEIGHTS
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda copy: (copy / "adapter" / WEIGHTS).unlink(),
            "has no final adapter (done); allowed: finished runs. First move DONE out of the directory and type ",
        ),
        (lambda copy: (copy / "DONE").unlink(), "First type python -m qerl_lab resume='RUN', or type adapter=false"),
        (
            lambda copy: (copy / "adapter" / WEIGHTS).write_bytes(b"cut off"),
            "model.safetensors cannot be read (Error while deserializing header: ",
        ),
        (lose_a_matrix, "is of another model or rank: 1 matrices differ, the first base_model"),
        (lambda copy: (copy / "resolved.yaml").unlink(), "is no directory of a run"),
    ],
)
def test_a_run_without_a_complete_final_adapter_is_refused(
    run_dir, tmp_path, capsys, damage: Callable, said: str
) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "a run")
    damage(copy)
    assert go(f"run={copy}", "questions=2", "samples=1") == 2
    err = capsys.readouterr().err
    assert said.replace("RUN", str(copy)) in err
    assert err.count("\n") == 1


def test_several_benchmarks_are_read_each_from_its_own_file(tmp_path, capsys) -> None:
    (tmp_path / "math.jsonl").write_text(MATH500 + MATH500.replace("a/1", "a/2"))
    (tmp_path / "aime.jsonl").write_text(AIME)
    specs = f"math500:{tmp_path / 'math.jsonl'},aime24:{tmp_path / 'aime.jsonl'},arithmetic"
    out = tmp_path / "out"
    words = ["model=pocket", f"benchmarks={specs}", "questions=2", "max_completion_tokens=4", f"out={out}"]
    assert go(*words, "max_prompt_tokens=256") == 0
    rows, about = read(out)
    counted = {one["benchmark"]: one["samples"] for one in about["results"]}
    assert counted == {"math500": 4, "aime24": 16, "arithmetic": 4}
    assert about["benchmarks"]["arithmetic"]["instruction"].startswith("Reply as <think>")
    assert about["benchmarks"]["math500"]["instruction"].startswith("Solve the following")
    assert rows["truncated"].all()
    assert (
        "bf16, transformers, no noise, seed 0\nsampling: temperature 0.6, top-p 0.95, 4 tokens\n"
        in capsys.readouterr().out
    )


def test_a_benchmark_with_training_questions_of_the_run_gets_a_note(run_dir, tmp_path, capsys, monkeypatch) -> None:
    trained = tasks.load(RunDirectory(run_dir).config().task).train[5].prompt
    rows = [json.dumps({"problem": text, "answer": "2", "unique_id": id}) for id, text in
            (("a/1", f" {trained.upper()}"), ("a/2", "What is $1+1$?"))]  # fmt: skip
    (tmp_path / "math.jsonl").write_text("\n".join(rows))
    words = [f"run={run_dir}", f"benchmarks=math500:{tmp_path / 'math.jsonl'}", "max_completion_tokens=2", "samples=1"]
    said = "the run was trained on 1 of these 2 questions"
    assert go(*words, f"out={tmp_path / 'run'}") == 0
    assert f"note: math500: {said}\n" in capsys.readouterr().out
    assert read(tmp_path / "run")[1]["notes"] == [f"math500: {said}"]
    assert go(*words, "adapter=false", f"out={tmp_path / 'base'}") == 0
    assert read(tmp_path / "base")[1]["notes"] == []
    monkeypatch.setattr(RunDirectory, "environment", lambda _: {"data": {"training_sha256": "other"}})
    assert go(*words, f"out={tmp_path / 'changed'}") == 0
    (note,) = read(tmp_path / "changed")[1]["notes"]
    assert note == "math500: not compared with the training questions of the run: they have changed since"


def test_training_questions_that_are_gone_are_no_obstacle_to_an_evaluation(tmp_path, tiny) -> None:
    chosen = subject.Subject("a run", tiny(task__name="gsm8k", task__path=str(tmp_path)), arm={"training_sha256": "a"})
    (noted,) = subject.note_trained_questions(chosen, [tasks.load(TaskConfig())])
    assert noted.warnings[-1].startswith(f"not compared with the training questions of the run: task.path={tmp_path} ")


def test_each_question_that_is_too_long_is_counted_once(capsys, tmp_path) -> None:
    """The count does not depend on how many engines and samples answer the other questions."""
    long = MATH500.replace("a/1", "a/2").replace("$1+1$", "$1+1$ " * 200)
    (tmp_path / "math.jsonl").write_text(MATH500 + long)
    packed = tmp_path / "packed"
    assert quantize.main(["model=pocket", "format=mxfp4", "device=cpu", f"out={packed}"]) == 0
    words = [f"model={packed}", f"benchmarks=math500:{tmp_path / 'math.jsonl'}", "max_completion_tokens=4", "samples=2",
             f"out={tmp_path / 'out'}", "instruction=x", "common=true"]  # fmt: skip
    assert go(*words, "max_prompt_tokens=64") == 0
    assert "math500: 1 question is longer than max_prompt_tokens=64, and left out" in capsys.readouterr().out
    assert read(tmp_path / "out")[1]["benchmarks"]["math500"]["too_long"] == 1
    assert go(*words, "max_prompt_tokens=4", "overwrite=true") == 2
    refused = capsys.readouterr().err
    assert "max_prompt_tokens=4 leaves out all 2 questions of math500" in refused
    longest = refused.partition("Type ")[2].rstrip(".\n")  # the limit itself is allowed
    assert go(*words, longest, "overwrite=true") == 0
    assert read(tmp_path / "out")[1]["benchmarks"]["math500"]["too_long"] == 0


def test_a_packed_model_is_evaluated_in_its_own_format(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed = tmp_path / "packed"
    assert quantize.main(["model=pocket", "format=mxfp4", "device=cpu", f"out={packed}"]) == 0
    words = [f"model={packed}", "benchmarks=arithmetic", "questions=2", "samples=1", "max_completion_tokens=4"]
    assert go(*words) == 0
    out, (folder,) = capsys.readouterr().out, (tmp_path / "evaluations" / "packed").iterdir()
    assert "in mxfp4 is evaluated" in out
    assert f"answers: evaluations/packed/{folder.name}" in out
    head, row = out.split("\n\n")[-2].splitlines()
    assert head.split()[:4] == ["benchmark", "engine", "questions", "samples"]
    assert row.split()[:5] == ["arithmetic", "own", "2", "1", f"{read(folder)[1]['results'][0]['accuracy']:.3f}"]
    assert go(*words, "format=nvfp4") == 2
    assert "is packed in mxfp4, and format=nvfp4 was given. Leave format out, or" in capsys.readouterr().err


def test_a_model_is_identified_by_its_content_and_not_by_path_or_time(tmp_path, capsys) -> None:
    """Evaluations of copies belong to one arm. Other weights of the same size and time are another model."""
    first, copy = shutil.copytree(ASSETS, tmp_path / "first"), shutil.copytree(ASSETS, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    words = ["benchmarks=arithmetic", "questions=2", "samples=1", "max_completion_tokens=4", f"out={tmp_path / 'out'}"]
    for model, said in ((first, "is evaluated"), (copy, "was evaluated before")):
        assert go(f"model={model}", *words) == 0
        assert said in capsys.readouterr().out
    assert read(tmp_path / "out")[1]["model"] == {"path": str(first), "revision": None}
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    os.utime(copy / "model.safetensors", (1, 1))
    assert go(f"model={copy}", *words) == 2
    assert "exists. Type another out" in capsys.readouterr().err


def identity(
    cfg: RunConfig, names: Sequence[str] = (), instruction: str = "", data: Any = None, **options: Any
) -> dict[str, Any]:
    """Return the settings that distinguish an evaluation of a run with this configuration from others."""
    asked = [SimpleNamespace(name=name, instruction=instruction, data=data or {}) for name in names]
    return accuracy_run.identifying_settings(AccuracyOptions(**options), subject.Subject("a run", cfg), asked)


def test_an_evaluation_is_another_one_in_every_setting_that_changes_an_answer(tiny, tmp_path) -> None:
    """Otherwise answers under other settings would be printed."""
    usual = identity(tiny())
    for key, value in {
        "seed": 1, "rollout__max_prompt_tokens": 255, "rollout__max_completion_tokens": 15, "rollout__batch_size": 3,
        "eval__temperature": 0.5, "eval__top_p": 0.5, "lora__rank": 8, "lora__alpha": 1.0, "format__name": "nf4",
    }.items():  # fmt: skip
        assert identity(tiny(**{key: value})) != usual, key
    packed = {"format__name": "nvfp4"}
    for how in ({"format__scale_rule": "four_over_six"}, {"format__ignore": ["lm_head", "down_proj"]}):
        assert identity(tiny(**packed)) == identity(tiny(**packed)) != identity(tiny(**packed, **how))
    for options in ({"questions": 3}, {"common": True}, {"grading": "first_character"}):
        assert identity(tiny(), **options) != usual, options
    for one in ({"names": ["math500"]}, {"instruction": "Be brief."}, {"data": {"heldout_sha256": "a"}}):
        assert identity(tiny(), ["gsm8k"]) != identity(tiny(), **{"names": ["gsm8k"]} | one)
    adapters = []
    for content in (b"one", b"two"):
        (tmp_path / WEIGHTS).write_bytes(content)
        trained = subject.Subject("a run", tiny(), adapter=tmp_path)
        adapters.append(accuracy_run.identifying_settings(AccuracyOptions(), trained, [])["adapter"])
        trained = replace(trained, adapter=None, base=tiny().model)  # all weights
        trained.cfg.model.path = str(tmp_path)
        adapters.append(accuracy_run.identifying_settings(AccuracyOptions(), trained, [])["adapter"])
    assert len({*adapters}) == 4


def test_small_benchmarks_get_more_samples_unless_a_number_is_typed(tiny) -> None:
    def samples(temperature: float = 1.0, **options: Any) -> list[int]:
        cfg = tiny(eval__samples=3)
        cfg.eval.temperature = temperature  # only this command allows 0
        (counted,) = identity(cfg, ["gsm8k", "aime24", "aime25", "amc23"], **options)["samplings"].values()
        return list(counted.values())

    assert samples() == [3, 16, 16, 16]
    assert samples(samples=2) == [2] * 4
    assert samples(temperature=0.0, samples=2) == [1] * 4


def test_answers_before_an_engine_failure_are_kept(run_dir, tmp_path, capsys, monkeypatch) -> None:
    """The continued command ends with the same bytes as a command that nothing stopped."""
    words = [f"run={run_dir}", "questions=8", "samples=2", "temperature=1.0"]
    assert go(*words, f"out={tmp_path / 'whole'}") == 0
    ask, calls = accuracy_run.ask_questions, iter(range(1, 10))

    def failing(*args: Any) -> Any:
        if next(calls) == 2:
            raise EngineFailed("the engine died.")
        return ask(*args)

    monkeypatch.setattr(accuracy_run, "ask_questions", failing)
    assert go(*words, f"out={tmp_path / 'out'}") == 1
    assert "error: the engine died. The same command goes on where it stopped." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    asked = []
    monkeypatch.setattr(accuracy_run, "ask_questions", lambda *args: asked.append(args) or ask(*args))
    assert go(*words, f"out={tmp_path / 'out'}") == 0
    assert len(asked) == 1, "the first of two parts of four questions was kept"
    assert (tmp_path / "out" / ROWS).read_bytes() == (tmp_path / "whole" / ROWS).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [ROWS, ABOUT]


def test_nan_logits_end_the_evaluation_without_a_result(run_dir, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Rollout, "has_nan", True)
    assert go(f"run={run_dir}", "questions=4", f"out={tmp_path / 'out'}") == 1
    said = "error: the sampler's logits are NaN, so the answers to arithmetic would be random."
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_with_its_own_task_file_is_asked_those_questions_or_the_named_benchmarks(tmp_path: Path, tiny) -> None:
    """If no benchmark is named, the file's questions are asked, otherwise the package's task of that name."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from qerl_lab.tasks import Question\n"
        "def train(cfg): return [Question('t', 'One?', '1')]\n"
        "def heldout(cfg): return [Question('a', 'Two?', '2'), Question('b', 'Three?', '3')]\n"
    )
    cfg = tiny(task__module=str(file))
    (own,) = subject.load_benchmarks(AccuracyOptions(run="x"), cfg)
    (named,) = subject.load_benchmarks(AccuracyOptions(run="x", benchmarks=["arithmetic"], questions=3), cfg)
    assert ([one.id for one in own.heldout], own.name) == (["a", "b"], "mine")
    assert (len(named.heldout), named.name) == (3, "arithmetic")
    assert own.instruction == cfg.task.instruction
    file.write_text(file.read_text().partition("def heldout")[0] + "def heldout(cfg): return []\n")
    with pytest.raises(ConfigError, match="mine has no question to ask"):
        subject.load_benchmarks(AccuracyOptions(run="x"), cfg)
