"""Worked solutions as tokens, and their seeded order."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from qerl_lab.config.option import ConfigError
from qerl_lab.model.policy import prompt_ids
from qerl_lab.solutions import Example
from qerl_lab.tasks import Task


def tokenized(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[list[Example], int]:
    """The examples of at most `max_tokens`, and how many are longer. Raises ConfigError where all are."""
    found = []
    for question in task.train:
        solution = tokenizer(question.payload["solution"], add_special_tokens=False)["input_ids"]
        found.append(Example(prompt_ids(tokenizer, task.messages(question)), [*solution, tokenizer.eos_token_id]))
    if not found:
        raise ConfigError(f"{task.name} has no worked solution. Type task_path=DIRECTORY with train.jsonl.")
    fitting = [example for example in found if example.length <= max_tokens]
    if not fitting:
        shortest = min((example.length for example in found), default=0)
        raise ConfigError(
            f"max_tokens={max_tokens} leaves out all {len(found):,} examples; the shortest has {shortest} tokens. "
            f"Type max_tokens={max(example.length for example in found)}."
        )
    return fitting, len(found) - len(fitting)


def order(count: int, seed: int) -> Iterator[int]:
    """Indices below `count`, without end: one seeded permutation after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
