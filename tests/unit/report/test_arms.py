"""Which runs are one arm, which count, and what the arm is called."""

import re
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.config.arm import leaves
from qerl_lab.config.schema import RunConfig
from qerl_lab.report import results
from qerl_lab.report.arms import FINISHED, Run, choose_runs, differing_keys, fill_in_device, labels, run_from, shorten

BASE = {name: str(value) for name, _, value in leaves(RunConfig())}
ARMS = {  # as conf/experiment declares them
    "bf16": {"format.name": "bf16"},
    "nvfp4": {"format.name": "nvfp4", "differs_in": "['format.name']"},
    "nvfp4_aqn": {
        "format.name": "nvfp4", "aqn.schedule": "exponential", "differs_in": "['format.name', 'aqn.schedule']"
    },
}  # fmt: skip


def run(experiment: str, seed: int = 0, ended: float = 0.0, status: str = FINISHED, **changes: Any) -> Run:
    own = {key.replace("__", "."): str(value) for key, value in changes.items()}
    values = BASE | ARMS.get(experiment, {}) | {"experiment": experiment, "seed": str(seed)} | own
    return run_from(values, name=f"{experiment}-{seed}-{ended:g}", status=status, ended=ended, code="c0", metrics=[])


def named(*runs: Run) -> list[str]:
    of = labels(runs)
    return [of[run.arm] for run in runs]


def test_an_arm_that_was_renamed_has_the_name_of_now() -> None:
    """In run directories and in the recorded files."""
    assert named(run("bf16_hot", rollout__temperature=1.06), run("bf16"))[0].startswith("bf16_temperature")
    folder = Path(__file__).parents[3] / "results" / "smollm2" / "exploration_controls"
    experiments = {record.run.experiment for record in results.read(folder)[0]}
    assert {"bf16_temperature", "bf16_entropy_bonus"} <= experiments
    assert not experiments & {"bf16_hot", "bf16_bonus"}


def test_settings_of_one_choice_are_called_by_it() -> None:
    dapo = {"name": "dapo", "mask_truncated": True, "dynamic_sampling": True, "overlong_buffer_tokens": None}
    gspo = {"name": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    grpo, whole, qerl, ratio, other = (
        run("adhoc", **{f"algorithm__{key}": value for key, value in own.items()})
        for own in (
            {},
            dapo,
            dapo | {"dynamic_sampling": False, "overlong_buffer_tokens": 0},
            gspo,
            gspo | {"beta": 0.1},
        )
    )
    assert named(grpo, whole, qerl, ratio) == [
        "algorithm=grpo", "algorithm=dapo", "algorithm=dapo_qerl", "algorithm=gspo",
    ]  # fmt: skip
    assert named(grpo, other) == [
        "algorithm=grpo",
        "algorithm.beta=0.1, algorithm.epsilon_high=0.0004, algorithm.epsilon_low=0.0003, algorithm.name=gspo",
    ]
    assert named(ratio, other) == ["algorithm=gspo", "algorithm.beta=0.1"]


def test_noise_is_called_by_its_choice_where_that_tells_all() -> None:
    off, falls = run("adhoc"), "exponential"
    kl, linear = run("adhoc", aqn__schedule=falls, aqn__unit="kl"), run("adhoc", aqn__schedule="linear")
    every = [off, kl, run("adhoc", aqn__schedule=falls), linear]
    assert named(*every) == ["aqn=off", "aqn=kl", "aqn=exponential", "aqn=linear"]
    assert named(off, run("adhoc", aqn__schedule=falls, aqn__relative=True)) == ["aqn=off", "aqn=relative"]
    strong = run("adhoc", aqn__schedule=falls, aqn__sigma_start=0.2)
    assert named(off, strong) == ["aqn=off", "aqn.schedule=exponential, aqn.sigma_start=0.2"]


def test_what_most_arms_share_goes_without_saying() -> None:
    assert named(run("bf16"), run("nvfp4"), run("nvfp4", aqn__schedule="cosine", steps=7), run("nvfp4_aqn")) == [
        "bf16", "nvfp4", "nvfp4 (aqn=cosine, steps=7)", "nvfp4_aqn",
    ]  # fmt: skip


def test_a_key_that_an_experiment_declares_is_named_where_its_namesakes_differ_in_it() -> None:
    assert named(run("bf16"), run("nvfp4_aqn"), run("nvfp4_aqn", aqn__schedule="linear")) == [
        "bf16", "nvfp4_aqn (aqn=exponential)", "nvfp4_aqn (aqn=linear)",
    ]  # fmt: skip


def test_a_sweep_of_learning_rates_is_an_arm_a_rate_in_the_order_of_the_rates() -> None:
    rates = [1e-4, 3e-5, 1e-5]
    counted, left_out = choose_runs([run("bf16", seed, optim__learning_rate=rate) for rate in rates for seed in (1, 0)])
    assert [(labels(counted)[one.arm], one.seed) for one in counted] == [
        ("bf16 (optim.learning_rate=1e-05)", 0), ("bf16 (optim.learning_rate=1e-05)", 1),
        ("bf16 (optim.learning_rate=3e-05)", 0), ("bf16 (optim.learning_rate=3e-05)", 1),
        ("bf16 (optim.learning_rate=0.0001)", 0), ("bf16 (optim.learning_rate=0.0001)", 1),
    ]  # fmt: skip
    assert left_out == []


LONG = "Solve the following math problem step by step, and say at the end what you found."


def test_of_two_tasks_the_name_is_in_the_label_and_what_it_tells_is_not() -> None:
    words = {"task__instruction": LONG, "task__gsm8k__max_steps": 2}
    assert named(run("bf16"), run("nvfp4"), run("bf16", task__name="gsm8k", **words)) == [
        "bf16", "nvfp4", "bf16 (task=gsm8k)",
    ]  # fmt: skip
    short = run("bf16", task__name="gsm8k", task__gsm8k__max_steps=2)
    assert named(run("bf16"), short, run("bf16", task__name="gsm8k", **words)) == [
        "bf16 (task=arithmetic)", "bf16", f"bf16 (task.instruction={shorten(LONG)})",
    ]  # fmt: skip


def test_a_long_value_is_shortened_and_two_that_begin_alike_stay_two() -> None:
    arms = named(run("bf16", task__instruction=LONG), run("bf16", task__instruction=f"{LONG} Hurry."))
    assert arms[0].startswith("bf16 (task.instruction=Solve the following math problem ste... #")
    assert len(set(arms)) == 2
    assert max(map(len, arms)) < 80
    folder = "/data/of/a/machine/that/has/a/long/name/for/everything"
    assert re.fullmatch(r"\.\.\..*/everything/warm #[0-9a-f]{6}", shorten(f"{folder}/warm"))
    assert shorten("checkpoints/pocket-nvfp4-four_over_six") == "checkpoints/pocket-nvfp4-four_over_six"


def test_arms_that_differ_in_more_than_they_declare_say_so() -> None:
    assert named(run("bf16"), run("nvfp4", optim__learning_rate=1.0)) == [
        "bf16 (optim.learning_rate=1e-05)", "nvfp4 (optim.learning_rate=1.0)",
    ]  # fmt: skip


def test_one_configuration_under_two_names_is_one_arm_with_both() -> None:
    twin = run("nvfp4", 1, aqn__schedule="exponential")
    assert named(run("nvfp4_aqn"), twin) == ["nvfp4 = nvfp4_aqn"] * 2


@pytest.mark.parametrize("key", ["seed", "run_dir", "tracking.uri", "cpu_threads", "scale", "model.name", "resume"])
def test_what_only_labels_or_places_a_run_makes_no_arm(key: str) -> None:
    assert run("bf16", **{key.replace(".", "__"): "7"}).arm == run("bf16").arm


def test_where_a_run_ran_makes_an_arm_however_it_was_asked_for() -> None:
    def on(device: str, metrics: list[str]) -> Run:
        values = BASE | {"device": device}
        return run_from(values, name="r", status=FINISHED, ended=0.0, code="c0", metrics=metrics)

    gpu = ["memory/gpu_peak_gib"]
    cpu = ["memory/rss_gib"]
    assert on("auto", gpu).arm == on("cuda", gpu).arm != on("auto", cpu).arm == on("cpu", gpu).arm
    assert differing_keys([on("auto", gpu), on("auto", cpu)]) == ["device"]


def test_a_run_that_failed_before_it_noted_its_device_is_of_the_arm_that_it_equals_otherwise() -> None:
    failed, here, there = run("nvfp4", 1, device="auto"), run("nvfp4", device="cpu"), run("nvfp4", device="cuda")
    for known in (here, there):
        assert fill_in_device([failed, known])[0].arm == known.arm
    assert fill_in_device([failed, here, there])[0].arm == failed.arm  # of either: nobody knows
    assert fill_in_device([failed, run("bf16", device="cuda")])[0].arm == failed.arm


def test_keys_of_an_engine_that_does_not_run_make_no_arm() -> None:
    for engine, acts in (("transformers", False), ("vllm", True), ("vllm_server", True)):
        runs = [run("bf16", rollout__engine=engine, rollout__vllm__linear_backend=name) for name in ("vllm", "auto")]
        assert (runs[0].arm != runs[1].arm) is acts
    here, there = (run("bf16", rollout__engine="vllm", rollout__vllm_server__patience_seconds=n) for n in (1, 2))
    assert here.arm == there.arm


def test_packing_that_a_device_does_not_do_makes_no_arm() -> None:
    """The default was off, then auto, which packs on GPUs."""
    for device, differ in (("cpu", False), ("cuda", True)):
        runs = [run("bf16", device=device, optim__packing=packing) for packing in ("off", "auto")]
        assert (runs[0].arm != runs[1].arm) is differ
    assert run("bf16", device="cpu", optim__packing="on").arm != run("bf16", device="cpu", optim__packing="off").arm


def test_a_run_of_another_version_lacks_a_key_and_is_another_arm() -> None:
    values = {key: value for key, value in BASE.items() if key != "aqn.norms"}
    old = run_from(values, name="old", status=FINISHED, ended=0.0, code="c0", metrics=[])
    assert named(old, run("adhoc"))[0] == "aqn.norms=(absent)"


def test_one_model_under_two_paths_is_one_arm() -> None:
    here, there = (run("bf16", seed, model__path=f"/{seed}/warm", model__hash="a" * 12) for seed in (0, 1))
    assert named(here, there) == ["bf16", "bf16"]
    assert here.arm == there.arm
    assert differing_keys([here, there]) == []
    other = run("bf16", model__path="/0/warm", model__hash="b" * 12)
    assert named(here, there, other)[2].startswith("bf16 (model.hash=bbbbbbbbbbbb")


def test_models_of_a_path_each_are_called_by_their_paths() -> None:
    gptq, awq = (run("nvfp4", model__path=f"/x/{name}", model__hash=name * 3) for name in ("gptq", "awqq"))
    assert named(gptq, awq) == ["nvfp4 (model.path=/x/gptq)", "nvfp4 (model.path=/x/awqq)"]
    hub, local = run("bf16", model__path="org/name"), run("bf16", model__path="/x/name", model__hash="a" * 12)
    assert named(hub, local) == ["bf16 (model.path=org/name)", "bf16 (model.path=/x/name)"]


@pytest.mark.parametrize(("path", "content"), [("/x/warm", "a" * 12), ("pocket", "None"), ("org/name", "None")])
def test_a_run_of_before_the_hash_is_another_arm_where_its_model_may_be_another(path: str, content: str) -> None:
    values = {key: value for key, value in BASE.items() if key != "model.hash"} | {"model.path": path}
    old = run_from(values, name="old", status=FINISHED, ended=0.0, code="c0", metrics=[])
    new = run("adhoc", model__path=path, model__hash=content)
    if content == "None":
        assert named(old, new) == ["adhoc", "adhoc"]
    else:
        assert named(old, new) == ["model.hash=(absent)", f"model.hash={content}"]
