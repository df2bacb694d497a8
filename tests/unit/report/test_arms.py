"""Grouping of runs into arms, runs that count, and labels of arms."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.config.arm import leaves
from qerl_lab.config.schema import RunConfig
from qerl_lab.report import results
from qerl_lab.report.arms import (
    choose_runs,
    differing_keys,
    drop_copies,
    fill_in_device,
    keys_of_scales,
    labels,
    match_task_paths,
    number_first,
    shorten,
)
from qerl_lab.report.runs import FINISHED, Origin, Run, run_from

BASE = {name: str(value) for name, _, value in leaves(RunConfig())}
ARMS = {  # as conf/experiment declares them
    "bf16": {"format.name": "bf16"},
    "nvfp4": {"format.name": "nvfp4", "differs_in": "['format.name']"},
    "nvfp4_aqn": {
        "format.name": "nvfp4", "aqn.schedule": "exponential", "differs_in": "['format.name', 'aqn.schedule']"
    },
}  # fmt: skip
LONG = "Solve the following math problem step by step, and say at the end what you found."


def from_values(values: dict[str, str], metrics: list[str] | None = None) -> Run:
    return run_from(values, name="r", status=FINISHED, ended=0.0, code="c0", metrics=metrics or [])


def run(experiment: str, seed: int = 0, **changes: Any) -> Run:
    own = {key.replace("__", "."): str(value) for key, value in changes.items()}
    return from_values(BASE | ARMS.get(experiment, {}) | {"experiment": experiment, "seed": str(seed)} | own)


def adhoc(group: str = "aqn", **changes: Any) -> Run:
    return run("adhoc", **{f"{group}__{key}": value for key, value in changes.items()})


def named(*runs: Run) -> list[str]:
    of = labels(runs)
    return [of[run.arm] for run in runs]


def test_a_renamed_arm_has_its_current_name() -> None:
    """The current name is used for run directories and for recorded files."""
    assert named(run("bf16_hot", rollout__temperature=1.06), run("bf16"))[0].startswith("bf16_temperature")
    folder = Path(__file__).parents[3] / "results" / "smollm2" / "exploration_controls"
    experiments = {run.experiment for run in results.read(folder)[0]}
    assert {"bf16_temperature", "bf16_entropy_bonus"} <= experiments
    assert not experiments & {"bf16_hot", "bf16_bonus"}


DAPO = {"name": "dapo", "mask_truncated": True, "dynamic_sampling": True, "overlong_buffer_tokens": None}
DAPO_QERL = DAPO | {"dynamic_sampling": False, "overlong_buffer_tokens": 0}
GSPO = {"name": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
GRPO, OFF = run("adhoc"), run("adhoc")
OF_GSM8K = {"task__name": "gsm8k", "task__gsm8k__max_steps": 2}


@pytest.mark.parametrize(("runs", "expected"), [
    # settings that one option sets are named by the option
    ([GRPO, *(adhoc("algorithm", **own) for own in (DAPO, DAPO_QERL, GSPO))],
     ["algorithm=grpo", "algorithm=dapo", "algorithm=dapo_qerl", "algorithm=gspo"]),
    ([OFF, adhoc(schedule="exponential", unit="kl"), adhoc(schedule="exponential"), adhoc(schedule="linear")],
     ["aqn=off", "aqn=kl", "aqn=exponential", "aqn=linear"]),
    ([OFF, adhoc(schedule="exponential", sigma_start=0.2)],
     ["aqn=off", "aqn.schedule=exponential, aqn.sigma_start=0.2"]),
    # an option that sets another value is not named, even if most arms share the key and no label has it
    ([OFF, *(adhoc(schedule=name, stages=7) for name in ("linear", "cosine", "exponential"))],
     ["aqn=off", "aqn.schedule=linear", "aqn.schedule=cosine", "aqn.schedule=exponential"]),
    # labels leave out what most arms share
    ([run("bf16"), run("nvfp4"), run("nvfp4", aqn__schedule="cosine", steps=7), run("nvfp4_aqn")],
     ["bf16", "nvfp4", "nvfp4 (aqn=cosine, steps=7)", "nvfp4_aqn"]),
    # most arms are at other rates than most runs
    ([*(run(name, seed) for name in ("bf16", "nvfp4") for seed in (0, 1)),
      *(run(name, optim__learning_rate=rate) for name in ("bf16", "nvfp4") for rate in (2.0, 1.0))][:7],
     ["bf16", "bf16", "nvfp4", "nvfp4", "bf16 (optim.learning_rate=2.0)", "bf16 (optim.learning_rate=1.0)",
      "nvfp4 (optim.learning_rate=2.0)"]),
    # a key that an experiment declares is named where arms of the experiment differ in it
    ([run("bf16"), run("nvfp4_aqn"), run("nvfp4_aqn", aqn__schedule="linear")],
     ["bf16", "nvfp4_aqn (aqn=exponential)", "nvfp4_aqn (aqn=linear)"]),
    ([run("bf16"), run("nvfp4", optim__learning_rate=1.0)],
     ["bf16 (optim.learning_rate=1e-05)", "nvfp4 (optim.learning_rate=1.0)"]),
    ([run("bf16"), run("nvfp4"), run("bf16", lora__rank=0)],
     ["bf16", "nvfp4", "bf16 (lora=full)"]),
    # one configuration under two names
    ([run("nvfp4_aqn"), run("nvfp4", 1, aqn__schedule="exponential")], ["nvfp4 = nvfp4_aqn"] * 2),
    # for two tasks the label has the task's name, and not the settings that follow from it
    ([run("bf16"), run("bf16", **OF_GSM8K), run("bf16", **OF_GSM8K, task__instruction=LONG)],
     ["bf16 (task=arithmetic)", "bf16", f"bf16 (task.instruction={shorten(LONG)})"]),
    # models at two paths
    ([run("nvfp4", model__path=f"/x/{name}", model__hash=name * 3) for name in ("gptq", "awqq")],
     ["nvfp4 (model.path=/x/gptq)", "nvfp4 (model.path=/x/awqq)"]),
    ([run("bf16", model__path=f"/x/{name}") for name in ("gptq", "awqq")],  # by a version that recorded no hash
     ["bf16 (model.path=/x/gptq)", "bf16 (model.path=/x/awqq)"]),
    ([run("bf16", model__path="org/name"), run("bf16", model__path="/x/name", model__hash="a" * 12)],
     ["bf16 (model.path=org/name)", "bf16 (model.path=/x/name)"]),
    # a run of another version lacks a key
    ([from_values({key: value for key, value in BASE.items() if key != "aqn.norms"}), run("adhoc")],
     ["aqn.norms=(absent)", "aqn=off"]),
])  # fmt: skip
def test_a_label_has_the_settings_that_the_experiment_does_not_imply(runs: list[Run], expected: list[str]) -> None:
    assert named(*runs) == expected


def graded_by(file: str, content: str) -> Run:
    origin = Origin(configured=f"scale=pocket task.module={file}" if file else "scale=pocket")
    return replace(run("bf16", task__module_hash=content), origin=origin)


def test_a_label_names_the_task_file_of_a_user() -> None:
    plain, brief, kind = graded_by("", "None"), graded_by("brief.py", "b" * 12), graded_by("kind.py", "c" * 12)
    assert named(plain, brief, kind) == [f"bf16 (task.module={name})" for name in ("None", "brief.py", "kind.py")]
    changed, older = graded_by("brief.py", "d" * 12), graded_by("", "e" * 12)
    assert named(brief, changed, older) == [
        "bf16 (task.module=brief.py #bbbbbb)", "bf16 (task.module=brief.py #dddddd)",
        f"bf16 (task.module_hash={'e' * 12})",
    ]  # fmt: skip


QWEN = {
    "model__path": "/x/qwen.gguf", "steps": 60, "rollout__group_size": 16, "eval__questions": 1319,
    "optim__learning_rate": 1e-4,
}  # fmt: skip


def at(scale: str, experiment: str, seed: int = 0, **changes: Any) -> Run:
    origin = Origin(configured=f"scale={scale} jobs=1" if scale else "")
    return replace(run(experiment, seed, **changes), origin=origin)


def test_runs_of_two_scales_are_labelled_by_scale_and_by_differences_within_it() -> None:
    """The rate 1e-4 is the usual one at one scale, although most runs have another."""
    runs = [at("qwen1_5b", name, **QWEN) for name in ("bf16", "nvfp4")]
    runs += [at("qwen1_5b", "bf16", **QWEN | {"optim__learning_rate": 3e-4})]
    runs += [at("pocket", name, seed) for name in ("bf16", "nvfp4") for seed in range(3)]
    assert list(dict.fromkeys(named(*runs))) == [
        "bf16 (scale=qwen1_5b)", "nvfp4 (scale=qwen1_5b)",
        "bf16 (scale=qwen1_5b, optim.learning_rate=0.0003)", "bf16 (scale=pocket)", "nvfp4 (scale=pocket)",
    ]  # fmt: skip
    assert keys_of_scales(runs) == ["eval.questions", "model.path", "rollout.group_size", "steps"]
    assert named(at("pocket", "adhoc"), at("qwen1_5b", "adhoc", **QWEN)) == ["scale=pocket", "scale=qwen1_5b"]


def test_scales_that_are_unknown_or_differ_in_few_keys_are_not_named() -> None:
    few = {"steps": 7, "eval__questions": 9, "optim__beta1": 0.5}
    assert named(at("pocket", "bf16"), at("custom", "bf16", **few)) == [
        "bf16 (eval.questions=256, optim.beta1=0.9, steps=600)", "bf16 (eval.questions=9, optim.beta1=0.5, steps=7)"
    ]  # fmt: skip
    runs = [at("pocket", "bf16"), at("", "bf16", **QWEN)]
    assert keys_of_scales(runs) == []
    assert not any("scale=" in label for label in named(*runs))


def test_a_long_value_is_shortened_and_two_that_begin_alike_stay_distinct() -> None:
    arms = named(run("bf16", task__instruction=LONG), run("bf16", task__instruction=f"{LONG} Hurry."))
    assert arms[0].startswith("bf16 (task.instruction=Solve the following math problem ste... #")
    assert len(set(arms)) == 2
    assert max(map(len, arms)) < 80
    folder = "/data/of/a/machine/that/has/a/long/name/for/everything"
    assert re.fullmatch(r"\.\.\..*/everything/warm #[0-9a-f]{6}", shorten(f"{folder}/warm"))
    assert shorten("checkpoints/pocket-nvfp4-four_over_six") == "checkpoints/pocket-nvfp4-four_over_six"


def test_a_sweep_of_learning_rates_has_one_arm_per_rate_in_order() -> None:
    rates = [1e-4, 3e-5, 1e-5]
    counted, left_out = choose_runs([run("bf16", seed, optim__learning_rate=rate) for rate in rates for seed in (1, 0)])
    assert [(labels(counted)[one.arm], one.seed) for one in counted] == [
        (f"bf16 (optim.learning_rate={rate})", seed) for rate in ("1e-05", "3e-05", "0.0001") for seed in (0, 1)
    ]
    assert left_out == []
    assert sorted(["off", "10", "9"], key=number_first) == ["9", "10", "off"]


def test_the_finished_copy_of_a_run_counts_or_else_the_latest() -> None:
    early, late = (replace(run("bf16"), status="interrupted", ended=ended) for ended in (1.0, 2.0))
    assert drop_copies([late, early]) == drop_copies([early, late]) == [late]
    finished = replace(early, status=FINISHED)
    assert drop_copies([finished, late]) == drop_copies([late, finished]) == [finished]


def test_runs_on_gpu_and_on_cpu_are_different_arms_however_the_device_was_requested() -> None:
    gpu, cpu = ["memory/gpu_peak_gib"], ["memory/rss_gib"]
    auto_gpu, cuda, auto_cpu, on_cpu = (
        from_values(BASE | {"device": device}, metrics)
        for device, metrics in (("auto", gpu), ("cuda", gpu), ("auto", cpu), ("cpu", gpu))
    )
    assert auto_gpu.arm == cuda.arm != auto_cpu.arm == on_cpu.arm
    assert differing_keys([auto_gpu, auto_cpu]) == ["device"]


def test_a_run_that_failed_before_recording_its_device_joins_the_arm_it_otherwise_equals() -> None:
    failed, here, there = run("nvfp4", 1, device="auto"), run("nvfp4", device="cpu"), run("nvfp4", device="cuda")
    for known in (here, there):
        assert fill_in_device([failed, known])[0].arm == known.arm
    assert fill_in_device([failed, here, there])[0].arm == failed.arm  # it may belong to either
    assert fill_in_device([failed, run("bf16", device="cuda")])[0].arm == failed.arm


def asked(path: str, training: str = "", heldout: str = "", **changes: Any) -> Run:
    """Return a run with its questions in `path` and with their hashes. "" is a hash that was not recorded."""
    origin = Origin(training_sha256=training, heldout_sha256=heldout)
    return replace(run("bf16", task__path=path, **changes), origin=origin)


@pytest.mark.parametrize(("runs", "paths"), [
    # the same questions in two folders; a hash that one run lacks is taken from runs that have it
    ([asked("/a", "t"), asked("/b", "t")], ["/a", "/a"]),
    ([asked("/a", "t"), asked("/b", "t", "h")], ["/a", "/a"]),
    # a run that failed before it recorded a hash goes with the runs of its path, unless its settings are others
    ([asked("/a", "t"), asked("/b", "t", "h"), asked("/b")], ["/a", "/a", "/a"]),
    ([asked("/a", "t"), asked("/b", "t"), asked("/b", task__train_questions=5)], ["/a", "/a", "/b"]),
    # other questions in another folder; the first run did not record which questions it held out
    ([asked("/a", "t"), asked("/b", "t", "h"), asked("/c", "t", "g")], ["/a", "/b", "/c"]),
    ([asked("/a", "t", "h"), asked("/b", "s", "h"), asked("/c"), asked("/d")], ["/a", "/b", "/c", "/d"]),
    # other questions in the same folder, and a run that recorded no hash
    ([asked("/a", "t", "h"), asked("/a", "s", "h"), asked("/a")], ["/a #1", "/a #2", "/a"]),
    ([asked("/a", "t", "h"), asked("/a", "t", "g")], ["/a #1", "/a #2"]),
    # fewer questions by configuration, so the settings already tell the two apart
    ([asked("/a", "t", "h"), asked("/a", "s", "h", task__train_questions=5)], ["/a", "/a"]),
])  # fmt: skip
def test_two_runs_have_one_task_path_exactly_if_they_were_asked_the_same_questions(
    runs: list[Run], paths: list[str]
) -> None:
    """In `paths` a number stands for the hash of the questions."""
    found = [one.value("task.path") for one in match_task_paths(runs)]
    number = {path: f"/a #{n}" for n, path in enumerate(dict.fromkeys(path for path in found if "#" in path), 1)}
    assert [number.get(path, path) for path in found] == paths


@pytest.mark.parametrize(("one", "other", "differ"), [
    *(({"rollout__engine": engine, "rollout__vllm__linear_backend": "vllm"},
       {"rollout__engine": engine, "rollout__vllm__linear_backend": "auto"}, acts)
      for engine, acts in (("transformers", False), ("vllm", True), ("vllm_server", True))),
    ({"rollout__engine": "vllm", "rollout__vllm_server__patience_seconds": 1},
     {"rollout__engine": "vllm", "rollout__vllm_server__patience_seconds": 2}, False),
    # with overlap the step after a checkpoint is on-policy
    *(({"rollout__engine": engine, "rollout__vllm_server__overlap": overlap, "checkpoint__every": 2},
       {"rollout__engine": engine, "rollout__vllm_server__overlap": overlap, "checkpoint__every": 25}, acts)
      for engine, overlap, acts in (("vllm_server", True, True), ("vllm_server", False, False), ("vllm", True, False))),
    # packing was off by default, then auto, which packs on GPUs
    ({"device": "cpu", "optim__packing": "off"}, {"device": "cpu", "optim__packing": "auto"}, False),
    ({"device": "cuda", "optim__packing": "off"}, {"device": "cuda", "optim__packing": "auto"}, True),
    ({"device": "cpu", "optim__packing": "on"}, {"device": "cpu", "optim__packing": "off"}, True),
])  # fmt: skip
def test_keys_without_effect_do_not_separate_arms(one: dict[str, Any], other: dict[str, Any], differ: bool) -> None:
    assert (run("bf16", **one).arm != run("bf16", **other).arm) is differ


def test_one_model_under_two_paths_is_one_arm() -> None:
    here, there = (run("bf16", seed, model__path=f"/{seed}/warm", model__hash="a" * 12) for seed in (0, 1))
    assert named(here, there) == ["bf16", "bf16"]
    assert here.arm == there.arm
    assert differing_keys([here, there]) == []
    other = run("bf16", model__path="/0/warm", model__hash="b" * 12)
    assert named(here, there, other)[2].startswith("bf16 (model.hash=bbbbbbbbbbbb")


@pytest.mark.parametrize(("path", "content", "expected"), [
    ("/x/warm", "a" * 12, ["model.hash=(absent)", f"model.hash={'a' * 12}"]),
    ("pocket", "None", ["adhoc", "adhoc"]), ("org/name", "None", ["adhoc", "adhoc"]),
])  # fmt: skip
def test_a_run_without_a_recorded_model_hash_is_another_arm_where_its_model_may_differ(
    path: str, content: str, expected: list[str]
) -> None:
    old = from_values({key: value for key, value in BASE.items() if key != "model.hash"} | {"model.path": path})
    assert named(old, run("adhoc", model__path=path, model__hash=content)) == expected
