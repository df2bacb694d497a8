"""Incomplete rollouts are refused."""

import math
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


def test_a_rollout_with_one_nan_has_nan() -> None:
    assert not WHOLE.has_nan
    assert replace(WHOLE, logprobs_P_G=[*WHOLE.logprobs_P_G[:1], [[-4.0], [-5.0, math.nan]]]).has_nan
    assert not replace(WHOLE, logprobs_P_G=[[[], []], [[], []]]).has_nan


def test_missing_groups_and_completions_are_counted() -> None:
    refuse_incomplete(WHOLE, 2, 2, ALL)
    for prompts, group_size in ((2, 3), (3, 2)):
        said = f"the engine gave 4 completions for 2 prompts; asked: {group_size} for each of {prompts}"
        with pytest.raises(EngineFailed, match=f"^{said}$"):
            refuse_incomplete(WHOLE, prompts, group_size, ALL)
    ids = [[[4, 5], [6], [6]], [[7]]]  # four of two prompts too, but one of them is of the other group
    with pytest.raises(EngineFailed, match="gave 4 completions for 2 prompts; asked: 2 for each of 2"):
        refuse_incomplete(replace(WHOLE, completion_ids_P_G=ids), 2, 2, ALL)


@pytest.mark.parametrize(
    ("ids", "logprobs", "sampling"),
    [([4, 5], [-1.0], ALL), ([4], [-1.0, -2.0], ALL), ([], [], NUCLEUS), ([4, 5], [-1.0], NUCLEUS)],
)
def test_a_completion_has_tokens_and_a_log_prob_for_each(
    ids: list[int], logprobs: list[float], sampling: Sampling
) -> None:
    wrong = replace(
        WHOLE,
        completion_ids_P_G=[[ids, [6]], WHOLE.completion_ids_P_G[1]],
        logprobs_P_G=[[logprobs, [-3.0]], WHOLE.logprobs_P_G[1]],
    )
    said = f"the engine gave {len(logprobs)} log-probs for a completion of {len(ids)} tokens"
    with pytest.raises(EngineFailed, match=f"^{said}$"):
        refuse_incomplete(wrong, 2, 2, sampling)


def test_only_with_top_p_an_engine_may_lack_all_log_probs() -> None:
    without = replace(WHOLE, logprobs_P_G=[[[], []], [[], []]])
    refuse_incomplete(without, 2, 2, NUCLEUS)
    with pytest.raises(EngineFailed, match="0 log-probs for a completion of 2 tokens"):
        refuse_incomplete(without, 2, 2, ALL)
