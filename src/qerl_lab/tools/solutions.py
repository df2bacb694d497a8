"""Worked solutions as a model is taught them: batches whose loss counts the solution alone, and the learning rate."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the label of a token that is not learned, as torch's cross entropy has it


class Example(NamedTuple):
    """`prompt` is the question as the chat of a run asks it; `solution` ends with the end token."""

    prompt: list[int]
    solution: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.solution)


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


def learning_rate(peak: float, rising: int, update: int, updates: int) -> float:
    """The rate of an update, from 0 on: a linear rise over the first `rising`, then a cosine to a tenth of the peak."""
    if update < rising:
        return peak * (update + 1) / rising
    share = (update - rising) / max(1, updates - rising)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
