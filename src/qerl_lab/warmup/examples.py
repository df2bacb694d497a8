"""Worked solutions as tokens, their seeded order, and batches whose loss counts the solution alone."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_lab.config.option import ConfigError
from qerl_lab.model.policy import prompt_ids
from qerl_lab.tasks import Task

IGNORED = -100  # the label of a token that is not learned, as torch's cross entropy has it


class Example(NamedTuple):
    """`prompt` is the question as the chat of a run asks it; `solution` ends with the end token."""

    prompt: list[int]
    solution: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.solution)


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


def batch(examples: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """Ids, mask and labels [examples, longest], padded on the right; `labels` have the tokens of solutions alone."""
    longest = max(example.length for example in examples)
    ids = torch.full((len(examples), longest), pad)
    labels = torch.full((len(examples), longest), IGNORED)
    for row, (prompt, solution) in enumerate(examples):
        end = len(prompt) + len(solution)
        ids[row, :end] = torch.tensor(prompt + solution)
        labels[row, len(prompt) : end] = torch.tensor(solution)
    lengths = torch.tensor([example.length for example in examples])
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) < lengths[:, None]).long(), "labels": labels}
