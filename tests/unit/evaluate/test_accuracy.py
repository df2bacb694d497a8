"""The held-out evaluation: its questions, its draw, and its rows and metrics."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pandas as pd

from qerl_lab import tasks
from qerl_lab.evaluate.accuracy import ask_questions, by_question, evaluate, evaluation_seed, metrics
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Completion, OnDone, Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.system import terminal
from qerl_lab.tasks import module_file
from waiting import wait_for


@dataclass
class Recording:
    """An engine that gives one token as every answer and records how it was asked."""

    asked: list[tuple[list[list[int]], Sampling]] = field(default_factory=list)

    def generate(self, prompts: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone) -> Rollout:
        self.asked.append((prompts, sampling))
        return Rollout(prompts, [[Completion([5], [-1.0], "stop")] * group_size for _ in prompts], 1.0)


def asked(policy: Policy, *configurations: Any) -> list[tuple[list[list[int]], Sampling]]:
    engine = Recording()
    for cfg in configurations:
        evaluate(engine, policy, tasks.load(cfg.task), cfg, range(cfg.eval.questions), cfg.eval.samples)
    return engine.asked


def test_no_part_of_a_reward_can_have_the_name_of_a_column(policy, tiny) -> None:
    cfg = tiny()
    rows = evaluate(Recording(), policy, tasks.load(cfg.task), cfg, range(2), 1)
    assert {*rows.columns} <= {*get_args(module_file.Column), *module_file.PARTS}


def test_the_terminal_says_that_a_slow_grader_is_at_work(policy, tiny, monkeypatch, capsys) -> None:
    cfg = tiny()
    task = tasks.load(cfg.task)

    def slow(texts: Sequence[str], questions: Sequence[tasks.Question]) -> tasks.Scores:
        wait_for(lambda: "grading 2 completions of arithmetic" in capsys.readouterr().err)
        return task.grade(texts, questions)

    evaluate(Recording(), policy, task, cfg, range(2), 1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "SLOW_SECONDS", 0.01)
    evaluate(Recording(), policy, replace(task, grade=slow), cfg, range(2), 1)


def test_the_draw_follows_the_seed_of_the_run_and_nothing_else(policy, tiny) -> None:
    """Arms and phases of a seed share the draw. Two seeds do not, so an interval over seeds includes its variance."""
    arm, other = tiny(seed=1), tiny(seed=1, format__name="nf4", optim__learning_rate=0.5, aqn__schedule="linear")
    same, again, twin, next_seed = asked(policy, arm, arm, other, tiny(seed=2))
    assert same == again == twin
    assert same[0] == next_seed[0], "every seed asks the same questions"
    assert same[1].seed != next_seed[1].seed


def test_no_evaluation_has_the_draw_of_a_rollout_or_of_another_seed() -> None:
    """Rollouts are seeded with seed * 1,000,003 + step, from step 1. Torch on a CPU takes only the lower 32 bits."""
    seeds = range(20)
    draws = set(map(evaluation_seed, seeds))
    assert len(draws) == 20
    assert max(draws) < 2**32
    rollouts = {(seed * 1_000_003 + step) % 2**32 for seed in seeds for step in range(1, 2001)}
    assert not draws & (rollouts | set(seeds))


def test_the_sampling_follows_eval_and_not_rollout(policy, tiny) -> None:
    cfg = tiny(eval__temperature=0.3, eval__top_p=0.8, rollout__temperature=1.5, eval__questions=3)
    ((prompts, sampling),) = asked(policy, cfg)
    assert (len(prompts), sampling.temperature, sampling.top_p, sampling.max_tokens) == (3, 0.3, 0.8, 16)


def test_an_unchanged_policy_gains_exactly_nothing(policy, tiny) -> None:
    """Sampling in between, as training does, changes nothing."""
    cfg = tiny()
    engine, task = TransformersEngine(policy, batch_size=8), tasks.load(cfg.task)
    size = range(cfg.eval.questions), cfg.eval.samples
    before = evaluate(engine, policy, task, cfg, *size)
    engine.generate([policy.chat.prompt_ids(task.messages(task.train[0]))], 2, Sampling(4, seed=9))
    after = evaluate(engine, policy, task, cfg, *size)
    pd.testing.assert_frame_equal(before, after)
    assert metrics(before) == metrics(after)
    other = evaluate(engine, policy, task, replace(cfg, seed=1), *size)
    assert other["id"].tolist() == before["id"].tolist()
    assert other["completion"].tolist() != before["completion"].tolist()


class Scripted(Recording):
    """An engine that answers `texts_P_G` in the tokens of a policy. The answers at the indices in `cut` are cut off."""

    def __init__(self, policy: Policy, texts_P_G: list[list[str]], cut: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__()

        def answer(text: str, p: int, g: int) -> Completion:
            ids = policy.tokenizer(text)["input_ids"]
            return Completion(ids, [-1.0] * len(ids), "length" if (p, g) in cut else "stop")

        self.answers = [[answer(text, p, g) for g, text in enumerate(group)] for p, group in enumerate(texts_P_G)]

    def generate(self, *args: Any) -> Rollout:
        return replace(super().generate(*args), completions_P_G=self.answers)


def test_every_sample_is_graded_against_its_own_question(policy, tiny) -> None:
    cfg = tiny(eval__questions=3, eval__samples=2)
    task = tasks.load(cfg.task)
    first, second, third = (f"<answer>{question.answer}</answer>" for question in task.heldout[:3])
    texts = [[first, "no"], [second, f"<think>x</think>{second}"], [f"<think>so</think>{first}x", third]]
    assert len({first, second, third}) == 3
    rows = by_question(evaluate(Scripted(policy, texts), policy, task, cfg, range(3), 2))
    assert rows["accuracy"].tolist() == [0.5, 1.0, 0.5]
    assert rows["format"].tolist() == [0.0, 0.5, 0.0]
    assert rows["sample"].tolist() == [group[0] for group in texts]
    assert rows["answer"].tolist() == [question.answer for question in task.heldout[:3]]
    assert rows["tokens"].tolist() == [sum(len(policy.tokenizer(t)["input_ids"]) for t in g) / 2 for g in texts]


def test_thinking_that_the_prompt_opens_is_graded_with_the_completion(policy, tiny) -> None:
    """Prompts of DeepSeek-R1's distilled models open the thinking. An answer inside the thinking does not count."""
    opening = copy.deepcopy(policy.tokenizer)
    opening.chat_template += "<think>\n"
    learner, task = replace(policy, tokenizer=opening), tasks.load(tiny().task)
    said = "{0}</think><answer>{0}</answer>", "is it <answer>{0}</answer>"
    engine = Scripted(learner, [[text.format(one.answer) for text in said] for one in task.heldout[:2]])
    rows = ask_questions(engine, learner, task, task.heldout[:2], 2, Sampling(9, seed=0))
    assert rows["format"].tolist() == rows["accuracy"].tolist() == [1.0, 0.0] * 2


def test_completions_that_were_cut_are_graded_and_counted(policy, tiny) -> None:
    """A right answer before the cut is right. The number of cut ones stands beside the accuracy."""
    cfg = tiny(eval__questions=2, eval__samples=2)
    task = tasks.load(cfg.task)
    first, second = (f"<answer>{question.answer}</answer>" for question in task.heldout[:2])
    engine = Scripted(policy, [[first, first], ["<think>", second]], cut=[(0, 1), (1, 0), (1, 1)])
    found = evaluate(engine, policy, task, cfg, range(2), 2)
    assert by_question(found)["truncated"].tolist() == [0.5, 1.0]
    assert metrics(found)["eval/truncated_fraction"] == 0.75
    assert metrics(found)["eval/accuracy"] == 0.75


def test_a_row_has_every_score_of_the_task(policy, tiny) -> None:
    task = tasks.load(tiny().task)
    engine = Scripted(policy, [["<answer>\\undefined{</answer>", "<answer>1</answer>"]])
    rows = ask_questions(engine, policy, task, task.heldout[:1], 2, Sampling(9, seed=0))
    assert rows["unparsed"].tolist() == [1, 0]


def test_an_engine_without_entropy_leaves_that_metric_out(policy, tiny) -> None:
    """`Recording` gives no entropy, and completions of one token."""
    cfg = tiny()
    rows = evaluate(Recording(), policy, tasks.load(cfg.task), cfg, range(2), 1)
    assert "eval/entropy_nats" not in metrics(rows)
    known = rows.assign(entropy_nats=[0.25, 0.75], tokens=[1, 3])
    assert metrics(known) == metrics(rows.assign(tokens=[1, 3])) | {"eval/entropy_nats": 0.25}
    assert math.isnan(metrics(rows.assign(entropy_nats=[0.25, math.nan]))["eval/entropy_nats"]), (
        "not the mean of the known ones"
    )
