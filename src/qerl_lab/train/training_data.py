"""Select the questions of a run and fix their order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.preflight.question_counts import overrides_without_evaluation
from qerl_lab.tasks import Question, Task


@dataclass(frozen=True)
class TrainingData:
    """Questions of a run, without prompts of more than rollout.max_prompt_tokens.

    Attributes:
        task: the task, with only those held-out questions that fit; with none if the run never evaluates.
        questions: the training questions that fit.
        left_out, heldout_left_out: numbers of training and held-out questions that are too long.
        seed: determines the order of the training questions.
        longest_prompt: number of tokens of the longest prompt of `questions`.
    """

    task: Task
    questions: list[Question]
    left_out: int
    heldout_left_out: int
    seed: int
    longest_prompt: int

    def order(self) -> Iterator[int]:
        """Yield indices into `questions` without end: all in a random order, then all in a new random order, and so on.

        `seed` determines the orders.
        """
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(len(self.questions), generator=generator).tolist()


def select(cfg: RunConfig, policy: Policy, task: Task) -> TrainingData:
    """Select the questions of `task` with prompts of at most rollout.max_prompt_tokens.

    Raises ConfigError if no training question is left, or if the run evaluates and fewer than two held-out questions
    are left.
    """
    limit = cfg.rollout.max_prompt_tokens
    evaluation_off = overrides_without_evaluation(cfg)
    evaluates = bool(evaluation_off)  # a run without evaluation has nothing to switch off
    asked = task.heldout if evaluates else []
    lengths = [len(policy.chat.prompt_ids(task.messages(question))) for question in task.train]
    heldout_lengths = [len(policy.chat.prompt_ids(task.messages(question))) for question in asked]
    fitting = [question for question, length in zip(task.train, lengths, strict=True) if length <= limit]
    heldout = [question for question, length in zip(asked, heldout_lengths, strict=True) if length <= limit]
    if not fitting:
        raise ConfigError(
            f"rollout.max_prompt_tokens={limit} leaves out all {len(lengths):,} training questions; the shortest has "
            f"{min(lengths)} tokens, the longest {max(lengths)}. Type rollout.max_prompt_tokens={max(lengths)}."
        )
    if asked and len(heldout) < 2:
        raise ConfigError(
            f"rollout.max_prompt_tokens={limit} leaves {len(heldout)} of {len(asked):,} held-out questions, and an "
            f"evaluation needs two. Type rollout.max_prompt_tokens={max(heldout_lengths)}, or "
            f"{evaluation_off}."
        )
    return TrainingData(
        replace(task, heldout=heldout),
        questions=fitting,
        left_out=len(task.train) - len(fitting),
        heldout_left_out=len(asked) - len(heldout),
        seed=cfg.seed,
        longest_prompt=max(length for length in lengths if length <= limit),
    )


class Cursor:
    """Position in the run's endless question order. Checkpoints store it, so that a resumed run continues there."""

    def __init__(self, data: TrainingData, position: int = 0) -> None:
        self.data = data
        self.go_to(position)

    def go_to(self, position: int) -> None:
        """Move the cursor, forwards or backwards, to the question at index `position` of the endless order."""
        self.position = position
        self._order = islice(self.data.order(), position, None)

    def take(self, count: int) -> list[Question]:
        """Return the next `count` questions and move past them."""
        self.position += count
        return [self.data.questions[index] for index in islice(self._order, count)]
