"""Worked solutions as tokens, and their seeded order."""

import sys
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from qerl_lab.config.option import ConfigError
from qerl_lab.model.chat import Chat
from qerl_lab.tasks import Task
from qerl_lab.tasks.answers.completion import left_to_say
from qerl_lab.tools.solutions import Example


def tokenized(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[list[Example], int]:
    """The examples of at most `max_tokens`, and how many are longer. Raises ConfigError where all are."""
    found, chat = [], Chat(tokenizer)
    for question in task.train:
        prompt_ids = chat.prompt_ids(task.messages(question))
        solution = left_to_say(tokenizer.decode(prompt_ids), question.payload["solution"])
        ids = tokenizer(solution, add_special_tokens=False)["input_ids"]
        found.append(Example(prompt_ids, [*ids, tokenizer.eos_token_id]))
    for note in chat.notes:
        print(f"note: {note}", file=sys.stderr)
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
