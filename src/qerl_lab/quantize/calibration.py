"""Read calibration texts from a hub dataset or local file, tokenize them and cut them into equal sequences."""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError

FIELDS = "text; messages or conversations; question and answer"
SHUFFLED_ROWS = 1000  # shuffle buffer of a hub dataset, which is streamed
ROLES = {"human": "user", "gpt": "assistant"}  # in `conversations`; the template's own names are allowed, too


def sequences(dataset: str, tokenizer: PreTrainedTokenizerBase, *, samples: int, tokens: int, seed: int) -> Tensor:
    """Return token ids `[samples, tokens]`, int64, to calibrate on: consecutive texts without padding.

    Each text ends with an end token, or as the chat template ends a conversation. `dataset` is a .txt file (one text),
    a .jsonl file or a hub id (split train); `seed` shuffles its rows. A row has a column `text`, or a conversation that
    the model's chat template renders: `messages` (role, content), `conversations` (from, value), or GSM8K's `question`
    and `answer`. Raises ConfigError for an unreadable dataset, for a row without such columns, for a conversation that
    the template refuses, and for a dataset of fewer tokens than `samples` * `tokens`.
    """
    needed, ids = samples * tokens, list[int]()
    for row in _rows(dataset, seed):
        row_text = f"dataset={dataset}: the row {str(row)[:60]}"  # no number: the rows are shuffled
        try:
            text = _text_of(row, tokenizer) if isinstance(row, Mapping) else None
        except (KeyError, TypeError, ValueError, TemplateError) as error:
            raise ConfigError(
                f"{row_text} is no conversation that the model's chat template takes "
                f"({type(error).__name__}: {first_line(error)}); allowed: {FIELDS}. Leave such rows out."
            ) from error
        if text is None:
            raise ConfigError(f"{row_text} has no text; allowed: {FIELDS}. Leave such rows out.")
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= needed:
            return torch.tensor(ids[:needed]).view(samples, tokens)
    fits = len(ids) // tokens
    remedy = f"samples={fits}" if fits else f"samples=1 tokens={len(ids)}"
    raise ConfigError(
        f"dataset={dataset} has {len(ids):,} tokens, and samples={samples} x tokens={tokens} are {needed:,}. "
        f"Type {f'{remedy}, or ' if ids else ''}the name of a larger dataset."
    )


def _rows(dataset: str, seed: int) -> Iterator[Any]:
    """Yield the rows of a .jsonl file or of a hub dataset's split `train`, shuffled by `seed`; a .txt file is one row.

    Raises ConfigError if the dataset cannot be read, or for a line that is no JSON.
    """
    from datasets import load_dataset

    path = Path(dataset).expanduser()
    if path.suffix == ".txt" and path.is_file():
        yield {"text": path.read_text(encoding="utf-8")}
    elif path.suffix == ".jsonl" and path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        random.Random(seed).shuffle(lines)
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"dataset={dataset}: {line[:60]!r} is no JSON ({error}). Leave such rows out."
                ) from error
    elif dataset.startswith(("/", ".", "~")) or dataset.endswith((".txt", ".jsonl")):
        raise ConfigError(f"dataset={dataset} is no file. Type dataset=FILE.txt, dataset=FILE.jsonl or a hub id.")
    else:
        try:
            rows = load_dataset(dataset, split="train", streaming=True)
            yield from rows.shuffle(seed=seed, buffer_size=SHUFFLED_ROWS)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"dataset={dataset} could not be read from the hub ({type(error).__name__}: {first_line(error)}). "
                "Type dataset=FILE.jsonl for a local file."
            ) from error


def _text_of(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the text of a row of a dataset, as `sequences` describes; None if the row has no known column.

    The text ends with the end token, or as the chat template ends a conversation. Raises KeyError, TypeError,
    ValueError or TemplateError for a conversation that cannot be rendered.
    """
    end = tokenizer.eos_token or ""
    if isinstance(row.get("text"), str):
        return row["text"] + end
    messages: Any = row.get("messages")
    if "conversations" in row:
        turns = row["conversations"]
        messages = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
    elif "question" in row and "answer" in row:
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    if messages is None:
        return None
    if tokenizer.chat_template is None:
        return "\n".join(message["content"] for message in messages) + end
    return tokenizer.apply_chat_template(messages, tokenize=False)
