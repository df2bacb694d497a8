"""One step as data: prompts -> rollout -> grade -> keep -> refill -> batch.

Suffixes of names say the axes of arrays and lists: P prompts, G completions of a prompt (a group), D drawn groups.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from qerl_lab import aqn
from qerl_lab.algorithms import groups
from qerl_lab.algorithms.groups import Rewards
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Completion, Engine, EngineFailed, Rollout, Sampling, refuse_incomplete
from qerl_lab.tasks import UNPARSED, Question, Task
from qerl_lab.tasks.answers.completion import with_answer_start
from qerl_lab.tasks.grading import answer_entropy
from qerl_lab.train.ranks import ALONE, Ranks
from qerl_lab.train.stop import Diverged
from qerl_lab.train.training_data import Cursor

OVERLONG = "overlong"  # reward part that the algorithm adds to the task's reward


class Clock:
    """Accumulate wall time by phase in `seconds`, which the trainer clears after each step.

    The function `wait` must block until the device has finished all queued work. Phases exclude the time that this
    process waits for other ranks; `end_step` stores that time as "wait".
    """

    def __init__(self, wait: Callable[[], None], ranks: Ranks = ALONE) -> None:
        self.wait, self.ranks = wait, ranks
        self.seconds: dict[str, float] = defaultdict(float)
        self._step_started, self._waited_before = 0.0, 0.0

    @contextmanager
    def phase(self, name: str, on_device: bool = True) -> Iterator[None]:
        """Context manager: add the time of the block to phase `name`.

        With `on_device` it waits at the end for the device, so that work which the block queued counts too.
        """
        started, waited = time.perf_counter(), self.ranks.waited
        yield
        if on_device:
            self.wait()
        self.seconds[name] += time.perf_counter() - started - (self.ranks.waited - waited)

    def start_step(self) -> None:
        """Start the clock of a step; `end_step` stops it."""
        self._step_started, self._waited_before = time.perf_counter(), self.ranks.waited

    def end_step(self) -> None:
        """Store the seconds since `start_step` as "step", and the part spent waiting for other ranks as "wait"."""
        self.wait()
        self.seconds["step"] = time.perf_counter() - self._step_started
        self.seconds["wait"] = self.ranks.waited - self._waited_before


@dataclass(frozen=True)
class Group:
    """A question and its graded completions.

    `parts` has the parts of the reward by name, [G] each. `unparsed_G` is 1 for each answer that could not be parsed;
    None if the task does not tell.
    """

    question: Question
    prompt_ids: list[int]
    completions_G: list[Completion]
    texts_G: list[str]
    parts: dict[str, Rewards]
    unparsed_G: Rewards | None

    @property
    def finished_G(self) -> list[bool]:
        """Return for each completion [G] whether it ended by itself, not at the token limit."""
        return [completion.finish_reason == "stop" for completion in self.completions_G]

    @property
    def reward_G(self) -> Rewards:
        """Return the reward of each completion [G], all parts added."""
        return np.sum(list(self.parts.values()), axis=0)

    @property
    def task_reward_G(self) -> Rewards:
        """Return the task's reward of each completion [G], without the algorithm's overlong punishment."""
        return np.sum([part for name, part in self.parts.items() if name != OVERLONG], axis=0)


@dataclass(frozen=True)
class Batch:
    """The groups of a step on one rank: those to train on, and all that were sampled.

    Attributes:
        groups: this rank's share of rollout.prompts_per_step groups, chosen from `drawn` and in the same order.
        advantage_P_G: advantages of `groups`, one row per group.
        drawn: every sampled group, in question order.
        rollouts: the engine's result of each sampling attempt on this rank.
    """

    groups: list[Group]
    advantage_P_G: Rewards
    drawn: list[Group]
    rollouts: list[Rollout]


def collect(
    cfg: RunConfig, step: int, cursor: Cursor, policy: Policy, engine: Engine, clock: Clock, ranks: Ranks
) -> Batch:
    """Sample and grade completions of the cursor's next questions; return the batch of this rank.

    Each rank asks its share of rollout.prompts_per_step questions. A group is flat if all its completions earned the
    same reward. Dynamic sampling asks new questions in place of flat groups, in at most algorithm.max_resamples more
    rollouts. If groups are still missing then, flat ones fill the batch. Raises Diverged if the sampler's logits are
    NaN, and EngineFailed on every rank if any rank fails.
    """
    task = cursor.data.task
    wanted = missing = cfg.rollout.prompts_per_step // ranks.size
    drawn, rollouts = list[Group](), list[Rollout]()
    resamples = cfg.algorithm.max_resamples if cfg.algorithm.dynamic_sampling else 0
    for attempt in range(1 + resamples):
        missing_R = ranks.gather(missing)
        if not any(missing_R):
            break
        first = sum(missing_R[: ranks.rank])  # the ranks before this one ask as many questions
        questions_P = cursor.take(sum(missing_R))[first : first + missing]
        prompt_ids_P = [policy.chat.prompt_ids(task.messages(question)) for question in questions_P]
        sampling = sampling_settings(cfg, step, attempt, ranks.rank)
        ask = partial(sample_completions, engine, prompt_ids_P, cfg.rollout.group_size, sampling)
        rollout = ranks.run_on_all(ask, EngineFailed)
        if rollout:
            if rollout.has_nan:
                level = aqn.level(cfg.aqn, step, cfg.steps)
                key = "kl" if cfg.aqn.unit == "kl" else "sigma"
                raise Diverged(
                    f"the sampler's logits are NaN at step {step}. Type a lower optim.learning_rate (it is "
                    f"{cfg.optim.learning_rate:g}), or with AQN a lower aqn.{key}_start ({key} is {level:g})."
                )
            with clock.phase("reward", on_device=False):
                drawn += grade_rollout(cfg, task, policy, questions_P, rollout)
            rollouts.append(rollout)
        kept = ~groups.is_flat(np.array([group.task_reward_G for group in drawn]))
        missing = wanted - int(kept.sum())
    clock.seconds["rollout"] += sum(rollout.seconds for rollout in rollouts)
    indices = sorted([*np.flatnonzero(kept), *np.flatnonzero(~kept)[:missing]])  # flat groups fill what is missing
    chosen = [drawn[index] for index in indices]
    reward_P_G = np.array([group.reward_G for group in chosen])
    return Batch(chosen, groups.advantage(reward_P_G, cfg.algorithm.normalize_std), drawn, rollouts)


def sample_completions(
    engine: Engine, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling
) -> Rollout | None:
    """Sample `group_size` completions of each prompt; return None if there are no prompts.

    Raises EngineFailed if the engine fails or its result is incomplete.
    """
    if not prompt_ids_P:
        return None
    rollout = engine.generate(prompt_ids_P, group_size, sampling)
    refuse_incomplete(rollout, len(prompt_ids_P), group_size, sampling)
    return rollout


def sampling_settings(cfg: RunConfig, step: int, attempt: int, rank: int) -> Sampling:
    """Return the settings to sample with, for one attempt (from 0) of a step on one rank.

    The seed depends only on the arguments, so a resumed run samples the same.
    """
    seed = cfg.seed * 1_000_003 + step
    if attempt or rank:
        name = f"rollout/{cfg.seed}/{step}/{attempt}/{rank}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return Sampling(cfg.rollout.max_completion_tokens, seed=seed, temperature=cfg.rollout.temperature)


def grade_rollout(
    cfg: RunConfig, task: Task, policy: Policy, questions_P: list[Question], rollout: Rollout
) -> list[Group]:
    """Grade a rollout of `questions_P`, with the overlong punishment if configured; return one group per question."""
    texts_P_G = []
    for prompt_ids, completions_G in zip(rollout.prompt_ids_P, rollout.completions_P_G, strict=True):
        decoded_G = [policy.decode_completion(completion.ids) for completion in completions_G]
        texts_P_G.append(with_answer_start(policy.decode_prompt(prompt_ids), decoded_G))
    texts = [text for texts_G in texts_P_G for text in texts_G]
    scores = task.grade(texts, [question for question in questions_P for _ in range(cfg.rollout.group_size)])
    parts = task.weighted(scores, texts)
    if buffer := cfg.overlong_buffer:
        lengths = [len(completion.ids) for completion in rollout.completions]
        parts[OVERLONG] = groups.overlong_punishment(lengths, cfg.rollout.max_completion_tokens, buffer)
    parts_P_G = {name: part.reshape(len(questions_P), -1) for name, part in parts.items()}
    unparsed_P_G = scores[UNPARSED].reshape(len(questions_P), -1) if UNPARSED in scores else None
    return [
        Group(
            question,
            prompt_ids=rollout.prompt_ids_P[p],
            completions_G=rollout.completions_P_G[p],
            texts_G=texts_P_G[p],
            parts={name: part_P_G[p] for name, part_P_G in parts_P_G.items()},
            unparsed_G=None if unparsed_P_G is None else unparsed_P_G[p],
        )
        for p, question in enumerate(questions_P)
    ]


def completion_metrics(cfg: RunConfig, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """Return the metrics of a step's completions and rewards over the groups of all ranks, the same on every rank.

    With dynamic sampling, metrics also count the groups that were dropped and the cost of sampling again: counts are
    summed over ranks, resamples and seconds are the largest of any rank.
    """
    parts = ranks.pool([group.parts for group in batch.drawn])
    finished = ranks.pool([group.finished_G for group in batch.drawn])
    answer_entropies = ranks.pool([answer_entropy(group.texts_G) for group in batch.drawn])
    unparsed = ranks.pool([group.unparsed_G for group in batch.drawn if group.unparsed_G is not None])
    rollouts = ranks.pool([(rollout.tokens, rollout.entropy) for rollout in batch.rollouts])
    part_D_G = {name: np.array([group[name] for group in parts]) for name in parts[0]}
    reward_D_G = np.sum(list(part_D_G.values()), axis=0)
    tokens = sum(count for count, _ in rollouts)
    metrics = {
        "reward/mean": reward_D_G.mean(),
        "reward/std": reward_D_G.std(ddof=1),
        "reward/zero_variance_groups": groups.is_flat(reward_D_G).mean(),
        **{f"reward/{name}": part.mean() for name, part in part_D_G.items()},
        "rollout/tokens_per_second": tokens / max(ranks.gather(sum(rollout.seconds for rollout in batch.rollouts))),
        "rollout/completion_tokens": tokens / reward_D_G.size,
        "rollout/truncated_fraction": 1 - np.mean(finished),
        "rollout/answer_entropy_nats": np.mean(answer_entropies),
    }
    if unparsed:
        metrics["reward/unparsed"] = np.mean(unparsed)
    if weighted := [entropy * (count / tokens) for count, entropy in rollouts if entropy is not None]:
        metrics["sampler/entropy_nats"] = sum(weighted)
    if not cfg.algorithm.dynamic_sampling:
        return metrics
    resampled, trained = batch.rollouts[1:], {id(group) for group in batch.groups}
    dropped = [group for group in batch.drawn if id(group) not in trained]
    largest: dict[str, float] = {
        "rollout/resamples": len(resampled),
        "seconds/resample": sum(rollout.seconds for rollout in resampled),
    }
    counts = {
        "rollout/prompts_drawn": len(batch.drawn),
        "rollout/resampled_tokens": sum(rollout.tokens for rollout in resampled),
        "rollout/groups_dropped": len(dropped),
        "rollout/groups_dropped_unsolved": sum(not group.parts["answer"].any() for group in dropped),
        "rollout/groups_flat": int(groups.is_flat(np.array([group.task_reward_G for group in batch.groups])).sum()),
    }
    of_ranks = ranks.gather(counts | largest)
    metrics |= {name: sum(rank[name] for rank in of_ranks) for name in counts}
    return metrics | {name: max(rank[name] for rank in of_ranks) for name in largest}
