"""Every rule of config.py and checks.py: what it refuses, what the message says, and what it lets through."""

from typing import Any

import pytest

from qerl_lab.checks import check_types, schema, typed
from qerl_lab.config import ConfigError, RunConfig, from_dict, leaves


def nested(**values: Any) -> dict[str, Any]:
    """{"lora__rank": 3} as {"lora": {"rank": 3}}, beside a seed."""
    found: dict[str, Any] = {"seed": 1}
    for name, value in values.items():
        node, _, key = name.rpartition("__")
        (found.setdefault(node, {}) if node else found)[key] = value
    return found


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(nested(**values))
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "given", "remedy"),
    [
        ({"lora__rank": 0}, "lora.rank=0", "lora.rank=1"),
        ({"lora__alpha": 0.0}, "lora.alpha=0.0", "above 0"),
        ({"lora__dropout": 1.0}, "lora.dropout=1.0", "at most 0.99"),
        ({"seed": -1}, "seed=-1", "seed=0"),
        ({"steps": 0}, "steps=0", "steps=1"),
        ({"rollout__group_size": 1}, "rollout.group_size=1", "rollout.group_size=2"),
        ({"rollout__temperature": 0.0}, "rollout.temperature=0.0", "rollout.temperature=1"),
        ({"eval__top_p": 1.5}, "eval.top_p=1.5", "eval.top_p=1"),
        ({"optim__learning_rate": float("nan")}, "optim.learning_rate=nan", "a finite number"),
        ({"optim__learning_rate": float("inf")}, "optim.learning_rate=inf", "a finite number"),
        ({"aqn__schedule": "exponental"}, "aqn.schedule=exponental", "Did you mean exponential?"),
        ({"aqn__schedule": "False"}, "aqn.schedule=False", '"off" with its quotes'),
        ({"device": "gpu"}, "device=gpu", "auto, cpu, cuda"),
        ({"format__name": "nvfp5"}, "format.name=nvfp5", "Did you mean nvfp4?"),
        ({"task__name": "gsm9k"}, "task.name=gsm9k", "Did you mean gsm8k?"),
        ({"model__path": ""}, "model.path=", "model=pocket"),
        ({"aqn__schedule": "linear", "aqn__norms": []}, "aqn.norms=[]", "aqn=off"),
        ({"aqn__schedule": "linear", "aqn__sigma_end": 0.5}, "aqn.sigma_end=0.5", "aqn.sigma_end=0.01"),
        ({"aqn__schedule": "exponential", "aqn__sigma_end": 0.0}, "aqn.sigma_end=0", "aqn=linear"),
        ({"task__min_steps": 4}, "task.min_steps=4", "task.min_steps=3"),
        ({"lora__target_modules": []}, "lora.target_modules=[]", "[q_proj,v_proj]"),
        ({"lora__target_modules": ["lm_head"]}, "lm_head", "[q_proj,v_proj]"),
        ({"optim__name": "adamw_8bit", "device": "cpu"}, "device=cpu", "optim=adamw"),
        ({"format__dense_cache": "on", "device": "cuda"}, "device=cuda", "format.dense_cache=off"),
        ({"lora__rnk": 3}, "lora.rnk", "Did you mean rank?"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_what_was_given_and_what_to_type(values, given, remedy):
    message = refusal(**values)
    assert given in message
    assert remedy in message


@pytest.mark.parametrize(
    "values",
    [
        {"lora__rank": 1}, {"lora__alpha": None}, {"eval__top_p": 1.0}, {"optim__learning_rate": 0.0},
        {"aqn__schedule": "off", "aqn__norms": []}, {"aqn__schedule": "linear", "aqn__sigma_end": 0.0},
        {"aqn__schedule": "exponential", "aqn__sigma_end": 1e-2}, {"task__min_steps": 3},
        {"optim__name": "adamw_8bit", "device": "cuda"}, {"format__dense_cache": "on", "device": "cpu"},
        {"rollout__prompts_per_step": 4, "algorithm__updates_per_rollout": 4},
    ],
)  # fmt: skip
def test_what_is_just_allowed_passes(values):
    assert from_dict(nested(**values)).seed == 1


@pytest.mark.parametrize(
    ("prompts", "group", "updates", "micro"),
    [(16, 8, 3, 8), (16, 8, 1, 96), (16, 8, 5, 100), (3, 7, 2, 8), (1, 2, 4, 8)],
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
        ({"lora": {"rank": True}}, "lora.rank=true"),
        ({"lora": {"rank": None}}, "lora.rank=null"),
        ({"lora": {"alpha": "x"}}, "a number or null. Type for example lora.alpha=1.0"),
        ({"lora": {"target_modules": "q_proj"}}, "a list of names"),
        ({"lora": 3}, "lora is a node"),
        ({"tracking": {"mlflow": "yes"}}, "true or false. Type for example tracking.mlflow=true"),
        ({"model": {"path": 3}}, "text"),
        ({"lora": {"rnk": 3}}, "Did you mean lora.rank?"),
        ({"rank": 3}, "Did you mean lora.rank?"),
        ({"learning_rat": 3}, "learning_rat is not a known key"),
    ],
)
def test_a_wrong_type_or_key_in_a_resolved_file_is_refused(values, message):
    with pytest.raises(ConfigError) as caught:
        check_types(values)
    assert message in str(caught.value)


def test_a_whole_number_serves_as_a_number():
    check_types({"aqn": {"sigma_start": 0}, "lora": {"alpha": 32}, "model": {"revision": None}})


def test_the_schema_s_own_defaults_have_the_types_that_it_states():
    assert set(schema()) == {name for name, _, _ in leaves(RunConfig())}
    for name, _, value in leaves(RunConfig()):
        node, _, key = name.rpartition(".")
        check_types({node: {key: value}} if node else {key: value})


def test_a_value_is_shown_as_one_types_it():
    shown = {"null": None, "true": True, "[a,b]": ["a", "b"], "''": "", "0.1": 0.1, "x": "x"}
    assert [typed(value) for value in shown.values()] == list(shown)
