"""The questions of a run that fit, their order, and the position of a cursor."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest

from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.train.training_data import Cursor, TrainingData, select


@pytest.fixture
def data_of(policy) -> Callable[[RunConfig], TrainingData]:
    return lambda cfg: select(cfg, policy, tasks.load(cfg.task))


def test_the_order_is_one_seeded_permutation_after_another(tiny, data_of) -> None:
    def first(count: int, **changes: object) -> list[int]:
        return list(islice(data_of(tiny(**changes)).order(), count))

    order = first(160)
    for pass_ in (order[:64], order[64:128]):
        assert sorted(pass_) == list(range(64))
    assert order[:64] != order[64:128]
    assert first(160) == order
    assert first(160, seed=1) != order
    assert first(80) == order[:80]
    assert order[:8] == [44, 46, 17, 3, 47, 21, 35, 6], "runs of other versions saw these questions"


def test_questions_that_are_too_long_are_left_out_and_counted(tiny, data_of, policy) -> None:
    task = tasks.load(tiny().task)
    lengths = {question: len(policy.chat.prompt_ids(task.messages(question))) for question in task.train + task.heldout}
    limit = sorted(lengths.values())[len(lengths) // 2]
    data = data_of(tiny(rollout__max_prompt_tokens=limit))
    for given, kept, left_out in (
        (task.train, data.questions, data.left_out),
        (task.heldout, data.task.heldout, data.heldout_left_out),
    ):
        assert kept == [question for question in given if lengths[question] <= limit]
        assert left_out == len(given) - len(kept) > 0
    whole = data_of(tiny())
    assert (whole.left_out, whole.heldout_left_out, whole.task.heldout) == (0, 0, task.heldout)
    assert data_of(tiny(rollout__max_prompt_tokens=limit, eval__questions=0)).heldout_left_out == 0
    longest = max(lengths[question] for question in task.train)
    with pytest.raises(ConfigError, match=rf"leaves out all 64 .* Type rollout\.max_prompt_tokens={longest}\."):
        data_of(tiny(rollout__max_prompt_tokens=3))


def test_a_limit_that_leaves_too_few_held_out_questions_is_refused(tiny, policy) -> None:
    task = tasks.load(tiny().task)
    lengths = {question: len(policy.chat.prompt_ids(task.messages(question))) for question in task.heldout}
    shortest, longest = (pick(lengths, key=lengths.get) for pick in (min, max))
    few = replace(task, train=[shortest], heldout=[shortest, longest, longest])
    limit = {"rollout__max_prompt_tokens": lengths[shortest]}
    said = (
        rf"rollout\.max_prompt_tokens={lengths[shortest]} leaves 1 of 3 held-out questions, and an evaluation needs "
        rf"two\. Type rollout\.max_prompt_tokens={lengths[longest]}, or eval\.questions=0\."
    )
    with pytest.raises(ConfigError, match=said):
        select(tiny(**limit), policy, few)
    assert select(tiny(**limit, eval__questions=0), policy, few).questions
    with pytest.raises(ConfigError, match=rf"max_prompt_tokens={lengths[longest]}, or eval\.every=0\."):
        select(tiny(**limit, eval__questions=0, eval__every=1), policy, few)


def test_a_cursor_goes_on_from_its_position(tiny, data_of) -> None:
    data = data_of(tiny())
    order = [data.questions[index] for index in islice(data.order(), 200)]
    cursor = Cursor(data)
    taken = cursor.take(5) + cursor.take(0) + cursor.take(90)
    assert taken == order[:95]
    assert cursor.position == 95
    assert Cursor(data, 95).take(105) == cursor.take(105) == order[95:]
