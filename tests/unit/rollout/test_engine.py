"""Incomplete rollouts are refused."""

import math
from dataclasses import replace

import pytest

from failing_engines import retold
from qerl_lab.rollout.engine import Completion, EngineFailed, Rollout, Sampling, refuse_incomplete

WHOLE = Rollout(
    prompt_ids_P=[[1], [2, 3]],
    completions_P_G=[
        [Completion([4, 5], [-1.0, -2.0], "stop"), Completion([6], [-3.0], "length")],
        [Completion([7], [-4.0], "length"), Completion([8, 9], [-5.0, -6.0], "stop")],
    ],
    seconds=1.0,
)
ALL, NUCLEUS = Sampling(8, seed=0), Sampling(8, seed=0, top_p=0.9)


def test_a_single_nan_makes_has_nan_true() -> None:
    assert not WHOLE.has_nan
    assert retold(WHOLE, lambda one: [*one.logprobs[:-1], math.nan if 9 in one.ids else -1.0]).has_nan
    assert not retold(WHOLE, lambda one: []).has_nan


def test_missing_groups_and_completions_are_refused_with_their_numbers() -> None:
    refuse_incomplete(WHOLE, 2, 2, ALL)
    for prompts, group_size in ((2, 3), (3, 2)):
        said = f"the engine gave 4 completions for 2 prompts; asked: {group_size} for each of {prompts}"
        with pytest.raises(EngineFailed, match=f"^{said}$"):
            refuse_incomplete(WHOLE, prompts, group_size, ALL)
    first, second = WHOLE.completions_P_G
    groups = [[*first, second[1]], second[:1]]  # also four completions, but three in one group
    with pytest.raises(EngineFailed, match="gave 4 completions for 2 prompts; asked: 2 for each of 2"):
        refuse_incomplete(replace(WHOLE, completions_P_G=groups), 2, 2, ALL)


@pytest.mark.parametrize(
    ("ids", "logprobs", "sampling"),
    [([4, 5], [-1.0], ALL), ([4], [-1.0, -2.0], ALL), ([], [], NUCLEUS), ([4, 5], [-1.0], NUCLEUS)],
)
def test_a_completion_without_a_log_prob_for_each_token_is_refused(
    ids: list[int], logprobs: list[float], sampling: Sampling
) -> None:
    first, second = WHOLE.completions_P_G
    wrong = replace(WHOLE, completions_P_G=[[Completion(ids, logprobs, "stop"), first[1]], second])
    said = f"the engine gave {len(logprobs)} log-probs for a completion of {len(ids)} tokens"
    with pytest.raises(EngineFailed, match=f"^{said}$"):
        refuse_incomplete(wrong, 2, 2, sampling)


def test_an_engine_may_return_no_log_probs_only_with_top_p() -> None:
    without = retold(WHOLE, lambda one: [])
    refuse_incomplete(without, 2, 2, NUCLEUS)
    with pytest.raises(EngineFailed, match="0 log-probs for a completion of 2 tokens"):
        refuse_incomplete(without, 2, 2, ALL)
