"""Calibration texts are read, rendered and cut into sequences. Errors name the row, the file or the dataset."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from qerl_lab.config.option import ConfigError
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.quantize import calibration

QUESTION, ANSWER = "Eva has 9 eggs.", "<answer>9</answer>"
TOKENIZER = AutoTokenizer.from_pretrained(ASSETS)


def write(folder: Path, *rows: Any) -> str:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(file)


def sequences(dataset: str, samples: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return calibration.sequences(dataset, TOKENIZER, samples=samples, tokens=tokens, seed=seed)


def test_texts_are_joined_by_end_tokens_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(QUESTION)
    ids = [*TOKENIZER(QUESTION, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    length = len(ids) // 2
    assert sequences(str(file), 2, length).tolist() == [ids[:length], ids[length : 2 * length]]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]},
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
        {"conversations": [{"from": "user", "value": QUESTION}, {"from": "assistant", "value": ANSWER}], "system": ""},
        {"question": QUESTION, "answer": ANSWER},
    ],
    ids=["messages", "sharegpt", "openthoughts", "gsm8k"],
)
def test_conversations_go_through_the_chat_template(tmp_path: Path, row: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    ids = TOKENIZER.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert sequences(write(tmp_path, row, row), 2, len(ids)).tolist() == [ids, ids]


def test_without_a_chat_template_the_turns_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    ids = [*TOKENIZER(f"{QUESTION}\n{ANSWER}", add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    dataset = write(tmp_path, *[{"question": QUESTION, "answer": ANSWER}] * 2)
    assert sequences(dataset, 2, len(ids)).tolist() == [ids, ids]


def test_the_start_token_that_a_tokenizer_adds_to_texts_is_left_out(tmp_path: Path) -> None:
    """A chat template writes that token itself, and a sequence has several texts."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    begins = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = begins
    assert tokenizer(QUESTION)["input_ids"][0] == 1
    ids = [*tokenizer(QUESTION, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] * 2
    dataset = write(tmp_path, *[{"text": QUESTION}] * 2)
    found = calibration.sequences(dataset, tokenizer, samples=1, tokens=len(ids), seed=0)
    assert found.tolist() == [ids]


def test_a_unicode_line_separator_does_not_end_a_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "9\u2028+ 1"}\n', encoding="utf-8")
    assert sequences(str(tmp_path / "rows.jsonl"), 1, 2).shape == (1, 2)


def test_the_seed_decides_the_order_of_the_rows(tmp_path: Path) -> None:
    dataset = write(tmp_path, *({"text": f"{n} + 1 is {n + 1}."} for n in range(9)))
    first, again, other = (sequences(dataset, 2, 16, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_error_on_too_little_text_says_how_much_there_is(tmp_path: Path) -> None:
    dataset = write(tmp_path, *[{"text": QUESTION}] * 3)
    have = 3 * (len(TOKENIZER(QUESTION, add_special_tokens=False)["input_ids"]) + 1)
    with pytest.raises(
        ConfigError, match=rf"has {have} tokens, and samples=256 x tokens=4 are 1,024\. Type samples={have // 4},"
    ):
        sequences(dataset, 256, 4)
    with pytest.raises(ConfigError, match=rf"Type samples=1 tokens={have},"):
        sequences(dataset, 256, 2048)
    assert sequences(dataset, 1, have).shape == (1, have)
    with pytest.raises(ConfigError, match=r"has 0 tokens, .* are 4\. Type the name of a larger dataset\.$"):
        sequences(write(tmp_path), 1, 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": 1, "label": 2}',
            r"the row {'prompt': 1, 'label': 2} has no text; allowed: text; messages or conversations; question",
        ),
        ('{"text": 3}', r"the row {'text': 3} has no text; allowed: text"),
        (
            '{"conversations": [{"role": "user", "content": "9"}]}',
            r"the row {'conv.* is no conversation .* \(KeyError: 'from'\)",
        ),
        (
            '{"messages": [{"role": "tool", "content": "9"}]}',
            r"template takes \(TemplateError: no tools\); allowed: text;",
        ),
        ("[1, 2]", r"the row \[1, 2\] has no text; allowed: text"),
        ("{text", r"'\{text' is no JSON"),
    ],
)
def test_error_on_rows_that_are_no_texts(
    tmp_path: Path, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", refusal + TOKENIZER.chat_template)
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        sequences(str(tmp_path / "rows.jsonl"), 1, 4)


def test_error_on_a_file_that_is_not_there(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.jsonl", tmp_path / "none", "none.txt", "./none"):
        with pytest.raises(ConfigError, match=r"is no file\. Type dataset=FILE\.txt, dataset=FILE\.jsonl or a hub id"):
            sequences(str(missing), 1, 4)


def test_a_hub_dataset_is_read_as_a_shuffled_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset = Mock()
    load_dataset.return_value.shuffle.return_value = [{"text": QUESTION}] * 4
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert sequences("owner/texts", 2, 4, seed=7).shape == (2, 4)
    load_dataset.assert_called_once_with("owner/texts", split="train", streaming=True)
    load_dataset.return_value.shuffle.assert_called_once_with(seed=7, buffer_size=1000)


def test_error_on_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=ConnectionError("no route")))
    with pytest.raises(ConfigError, match=r"owner/texts could not be read from the hub \(ConnectionError: no route\)"):
        sequences("owner/texts", 2, 4)
