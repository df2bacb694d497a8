"""Rules across keys: the values that they refuse, the messages, and the values that pass."""

import importlib
import itertools
import re
from typing import Any

import pytest
import yaml

from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.keys import FIELDS, FOREIGN_NAMES, TYPES, check_type, parse_condition
from qerl_lab.config.option import ConfigError, check_bounds
from qerl_lab.config.rules import EXPERIMENT_WITH, NEEDS, check_engine, from_dict
from qerl_lab.config.schema import ALGORITHMS, RunConfig


def nested(**values: Any) -> dict[str, Any]:
    """Return {"seed": 1, "lora": {"rank": 3}} for lora__rank=3."""
    found: dict[str, Any] = {"seed": 1}
    for name, value in values.items():
        *groups, key = name.split("__")
        node = found
        for group in groups:
            node = node.setdefault(group, {})
        node[key] = value
    return found


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(nested(**values))
    return str(caught.value)


SERVER = {"rollout__engine": "vllm_server"}
OVERLAP = SERVER | {"rollout__vllm_server__overlap": True}
FULL = {"lora__rank": 0, "format__name": "bf16"}
TILES = {"format__name": "nvfp4", "rollout__vllm__linear_backend": "fp4_tiles"}
W8A8 = {"format__name": "fp8", "format__activations": "fp8", "rollout__engine": "vllm"}
KL = {"aqn__schedule": "linear", "aqn__unit": "kl"}


@pytest.mark.parametrize(
    ("values", "given", "remedy"),
    [
        (FULL | {"rollout__engine": "vllm", "device": "cpu"}, "device=cpu", "Type rollout=transformers"),
        ({"aqn__schedule": "linear", "aqn__stages": 1, "aqn__reading": "algorithm"}, "aqn.stages=1", "aqn.stages=2"),
        ({**TILES, "lora__rank": 12}, "lora.rank=12", "allowed with it: 8, 16, 24, "),
        ({"task__path": "https://me:pw@host"}, "***@host", "Type it into the environment variable HF_TOKEN."),
        ({"tracking__uri": "http://me:pw@host"}, "***@host", "the address into MLFLOW_TRACKING_URI."),
        ({"optim__max_grad_norm": 1e13}, "optim.max_grad_norm=10000000000000.0", "at most 1e12. Type"),
        ({"format__ignore": ["re:("]}, "'re:('", "re:PATTERN"),
        ({"eval__questions": 1}, "eval.questions=1", "eval.questions=256"),
        ({"model__path": ""}, "model.path= is empty; allowed: pocket, a directory, FILE.gguf, or", "model=pocket"),
        ({"aqn__schedule": "linear", "aqn__norms": []}, "aqn.norms=[]", "aqn.norms=[input_layernorm]"),
        ({"aqn__schedule": "linear", "aqn__sigma_end": 0.5}, "aqn.sigma_end=0.5", "aqn.sigma_end=0.01"),
        ({"aqn__schedule": "linear", "aqn__sigma_start": 0.0, "aqn__sigma_end": 0.0}, "sigma_start=0", "aqn=off"),
        ({"aqn__schedule": "exponential", "aqn__sigma_end": 0.0}, "aqn.sigma_end=0", "aqn=linear"),
        ({**KL, "aqn__kl_end": 0.5}, "aqn.kl_end=0.5 is above aqn.kl_start=0.003", "aqn.kl_end=0.003"),
        ({**KL, "aqn__kl_start": 0.0}, "aqn.kl_start=0.0", "adds no noise; allowed with it: anything but 0. Type"),
        ({**KL, "aqn__schedule": "exponential", "aqn__kl_end": 0.0}, "aqn.kl_end=0.0", "example aqn.kl_end=1e-4"),
        ({**KL, "aqn__sigma_start": 0.7}, "aqn.sigma_start=0.7 is above", "aqn.sigma_start=0.5"),
        ({**KL, "aqn__sigma_min": 0.02}, "aqn.sigma_min=0.02 is above aqn.sigma_start=0.01", "aqn.sigma_min=0.01"),
        ({**KL, "aqn__schedule": "adaptive", "aqn__kl_start": 0.0}, "aqn.kl_start=0.0", "aqn=off"),
        ({"aqn__schedule": "adaptive", "aqn__unit": "sigma"}, "aqn.unit=sigma", "Type aqn.unit=kl."),
        ({**KL, "aqn__schedule": "adaptive", "aqn__probe_prompts": 0}, "aqn.probe_prompts=0", "aqn.probe_prompts=4"),
        ({**KL, "aqn__adaptive__factor": 1.0}, "aqn.adaptive.factor=1.0", "above 1"),
        ({"task__arithmetic__min_steps": 4}, "task.arithmetic.min_steps=4", "task.arithmetic.min_steps=3"),
        ({"lora__target_modules": ["lm_head"]}, "lora.target_modules=[lm_head] is", "[q_proj,v_proj]"),
        ({"rollout__vllm__max_num_batched_tokens": 64, "rollout__batch_size": 65},
         "rollout.batch_size=65 is above rollout.vllm.max_num_batched_tokens=64", "rollout.batch_size=64"),
        ({**TILES, "lora__rank": 136}, "lora.rank=136", "allowed with it: 8, 16, 24, "),
        ({"tracking__experiment": ""}, "tracking.experiment= is empty; allowed: a", "Leave tracking.experiment out."),
        ({"tracking__uri": "mine"}, "tracking.uri=mine is no address", "tracking.uri=sqlite:///mine.db."),
        ({"tracking__uri": "mine.db"}, "tracking.uri=mine.db is no address", "tracking.uri=sqlite:///mine.db."),
        ({"tracking__uri": "my runs"}, "uri=my runs is no", "example \"tracking.uri='sqlite:///my runs.db'\"."),
        ({**W8A8, "rollout__vllm__linear_backend": "marlin"}, "=fp8 with rollout.vllm.linear_backend=marlin",
         "allowed with it: auto, vllm. Type rollout.vllm.linear_backend=auto, or format.activations=auto."),
        (SERVER | {"rollout__vllm_server__url": "gpu7:8000"}, "url=gpu7:8000", "url=http://127.0.0.1:8000"),
        (SERVER | {"rollout__vllm_server__url": "http://gpu7:8000"}, "another host", "adapter_dir=DIR"),
        (SERVER | {"rollout__vllm_server__url": "http://127.evil:8000"}, "another host", "adapter_dir=DIR"),
        (SERVER | {"rollout__vllm_server__url": "http://me:pw@127.0.0.1:8000"}, "***@127.0.0.1", "VLLM_API_KEY."),
        ({"algorithm__overlong_buffer_tokens": 17, "rollout__max_completion_tokens": 16},
         "overlong_buffer_tokens=17 is above rollout.max_completion_tokens=16", "Type"),
        ({"algorithm__name": "cispo"}, "algorithm.epsilon_low=0.2", "algorithm.epsilon_low=1"),
        ({"algorithm__name": "gspo", "algorithm__beta": 0.1}, "kl_estimator=k3_ratio", "algorithm.kl_estimator=k3"),
        ({"algorithm__entropy_coef": 2.0, "algorithm__entropy_target": 0.2}, "entropy_coef=2.0", "entropy_coef=1.0"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_what_was_given_and_what_to_type(values, given, remedy):
    message = refusal(**values)
    assert given in message
    assert remedy in message


SHARED = {"format__name": "nvfp4", "rollout__vllm__share_base": True}
DENSE_ROWS = {"format__name": "nvfp4", "rollout__vllm__dense_rows": 64}
DENSE_FP8 = DENSE_ROWS | {"rollout__vllm__dense_dtype": "fp8"}


@pytest.mark.parametrize(
    ("values", "key", "other"),
    [
        ({"optim__name": "adamw_8bit", "device": "cpu"}, "optim.name", "device"),
        ({"optim__packing": "on", "model__attention": "eager"}, "optim.packing", "model.attention"),
        ({"aqn__schedule": "adaptive"}, "aqn.schedule", "aqn.unit"),
        (W8A8 | {"format__name": "nvfp4"}, "format.activations", "format.name"),
        (W8A8 | {"rollout__engine": "vllm_server"}, "format.activations", "rollout.engine"),
        ({"jobs_per_gpu": 2, "gpus": 2}, "jobs_per_gpu", "gpus"),
        (
            {"format__name": "nf4", "rollout__vllm__linear_backend": "marlin"},
            "rollout.vllm.linear_backend",
            "format.name",
        ),
        (TILES | SERVER, "rollout.vllm.linear_backend", "rollout.engine"),
        (TILES | {"model__dtype": "float32"}, "rollout.vllm.linear_backend", "model.dtype"),
        (TILES | {"format__name": "fp8"}, "rollout.vllm.linear_backend", "format.name"),
        (TILES | {"rollout__vllm__lora": "request"}, "rollout.vllm.linear_backend", "rollout.vllm.lora"),
        (DENSE_ROWS | {"format__name": "bf16"}, "rollout.vllm.dense_rows", "format.name"),
        (DENSE_ROWS | {"rollout__vllm__lora": "request"}, "rollout.vllm.dense_rows", "rollout.vllm.lora"),
        (DENSE_FP8 | {"rollout__vllm__dense_rows": None}, "rollout.vllm.dense_dtype", "rollout.vllm.dense_rows"),
        (DENSE_FP8 | {"model__dtype": "float32"}, "rollout.vllm.dense_dtype", "model.dtype"),
        (SHARED | {"format__name": "bf16"}, "rollout.vllm.share_base", "format.name"),
        (
            SHARED | {"rollout__vllm__linear_backend": "humming"},
            "rollout.vllm.share_base",
            "rollout.vllm.linear_backend",
        ),
        (FULL | {"algorithm__beta": 0.1}, "lora.rank", "algorithm.beta"),
        (FULL | SERVER, "lora.rank", "rollout.engine"),
        (FULL | {"gpus": 2}, "lora.rank", "gpus"),
        (FULL | {"lora__start_from": "runs/a"}, "lora.rank", "lora.start_from"),
        (SERVER | {"gpus": 2}, "rollout.engine", "gpus"),
        (OVERLAP | {"rollout__importance_correction": "off"}, "rollout.vllm_server.overlap", "importance_correction"),
        (OVERLAP | KL | {"aqn__schedule": "adaptive"}, "rollout.vllm_server.overlap", "aqn.schedule"),
    ],
)
def test_values_that_exclude_each_other_are_refused(values: dict[str, Any], key: str, other: str) -> None:
    found = re.match(
        r"(\S+)=\S+ with (\S+)=\S+ is not allowed, because .*; allowed with it: .* Type ", refusal(**values)
    )
    assert found is not None
    assert (found[1], found[2].endswith(other)) == (key, True)


def test_the_limits_of_a_loss_hold_for_every_algorithm_that_has_it() -> None:
    """TRL computes no such loss as its formula says. A row of `NEEDS` names each algorithm that has one."""
    modules = {name: importlib.import_module(f"qerl_lab.algorithms.{name}") for name in ALGORITHMS}
    for name in (name for name, module in modules.items() if module.RATIO_OF == "sequence"):
        assert "k3_ratio" in refusal(algorithm__name=name, algorithm__beta=0.1, algorithm__epsilon_low=1.0), name
    for name in (name for name, module in modules.items() if module.LOSS_TYPE == "cispo"):
        assert "epsilon_low" in refusal(algorithm__name=name, algorithm__epsilon_low=0.2), name


def test_an_engine_that_an_evaluation_takes_must_fit_the_run(tiny) -> None:
    cfg = tiny(format__name="nvfp4")
    check_engine(cfg)
    cfg.format.name, cfg.rollout.engine = "mine", "vllm"
    with pytest.raises(ConfigError, match=r"^format\.name=mine with rollout\.engine=vllm is not allowed") as refused:
        check_engine(cfg)
    assert str(refused.value).endswith("Type rollout=transformers."), "format=nvfp4 is of a run alone"


def test_every_row_of_needs_names_existing_keys_and_values() -> None:
    for condition in itertools.chain.from_iterable((*needs.given.split(" and "), needs.allowed) for needs in NEEDS):
        key, values, _ = parse_condition(condition)
        for text in values:
            value = text if TYPES[key] is str else yaml.safe_load(text)
            check_type(key, FIELDS[key], value)
            check_bounds(key, FIELDS[key].metadata, value)
            assert key != "format.name" or text in choices_of("format")
    assert {word.removeprefix("+experiment=") for word in EXPERIMENT_WITH.values()} <= {*choices_of("experiment")}


@pytest.mark.parametrize(
    "values",
    [
        OVERLAP, OVERLAP | KL, OVERLAP | {"rollout__importance_correction": "in_ratio"},
        {**TILES, "lora__rank": 128}, {**KL, "aqn__schedule": "adaptive", "aqn__stages": 1},
        {"tracking__mlflow": False, "tracking__uri": "mine"},
        {"rollout__vllm__max_num_batched_tokens": 64, "rollout__batch_size": 64},
        SERVER | {"rollout__vllm_server__url": "http://127.0.1.1:8000"},
        SERVER, SERVER | {"rollout__vllm_server__url": "http://[::1]:8000/"}, SERVER | {"device": "cpu"},
        SERVER | {"rollout__vllm_server__url": "https://gpu7", "rollout__vllm_server__adapter_dir": "/shared"},
        FULL, FULL | {"aqn__schedule": "linear"},
        {"lora__rank": 1}, {"lora__alpha": None}, {"eval__questions": 0}, {"eval__questions": 2}, {"seed": 2**32 - 1},
        {"format__ignore": ["re:.*q_proj", "lm_head"]}, {"task__format_reward": 0.0},
        {"eval__top_p": 1.0}, {"optim__learning_rate": 0.0}, {"lora__alpha": 32}, {"model__revision": None},
        {"aqn__schedule": "off", "aqn__sigma_end": 1.0}, {"aqn__schedule": "linear", "aqn__sigma_end": 0.0},
        {"aqn__schedule": "exponential", "aqn__sigma_end": 1e-2}, {**KL, "aqn__sigma_end": 1.0, "aqn__kl_end": 0.0},
        {**KL, "aqn__schedule": "adaptive", "aqn__kl_end": 1.0, "aqn__adaptive__band": 1.0},
        {"aqn__sigma_min": 0.2, "aqn__sigma_max": 0.1}, {"aqn__probe_prompts": 0}, {"task__arithmetic__min_steps": 3},
        {"optim__name": "adamw_8bit", "device": "cuda"},
        {"rollout__prompts_per_step": 4, "algorithm__updates_per_rollout": 4},
        {"algorithm__name": "cispo", "algorithm__epsilon_low": 1.0}, {"algorithm__entropy_coef": 2.0},
        {"algorithm__name": "gspo", "algorithm__beta": 0.1, "algorithm__kl_estimator": "k3"},
        {"algorithm__overlong_buffer_tokens": None}, {"algorithm__name": "gspo", "algorithm__beta": 0.0},
    ],
)  # fmt: skip
def test_values_at_the_edge_of_the_rules_pass(values):
    found = {name: value for name, _, value in leaves(from_dict(nested(**values)))}
    assert {name: found[name.replace("__", ".")] for name in values} == values


@pytest.mark.parametrize(
    ("prompts", "group", "updates", "micro"),
    [(16, 8, 3, 8), (16, 8, 1, 96), (16, 8, 3, None)],
)
def test_what_the_batch_message_says_to_type_works(prompts, group, updates, micro):
    values = nested(
        rollout__prompts_per_step=prompts, rollout__group_size=group,
        algorithm__updates_per_rollout=updates, optim__micro_batch_size=micro,
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        from_dict(values)
    message = str(caught.value)
    assert f"{prompts} x {group} = {prompts * group}" in message
    for remedy in message.partition("Type for example ")[2].rstrip(".").split():
        key, _, value = remedy.partition("=")
        node, _, name = key.partition(".")
        values[node][name] = int(value)
    from_dict(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora": {"rank": "16"}}, "lora.rank=16 is not allowed; allowed: a whole number"),
        ({"task": {"arithmetic": 3}}, "is a node"),
    ],
)
def test_a_wrong_type_or_key_in_a_resolved_file_is_refused(values, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(values)
    assert message in str(caught.value)


def test_every_number_of_the_schema_has_a_lowest_and_a_highest_value():
    """Without bounds some value ends in a traceback or in NaN. Keys that need no upper bound are listed."""
    unbounded = {"checkpoint.every", "checkpoint.keep", "aqn.probe_prompts"}
    unbounded |= {"eval.questions", "eval.every", "eval.subset_questions"}
    for name, f, _ in leaves(RunConfig()):
        if f.type in (int, float, float | None):
            low, high = (f.metadata[key] for key in ("at_least", "at_most"))
            assert low is not None or f.metadata["above"] is not None, name
            assert high is not None or name in unbounded, name


def test_what_follows_from_other_values() -> None:
    values = {"algorithm__overlong_buffer_tokens": None, "rollout__max_completion_tokens": 160}
    updates = {"algorithm__updates_per_rollout": 2, "algorithm__num_iterations": 3}
    cfg = from_dict(nested(**values, **updates, checkpoint__keep=0, optim__name="adamw_8bit"))
    assert cfg.overlong_buffer == 32, "a fifth, as in DAPO"
    assert (cfg.updates_per_step, cfg.checkpoint.kept, cfg.optim.moment_bytes) == (6, 1, 2)
    cfg = from_dict(nested(rollout__vllm_server__overlap=True))
    assert (cfg.overlaps, cfg.overlong_buffer, cfg.optim.moment_bytes) == (False, 0, 8)
    assert from_dict(nested(**OVERLAP)).overlaps


def test_whole_groups_go_to_each_gpu(tiny) -> None:
    cfg = tiny(gpus=2, algorithm__updates_per_rollout=2)
    assert (cfg.completions_per_gpu, cfg.mini_batch_size_per_gpu) == (8, 4)
    with pytest.raises(ConfigError, match=r"prompts_per_step=4 cannot be split over gpus=3.*gpus=2, or .*_step=6\."):
        tiny(gpus=3)
    with pytest.raises(ConfigError, match=r"4 x 4 / 4 = 4 completions cannot be split .*optim\.micro_batch_size=4"):
        tiny(gpus=4, optim__micro_batch_size=8)


def test_every_foreign_name_leads_to_an_existing_key_or_group() -> None:
    assert not set(FOREIGN_NAMES) & set(TYPES)
    for meant in FOREIGN_NAMES.values():
        group, _, option = meant.partition("=")
        assert meant in TYPES or choices_of(group), meant
        assert not option or option in choices_of(group)
