"""Incomplete rollouts are refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from qerl_lab.rollout.engine import EngineFailed, Rollout, Sampling, refuse_incomplete

WHOLE = Rollout(
    prompt_ids_P=[[1], [2, 3]],
    completion_ids_P_G=[[[4, 5], [6]], [[7], [8, 9]]],
    logprobs_P_G=[[[-1.0, -2.0], [-3.0]], [[-4.0], [-5.0, -6.0]]],
    finish_reasons_P_G=[["stop", "length"], ["length", "stop"]],
    entropy=None,
    seconds=1.0,
)
ALL, NUCLEUS = Sampling(8, seed=0), Sampling(8, seed=0, top_p=0.9)
PARTS = {"completion_ids_P_G": "completions", "logprobs_P_G": "log-probs", "finish_reasons_P_G": "finish reasons"}


def test_a_whole_rollout_is_taken_where_it_is_what_was_asked() -> None:
    refuse_incomplete(WHOLE, 2, 2, ALL)
    with pytest.raises(EngineFailed, match=r"^the engine gave 4 completions for 2 prompts; asked: 3 for each of 2$"):
        refuse_incomplete(WHOLE, 2, 3, ALL)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("change", "count", "prompts"),
    [
        (lambda groups: groups[:1], 2, 1),
        (lambda groups: [*groups, groups[0]], 6, 3),
        (lambda groups: [groups[0], groups[1][1:]], 3, 2),
        (lambda groups: [[*groups[0], groups[0][0]], groups[1][1:]], 4, 2),
    ],
)
def test_groups_and_completions_that_lack_or_are_too_many_are_named(
    part: str, change: Callable[[list], list], count: int, prompts: int
) -> None:
    said = f"the engine gave {count} {PARTS[part]} for {prompts} prompts; asked: 2 for each of 2"
    with pytest.raises(EngineFailed, match=f"^{said}$"):
        refuse_incomplete(replace(WHOLE, **{part: change(getattr(WHOLE, part))}), 2, 2, ALL)


@pytest.mark.parametrize(
    ("ids", "logprobs"), [([4, 5], [-1.0]), ([4], [-1.0, -2.0]), ([4, 5], []), ([], [-1.0]), ([], [])]
)
def test_a_completion_has_tokens_and_a_log_prob_for_each(ids: list[int], logprobs: list[float]) -> None:
    wrong = replace(
        WHOLE,
        completion_ids_P_G=[[ids, [6]], WHOLE.completion_ids_P_G[1]],
        logprobs_P_G=[[logprobs, [-3.0]], WHOLE.logprobs_P_G[1]],
    )
    said = f"the engine gave {len(logprobs)} log-probs for a completion of {len(ids)} tokens"
    with pytest.raises(EngineFailed, match=f"^{said}$"):
        refuse_incomplete(wrong, 2, 2, ALL)


def test_of_a_nucleus_an_engine_need_not_know_the_log_probs_before_the_cut() -> None:
    untold = replace(WHOLE, logprobs_P_G=[[[], []], [[], []]])
    refuse_incomplete(untold, 2, 2, NUCLEUS)
    with pytest.raises(EngineFailed, match="0 log-probs for a completion of 2 tokens"):
        refuse_incomplete(untold, 2, 2, ALL)
    with pytest.raises(EngineFailed, match="1 log-probs for a completion of 2 tokens"):
        refuse_incomplete(replace(WHOLE, logprobs_P_G=[[[-1.0], []], [[], []]]), 2, 2, NUCLEUS)
