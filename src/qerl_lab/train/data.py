"""The questions that a run draws from, and the order in which it does."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat

import torch
from torch.utils.data import Sampler

from qerl_lab.config.schema import ConfigError, RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.tasks import Question, Task


@dataclass(frozen=True)
class TrainingData:
    """The training questions of `task` that fit; `left_out` are longer than rollout.max_prompt_tokens."""

    task: Task
    questions: list[Question]
    left_out: int
    seed: int

    def order(self) -> Iterator[int]:
        """Indices into `questions`, without end: one seeded permutation after another."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(len(self.questions), generator=generator).tolist()


def select(cfg: RunConfig, policy: Policy, task: Task) -> TrainingData:
    """The training questions whose prompt, as a chat, has at most rollout.max_prompt_tokens tokens.

    Raises ConfigError where none has.
    """
    limit = cfg.rollout.max_prompt_tokens
    lengths = [len(policy.prompt_ids(task.messages(question))) for question in task.train]
    fitting = [question for question, length in zip(task.train, lengths, strict=True) if length <= limit]
    if not fitting:
        raise ConfigError(
            f"rollout.max_prompt_tokens={limit} leaves out all {len(lengths):,} training questions; the shortest has "
            f"{min(lengths)} tokens, the longest {max(lengths)}. Type rollout.max_prompt_tokens={max(lengths)}."
        )
    return TrainingData(task, fitting, len(lengths) - len(fitting), cfg.seed)


class Cursor:
    """A position in the endless order of a run's questions. Checkpoints store it; a resumed run goes on from there."""

    def __init__(self, data: TrainingData, position: int = 0) -> None:
        self.data, self.position = data, position
        self._order = islice(data.order(), position, None)

    def take(self, count: int) -> list[Question]:
        """The next `count` questions; moves past them."""
        self.position += count
        return [self.data.questions[index] for index in islice(self._order, count)]


class Placeholders(Sampler[int]):
    """Row 0, `count` times: TRL's dataloader counts the steps of a run, whose questions a `Cursor` draws."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self.count)

    def __len__(self) -> int:
        return self.count
