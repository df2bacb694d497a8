"""Chat templates that write a question or are refused, the files of a tokenizer, and the id for padding."""

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.model import chat, policy
from qerl_lab.model.chat import Chat
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.rollout.engine import Sampling
from qerl_lab.rollout.transformers import TransformersEngine

ASKED = [{"role": "system", "content": "Use <think> tags. "}, {"role": "user", "content": "How many?"}]
EVERY = "{% for m in messages %}{{ m.content | trim }}\n{% endfor %}"


def with_template(template: str) -> Chat:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    tokenizer.chat_template = template
    return Chat(tokenizer)


def test_a_prompt_is_what_the_template_writes() -> None:
    own = Chat(AutoTokenizer.from_pretrained(ASSETS))
    expected = own.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert own.prompt_ids(ASKED) == expected
    assert own.notes == []


def test_a_token_that_the_model_has_no_embedding_for_is_refused_before_the_first_forward(tiny: Any) -> None:
    """The model would end in `IndexError: index out of range in self`, on a GPU in a device-side assert."""
    built = policy.build(tiny(), torch.device("cpu"))
    built.tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    built.tokenizer.chat_template = EVERY + "<|new|>"
    count = built.base.get_input_embeddings().num_embeddings
    assert built.tokenizer.convert_tokens_to_ids("<|new|>") == count
    with pytest.raises(ConfigError, match=rf"'<\|new\|>', token {count}, and the model has {count} embeddings; "):
        built.chat.prompt_ids(ASKED)


@pytest.mark.parametrize(("template", "words"), [
    ("{{ messages[-1].content }}", ["leaves out the instruction", "task.instruction=''"]),
    ("{{ messages[0].content }}", ["leaves out the question"]),
    ("{{ raise_exception('no system role') }}", ["refuses the questions (no system role)", "task.instruction=''"]),
    ("{{ 1 // 0 }}", ["refuses the questions (ZeroDivisionError: "]),
    ("{% for %}", ["refuses the questions ("]),
    ("none of them", ["leaves out the question", "Type another model, or put a chat_template.jinja"]),
])  # fmt: skip
def test_a_template_that_does_not_write_the_question_is_refused_in_one_line(template: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        with_template(template).prompt_ids(ASKED)
    said = str(refused.value)
    assert all(word in said for word in [*words, f"the chat template of {ASSETS}"])
    assert "\n" not in said


@pytest.mark.parametrize("template", ["{{ messages[-1].content }}", "{{ raise_exception('no system role') }}"])
@pytest.mark.parametrize(("key", "remedy"), [
    ("task.instruction", "Type task.instruction='' if it takes no system message, or another model, or put a "),
    ("instruction", "Type instruction='' if it takes no system message, or another model, or put a "),
    ("", "Type another model, or put a "),
])  # fmt: skip
def test_a_refusal_names_the_key_of_its_command(template: str, key: str, remedy: str) -> None:
    chat = with_template(template)
    chat.key = key
    with pytest.raises(ConfigError, match=remedy):
        chat.prompt_ids(ASKED)


def test_every_question_is_checked() -> None:
    own = with_template("{% if messages[-1].content != 'No' %}" + EVERY + "{% endif %}")
    assert own.prompt_ids(ASKED)
    assert own.prompt_ids(ASKED[1:])
    with pytest.raises(ConfigError, match="leaves out the question"):
        own.prompt_ids([{"role": "user", "content": "No"}])


def test_a_date_in_a_template_is_the_day_of_the_chat_and_gets_a_note() -> None:
    own = with_template("{{ strftime_now('%d %b %Y %H:%M') }} " + EVERY)
    own.day = date(2024, 7, 26)
    assert own.tokenizer.decode(own.prompt_ids(ASKED)).startswith("26 Jul 2024 00:00 ")
    assert ["2024-07-26" in note for note in own.notes] == [True]


def test_the_macro_for_the_date_changes_nothing_else_in_a_template() -> None:
    """A form may be set before it is used, a macro may ask, and the template's first characters stay."""
    for before in ("", "\n\n", "  {% if true %}  {% endif %}x", "{#- note -#} y"):
        asking = (
            before + "{% set form = '%Y' %}{% macro said() %}{{ strftime_now(form) }}{% endmacro %}{{ said() }}" + EVERY
        )
        own, plain = with_template(asking), with_template(asking.replace("strftime_now(form)", "'2024'"))
        own.day = date(2024, 7, 26)
        assert own.prompt_ids(ASKED) == plain.prompt_ids(ASKED)
        assert own.notes
        assert not plain.notes


def test_a_template_that_computes_the_form_of_its_date_is_refused() -> None:
    """Otherwise it would write the day of each session, and a resumed run would have other prompts."""
    with pytest.raises(ConfigError, match="no date in the form %d %b"):
        with_template("{{ strftime_now('%d' ~ ' %b') }} " + EVERY).prompt_ids(ASKED)


def test_no_note_if_the_template_does_not_reach_its_date() -> None:
    own = with_template("{% if tools %}{{ strftime_now('%d %b %Y') }}{% endif %}" + EVERY)
    own.prompt_ids(ASKED)
    assert own.notes == []


def test_a_tokenizer_that_refuses_variables_is_asked_for_its_ids_without_them() -> None:
    """mistral-common has such a tokenizer. Its text, tokenized, would give other ids than the chat."""

    class Strict:
        name_or_path, chat_template = "strict", None

        def apply_chat_template(self, messages: list[dict[str, str]], **given: bool) -> Any:
            if unknown := given.keys() - {"add_generation_prompt", "tokenize", "return_dict"}:
                raise ValueError(f"Extra inputs are not permitted: {unknown}")
            return {"input_ids": [3, 1]} if given.get("tokenize", True) else "".join(m["content"] for m in messages)

    assert Chat(Strict()).prompt_ids(ASKED) == [3, 1]


@pytest.mark.parametrize(("template", "ends", "said"), [
    (None, [0], ["ends an answer with <|im_end|>, which ends no completion", "Add 2 to eos_token_id"]),
    (None, [0, 2], []),
    (EVERY, [0], []),
    ("{% if messages[-1].role == 'assistant' %}{{ 1 // 0 }}{% endif %}" + EVERY, [0], []),
])  # fmt: skip
def test_an_end_of_turn_that_ends_no_completion_gets_a_note(
    template: str | None, ends: list[int], said: list[str]
) -> None:
    """Base models have such end tokens. Each completion then has the full length, and its format counts as wrong."""
    own = Chat(AutoTokenizer.from_pretrained(ASSETS), end_ids=ends)
    own.tokenizer.chat_template = template or own.tokenizer.chat_template
    own.prompt_ids(ASKED)
    assert len(own.notes) == bool(said)
    assert all(words in own.notes[0] for words in said)


def test_tags_that_are_special_tokens_stay_in_the_decoded_text(tiny: Any, build_policy: Any) -> None:
    """Only end tokens and padding are removed."""
    policy = build_policy(tiny())
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<answer>", "</answer>"]})
    text = "<think>so</think><answer>3</answer>"
    ids = policy.tokenizer(text)["input_ids"]
    ends = [policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id]
    assert {*policy.tokenizer.all_special_ids} >= {ids[0], ids[-1]}
    assert policy.decode_completion([*ids, *ends]) == text


def saved(folder: Path, **loading: bool) -> dict[str, bytes]:
    folder.mkdir()
    chat.save_tokenizer(AutoTokenizer.from_pretrained(ASSETS, **loading), folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_tokenizer_is_saved_the_same_with_and_without_the_hub(tmp_path: Path) -> None:
    online, offline = saved(tmp_path / "on"), saved(tmp_path / "off", local_files_only=True)
    assert "tokenizer.json" in online
    assert online == offline
    for name in ("on", "off"):
        (tmp_path / name / "model.safetensors").write_bytes((ASSETS / "model.safetensors").read_bytes())
    assert model_hash(tmp_path / "on") == model_hash(tmp_path / "off")


def test_a_padding_id_without_an_embedding_is_replaced_by_the_end_token(tmp_path: Path, tiny) -> None:
    """Padding is masked, so any id with an embedding will do."""
    shutil.copytree(ASSETS, tmp_path, dirs_exist_ok=True)
    own = AutoTokenizer.from_pretrained(ASSETS)
    own.add_special_tokens({"pad_token": "<beyond>"})
    own.save_pretrained(tmp_path)
    built = policy.build(tiny(model__path=str(tmp_path)), torch.device("cpu"))
    assert own.pad_token_id >= built.model.get_input_embeddings().num_embeddings
    assert built.tokenizer.pad_token_id == own.eos_token_id
    prompts = [built.chat.prompt_ids([{"role": "user", "content": text}]) for text in ("1 + 1", "123 + 456")]
    assert TransformersEngine(built, 2).generate(prompts, 1, Sampling(2, seed=0)).tokens > 0


def test_an_end_token_without_an_embedding_is_refused() -> None:
    own = AutoTokenizer.from_pretrained(ASSETS)
    with pytest.raises(ConfigError, match="allowed: an end token that the model has"):
        chat.pad_id(own, min(own.pad_token_id, own.eos_token_id))


@pytest.mark.parametrize(
    ("kind", "tokenizer_class"),
    [("llama", "LlamaTokenizerFast"), ("llama", "GPT2Tokenizer"), ("qwen2", "PreTrainedTokenizerFast")],
)
def test_a_tokenizer_is_what_its_file_says(tmp_path: Path, kind: str, tokenizer_class: str) -> None:
    """transformers 5.17 drops all spaces with the first class, and splits 345 678 9 otherwise with the others."""
    shutil.copytree(ASSETS, tmp_path, dirs_exist_ok=True)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    by_three = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False}
    stored["pre_tokenizer"]["pretokenizers"][0] = by_three
    for pair in ("34", "56"):
        stored["model"]["vocab"][pair] = len(stored["model"]["vocab"])
        stored["model"]["merges"].append([*pair])
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    contents = {"tokenizer.json": stored, "tokenizer_config.json": settings, "config.json": {"model_type": kind}}
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    text, found = "12 apples, 3456789\nand Ann's 1,234\n\n", chat.load_tokenizer(tmp_path)
    ids = found(text)["input_ids"]
    assert ids == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert {"34", "56"} & {found.decode([token]) for token in ids} == {"34"}
    assert found.decode(ids) == text
