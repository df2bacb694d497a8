"""`collect` with a scripted engine and task: questions asked, groups kept and replaced, penalties and metrics."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from qerl_lab.algorithms import groups
from qerl_lab.config.schema import RunConfig
from qerl_lab.rollout.engine import Completion, EngineFailed, Rollout, Sampling
from qerl_lab.tasks import UNPARSED, Question
from qerl_lab.train.ranks import ALONE, Ranks
from qerl_lab.train.step import Batch, Clock, collect, completion_metrics, sampling_settings
from qerl_lab.train.stop import Diverged
from qerl_lab.train.training_data import Cursor, TrainingData
from ranks_as_threads import threads

QUESTIONS = 10


class ScriptedTask:
    """A completion with an even number of tokens is right, and any if the answer is "flat"; 4 tokens are unparsed."""

    def messages(self, question: Question) -> list[dict[str, str]]:
        return [{"role": "user", "content": question.prompt}]

    def grade(self, texts: list[str], questions: list[Question]) -> dict[str, np.ndarray]:
        right = [q.answer == "flat" or len(text) % 2 == 0 for text, q in zip(texts, questions, strict=True)]
        unparsed = np.array([len(text) == 4 for text in texts], np.float64)
        return {"format": np.full(len(texts), 0.2), "answer": np.array(right, np.float64), UNPARSED: unparsed}

    def weighted(self, scores: dict[str, np.ndarray], texts: list[str]) -> dict[str, np.ndarray]:
        return {part: score for part, score in scores.items() if part != UNPARSED}


class ScriptedPolicy:
    """A token is a character."""

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(character) for character in messages[0]["content"]]

    def decode_completion(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    chat, decode_prompt = property(lambda self: self), decode_completion


class ScriptedEngine:
    """Gives each question completions of 1 to G tokens, in an order that depends on the sampling seed."""

    def __init__(self, logprob: float = -1.0, entropies: tuple[float | None, ...] = (1.0, 2.0, 4.0)) -> None:
        self.asked: list[tuple[list[str], Sampling]] = []
        self.logprob, self.entropies = logprob, entropies

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        lengths = [1 + (sampling.seed + n) % group_size for n in range(group_size)]
        entropy = self.entropies[min(len(self.asked), len(self.entropies) - 1)]
        self.asked.append(([ScriptedPolicy().decode_completion(ids) for ids in prompt_ids_P], sampling))

        def sampled(prompt: int, length: int) -> Completion:
            reason = "length" if length == group_size else "stop"
            summed = None if entropy is None else entropy * length
            return Completion([65 + prompt] * length, [self.logprob] * length, reason, summed)

        groups = [[sampled(p, length) for length in lengths] for p in range(len(prompt_ids_P))]
        return Rollout(prompt_ids_P, groups, seconds=2.0)


@dataclass
class Setting:
    cfg: RunConfig
    cursor: Cursor
    engine: ScriptedEngine
    clock: Clock
    ranks: Ranks = ALONE

    def collect(self, step: int = 1) -> Batch:
        return collect(self.cfg, step, self.cursor, ScriptedPolicy(), self.engine, self.clock, self.ranks)

    def order(self, count: int) -> list[str]:
        """Return the ids of the first `count` questions in the order of the data."""
        return [question.id for question in Cursor(self.cursor.data).take(count)]


@pytest.fixture
def setting(tiny) -> Callable[..., Setting]:
    """Ten questions, those at `flat` places of the data's order always right; `position` is where the cursor stands."""

    def make(flat: set[int] = frozenset(), position: int = 0, engine: Any = None, **changes: object) -> Setting:
        small = {"rollout__prompts_per_step": 3, "rollout__max_completion_tokens": 4, "optim__micro_batch_size": 2}
        data = TrainingData(ScriptedTask(), [Question(f"q{n}", f"{n}?", "") for n in range(QUESTIONS)], 0, 0, 0, 9)
        for index in {list(islice(data.order(), QUESTIONS))[place] for place in flat}:
            data.questions[index] = replace(data.questions[index], answer="flat")
        return Setting(
            tiny(**(small | changes)), Cursor(data, position), engine or ScriptedEngine(), Clock(lambda: None)
        )

    return make


RESAMPLING = {"algorithm__dynamic_sampling": True, "algorithm__max_resamples": 2}


def test_without_refills_a_step_is_the_next_questions_flat_or_not(setting) -> None:
    run = setting(flat={0, 2}, engine=ScriptedEngine(entropies=(None,)))
    first, second = run.collect(1), run.collect(2)
    order = run.order(6)
    assert [group.question.id for group in first.groups + second.groups] == order
    assert first.drawn == first.groups
    assert run.cursor.position == 6
    assert len(run.engine.asked) == 2
    assert (first.advantage_P_G[[0, 2]] == 0).all()
    assert (first.advantage_P_G[1] != 0).all()
    unknown = {"sampler/entropy_nats", "rollout/prompts_drawn"}  # without dynamic sampling the metrics are as ever
    assert not unknown & set(completion_metrics(run.cfg, first, ALONE))


def test_a_group_is_its_question_with_what_was_sampled_and_earned(setting) -> None:
    run = setting(position=3)
    group = run.collect().groups[1]
    assert group.question.id == run.order(5)[4]
    assert group.prompt_ids == ScriptedPolicy().prompt_ids([{"content": group.question.prompt}])
    assert group.texts_G == ["B" * len(completion.ids) for completion in group.completions_G]
    assert [len(completion.logprobs) for completion in group.completions_G] == [len(text) for text in group.texts_G]
    assert group.finished_G == [len(text) < 4 for text in group.texts_G]
    assert group.parts["answer"].tolist() == [float(len(text) % 2 == 0) for text in group.texts_G]
    assert group.parts["format"].tolist() == [0.2] * 4


def test_what_the_prompt_has_begun_is_graded_with_the_completion(setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedPolicy, "decode_prompt", lambda self, ids: "How many?<think>\n")
    group = setting().collect().groups[0]
    assert group.texts_G == ["<think>\n" + "A" * len(completion.ids) for completion in group.completions_G]


def test_flat_groups_are_replaced_by_the_next_questions_until_none_is_missing(setting) -> None:
    """Places 1, 2 and 4 are flat: three questions are asked, then two more, then one."""
    run = setting(flat={1, 2, 4}, **RESAMPLING)
    batch, order = run.collect(), run.order(6)
    prompts = {question.id: question.prompt for question in run.cursor.data.questions}
    assert [asked for asked, _ in run.engine.asked] == [
        [prompts[i] for i in part] for part in (order[:3], order[3:5], order[5:])
    ]
    assert [group.question.id for group in batch.groups] == [order[0], order[3], order[5]]
    assert [group.question.id for group in batch.drawn] == order
    assert run.cursor.position == 6
    assert (batch.advantage_P_G != 0).all()
    assert run.clock.seconds["rollout"] == 6.0


def test_after_the_last_attempt_flat_groups_fill_the_batch_in_the_order_of_their_questions(setting) -> None:
    run = setting(flat={0, 1, 3, 4, 5}, **RESAMPLING)
    batch, order = run.collect(), run.order(7)
    assert len(run.engine.asked) == 3
    assert [group.question.id for group in batch.drawn] == order
    assert [group.question.id for group in batch.groups] == [order[0], order[2], order[6]]
    assert [bool(row.any()) for row in batch.advantage_P_G] == [False, True, True]


def test_every_attempt_has_its_own_seed_and_the_first_keeps_the_old_formula(tiny) -> None:
    cfg = tiny(seed=3)
    assert sampling_settings(cfg, 5, 0, 0) == Sampling(
        cfg.rollout.max_completion_tokens, seed=3 * 1_000_003 + 5, temperature=1.0
    )
    cases = product((tiny(seed=0), tiny(seed=1)), (1, 2), range(4), (0, 1))
    seeds = {sampling_settings(*case).seed for case in cases}
    assert len(seeds) == 32
    assert sampling_settings(cfg, 5, 2, 1) == sampling_settings(cfg, 5, 2, 1)


def test_two_ranks_ask_what_one_asks_also_where_one_of_them_refills(setting) -> None:
    """Questions 2, 3 and 7 are flat: rank 0 first lacks two groups, then one."""
    changes = RESAMPLING | {"rollout__prompts_per_step": 6, "optim__micro_batch_size": 4, "flat": {1, 2, 6}}
    alone, runs = setting(**changes), [replace(setting(**changes), ranks=ranks) for ranks in threads(2)]
    expected = alone.collect()
    with ThreadPoolExecutor(2) as pool:
        batches = list(pool.map(lambda run: run.collect(), runs))
        found = list(pool.map(lambda run, batch: completion_metrics(run.cfg, batch, run.ranks), runs, batches))
        twice, _ = pool.map(lambda run: completion_metrics(run.cfg, batches[0], run.ranks), runs)
    order = alone.order(9)
    assert [[group.question.id for group in batch.drawn] for batch in batches] == [order[:3] + order[6:], order[3:6]]
    assert [[group.question.id for group in batch.groups] for batch in batches] == [
        [order[0], order[7], order[8]], order[3:6],
    ]  # fmt: skip
    assert sorted(group.question.id for batch in batches for group in batch.groups) == sorted(
        group.question.id for group in expected.groups
    )
    assert runs[0].cursor.position == runs[1].cursor.position == alone.cursor.position == 9
    assert found[0] == found[1]
    assert found[0]["rollout/prompts_drawn"] == 9
    assert (twice["rollout/resamples"], twice["rollout/prompts_drawn"]) == (2, 12)  # at the same time, and in all
    seconds = [sum(rollout.seconds for rollout in batch.rollouts) for batch in batches]
    tokens = sum(rollout.tokens for batch in batches for rollout in batch.rollouts)
    assert found[0]["rollout/tokens_per_second"] == pytest.approx(tokens / max(seconds))
    assert found[0]["reward/mean"] == pytest.approx(completion_metrics(alone.cfg, expected, ALONE)["reward/mean"])


class Slow(ScriptedEngine):
    """Takes half a second in its call, and in its sync."""

    def sync(self) -> None:
        time.sleep(0.5)

    def generate(self, *asked: Any) -> Rollout:
        time.sleep(0.5)
        return super().generate(*asked)


def test_a_rank_that_waits_for_the_slowest_books_it_as_waiting(setting) -> None:
    def step(run: Setting) -> float:
        """Return the seconds of a step that no phase counts."""
        run.clock.start_step()
        with run.clock.phase("sync"):
            run.ranks.run_on_all(getattr(run.engine, "sync", lambda: None), EngineFailed)
        run.collect()
        run.clock.end_step()
        return run.clock.seconds["step"] - sum(run.clock.seconds[name] for name in ("sync", "reward", "wait"))

    runs = [
        replace(setting(engine=engine, rollout__prompts_per_step=4), ranks=ranks, clock=Clock(lambda: None, ranks))
        for engine, ranks in zip((None, Slow()), threads(2), strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        quick, slow = pool.map(step, runs)
    assert quick < 0.4 < slow  # the engine says itself what its rollout took
    assert runs[0].clock.seconds["wait"] > 0.9
    assert runs[0].clock.seconds["sync"] < 0.4 < runs[1].clock.seconds["sync"]
    assert runs[1].clock.seconds["wait"] < 0.4
    runs[0].clock.start_step()
    runs[0].clock.end_step()
    assert runs[0].clock.seconds["wait"] == 0  # of this step alone


class Dies(ScriptedEngine):
    """Fails in its second call."""

    def generate(self, *asked: Any) -> Rollout:
        if self.asked:
            raise EngineFailed("the worker died")
        return super().generate(*asked)


@pytest.mark.parametrize("dying", [0, 1])
def test_an_engine_that_fails_on_one_rank_fails_the_step_on_both(setting, dying: int) -> None:
    """Rank 1 lacks nothing after the first try, and waits while rank 0 refills."""
    changes = RESAMPLING | {"rollout__prompts_per_step": 6, "optim__micro_batch_size": 4, "flat": {1, 2, 4, 6}}
    engines = [Dies() if rank == dying else None for rank in range(2)]
    runs = [
        replace(setting(**changes, engine=engine), ranks=ranks)
        for engine, ranks in zip(engines, threads(2), strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(run.collect) for run in runs]
        for end in ends:
            with pytest.raises(EngineFailed, match=f"^rank {dying}: the worker died$"):
                end.result(30)


def test_the_overlong_punishment_is_a_part_of_the_reward_but_keeps_no_group(setting) -> None:
    run = setting(flat={0}, algorithm__overlong_buffer_tokens=2, **RESAMPLING)
    batch = run.collect()
    assert batch.drawn[0].question.id not in [group.question.id for group in batch.groups]
    for group in batch.groups:
        lengths = [len(completion.ids) for completion in group.completions_G]
        assert group.parts["overlong"].tolist() == groups.overlong_punishment(lengths, 4, 2).tolist() != [0.0] * 4
    rewards = np.array([sum(group.parts.values()) for group in batch.groups])
    np.testing.assert_array_equal(batch.advantage_P_G, groups.advantage(rewards, True))
    assert completion_metrics(run.cfg, batch, ALONE)["reward/overlong"] == pytest.approx(-1.5 / 4)


def test_the_measures_are_over_everything_that_was_drawn(setting) -> None:
    """Rollouts of 3, 2 and 1 questions with 10 tokens each, the flat ones right in all of their completions."""
    run = setting(flat={1, 2, 4}, **RESAMPLING)
    found = completion_metrics(run.cfg, run.collect(), ALONE)
    assert found.pop("reward/std") == pytest.approx(np.std([1.2] * 12 + [0.2, 1.2] * 6, ddof=1))
    assert found == pytest.approx(
        {
            "reward/mean": 0.2 + 0.75, "reward/format": 0.2, "reward/answer": 0.75, "reward/unparsed": 0.25,
            "reward/zero_variance_groups": 0.5, "rollout/prompts_drawn": 6, "rollout/tokens_per_second": 10.0,
            "rollout/resamples": 2, "rollout/resampled_tokens": 30, "seconds/resample": 4.0, "rollout/groups_flat": 0,
            "rollout/groups_dropped": 3, "rollout/groups_dropped_unsolved": 0,
            "rollout/completion_tokens": 2.5, "rollout/truncated_fraction": 0.25,
            "rollout/answer_entropy_nats": 0.0,
            "sampler/entropy_nats": (3 * 1.0 + 2 * 2.0 + 4.0) / 6,
        }
    )  # fmt: skip


def test_flat_and_unsolved_groups_are_counted(setting) -> None:
    """Six of seven groups are flat, and the fourth is unsolved. The last two attempts ask two questions each."""
    run = setting(flat={0, 1, 3, 4, 5, 6}, algorithm__overlong_buffer_tokens=2, **RESAMPLING)
    batch = run.collect()
    batch.drawn[3].parts["answer"][:] = 0.0
    found = completion_metrics(run.cfg, batch, ALONE)
    names = "prompts_drawn groups_dropped groups_dropped_unsolved groups_flat resamples resampled_tokens"
    assert [found[f"rollout/{name}"] for name in names.split()] == [7, 4, 1, 2, 2, 40]


def test_a_log_prob_that_is_nan_ends_the_run(setting) -> None:
    with pytest.raises(Diverged, match=r"sampler's logits are NaN at step 2\. Type a lower optim\.learning_rate"):
        setting(engine=ScriptedEngine(logprob=float("nan"))).collect(2)


def test_answer_entropy_is_the_mean_over_questions_of_the_entropy_over_a_group(setting) -> None:
    run = setting()
    batch = run.collect()
    said = [["7", "7.0", "8", "9"], ["7", "7", "7", "7"]]  # ln(2) / 2 + ln(4) / 2, and 0
    texts = [[f"<think>a</think><answer>{answer}</answer>" for answer in group] for group in said]
    groups = [replace(group, texts_G=own) for group, own in zip(batch.drawn, texts, strict=False)]
    found = completion_metrics(run.cfg, replace(batch, drawn=groups), ALONE)
    assert found["rollout/answer_entropy_nats"] == pytest.approx(0.75 * math.log(2), abs=1e-12)
