"""Sample and grade answers to questions, and run the held-out evaluations of a training run."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from qerl_lab.config.message import with_noun
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, OnDone, Sampling, do_nothing, refuse_incomplete
from qerl_lab.system import terminal
from qerl_lab.tasks import Question, Task
from qerl_lab.tasks.answers.completion import with_answer_start
from qerl_lab.tasks.module_file import Column

METRICS = {  # measured column of an evaluation -> metric
    "accuracy": "accuracy", "format": "format", "tokens": "completion_tokens", "truncated": "truncated_fraction",
}  # fmt: skip


def ask_questions(
    engine: Engine, policy: Policy, task: Task, questions: Sequence[Question], samples: int, sampling: Sampling,
    on_done: OnDone = do_nothing,
) -> pd.DataFrame:  # fmt: skip
    """Sample each question `samples` times with the engine's current weights, and grade the completions.

    Returns a row per completion, the samples of a question consecutively. Columns: id, answer (the reference answer),
    draw (from 0), accuracy, format and the task's other scores, tokens, truncated, completion (the graded text: if the
    prompt opens the answer, its opening tags are included), entropy_nats (of the sampler, summed over the tokens; NaN
    if the engine does not report it).

    Calls `on_done` with the number of newly finished completions. Raises EngineFailed if the engine fails or its result
    is incomplete, and FloatingPointError if the sampler's logits are NaN: its tokens are then drawn at random.
    """
    prompts = [policy.chat.prompt_ids(task.messages(question)) for question in questions]
    out = engine.generate(prompts, samples, sampling, on_done)
    refuse_incomplete(out, len(prompts), samples, sampling)
    if out.has_nan:
        raise FloatingPointError("the sampler's logits are NaN")
    asked = [question for question in questions for _ in range(samples)]
    texts = list[str]()
    for prompt, completions in zip(prompts, out.completions_P_G, strict=True):
        decoded = [policy.decode_completion(completion.ids) for completion in completions]
        texts += with_answer_start(policy.decode_prompt(prompt), decoded)
    with terminal.say_if_slow(f"grading {with_noun(len(texts), 'completion')} of {task.name}"):
        scores = task.grade(texts, asked)
    parts = {part: score for part, score in scores.items() if part not in ("answer", "format")}
    graded: dict[Column, Any] = {
        "id": [question.id for question in asked],
        "answer": [question.answer for question in asked],
        "draw": list(range(samples)) * len(questions),
        "accuracy": scores["answer"],
        "format": scores["format"],
    }
    sampled: dict[Column, Any] = {
        "tokens": [len(completion.ids) for completion in out.completions],
        "truncated": [completion.finish_reason == "length" for completion in out.completions],
        "completion": texts,
        "entropy_nats": np.array([completion.entropy for completion in out.completions], float),
    }
    return pd.DataFrame(graded | parts | sampled)


def evaluate(
    engine: Engine, policy: Policy, task: Task, cfg: RunConfig, part: range, samples: int, on_done: OnDone = do_nothing
) -> pd.DataFrame:
    """Sample and grade `samples` answers to each held-out question at the indices `part`.

    Returns rows as `ask_questions` does. `cfg` is the configuration of the training run. Uses the engine's current
    weights. The sampling seed is a hash of `cfg.seed` alone: all evaluations of a run, and all runs with the same seed,
    share it. With the transformers engine the draws also depend on `part.start`, so on the number of ranks.
    """
    most, seed = cfg.rollout.max_completion_tokens, evaluation_seed(cfg.seed)
    sampling = Sampling(most, seed, cfg.eval.temperature, cfg.eval.top_p, first=part.start)
    return ask_questions(engine, policy, task, task.heldout[part.start : part.stop], samples, sampling, on_done)


def by_question(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the `rows` of `ask_questions` over samples to one row per question, the table in eval.parquet.

    Columns: id, answer; the means accuracy, format, tokens and truncated; sample (the first completion).
    """
    first = rows[rows["draw"] == 0]
    means = {name: rows[name].to_numpy(float).reshape(len(first), -1).mean(1) for name in METRICS}
    columns = {"id": first["id"], "answer": first["answer"], **means, "sample": first["completion"]}
    return pd.DataFrame(columns).reset_index(drop=True)


def metrics(rows: pd.DataFrame, prefix: str = "eval/") -> dict[str, float]:
    """Return the metrics of an evaluation for metrics.jsonl, from the `rows` of `ask_questions`.

    They are means over questions, and the mean entropy over all completion tokens, which is left out if the engine does
    not report it. Names begin with `prefix`.
    """
    questions = by_question(rows)
    means = {f"{prefix}{metric}": float(questions[column].mean()) for column, metric in METRICS.items()}
    if rows["entropy_nats"].isna().all():
        return means
    return means | {f"{prefix}entropy_nats": sum(rows["entropy_nats"]) / int(rows["tokens"].sum())}


def evaluation_seed(*parts: int | str) -> int:
    """Hash `parts` to a 32-bit sampling seed that no training rollout uses.

    `parts` are the run's seed, and for a benchmark also its name and the number of the batch of questions.
    """
    text = "/".join(map(str, ("evaluation", *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
