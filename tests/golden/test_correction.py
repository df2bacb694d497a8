"""The correction's weights and the mismatch, against their formulas in plain Python, token by token."""

import math
import random

import pytest
import torch
from torch import Tensor

from qerl_lab.algorithms import correction
from qerl_lab.config.schema import CORRECTIONS

LENGTHS, WIDTH, CLIP_MAX = [1, 7, 12, 4], 12, 1.5
Rows = list[list[float]]  # by completion, the log-probs of its tokens
WITHOUT = ("off", "in_ratio")  # weights of 1; with in_ratio the loss itself has the ratio to the sampler


def drawn(seed: int) -> tuple[Rows, Rows]:
    """Draw log-probs by trainer and sampler, up to a nat apart, of completions of several lengths."""
    rng = random.Random(seed)
    trainer = [[-rng.expovariate(1.0) for _ in range(length)] for length in LENGTHS]
    return trainer, [[logprob + rng.uniform(-1, 1) for logprob in row] for row in trainer]


def padded(rows: Rows, fill: float) -> Tensor:
    return torch.tensor([row + [fill] * (WIDTH - len(row)) for row in rows], dtype=torch.float64)


def tensors(trainer: Rows, sampler: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of the functions. The padding has numbers that would change a result."""
    mask = padded([[1.0] * length for length in LENGTHS], 0.0).long()
    return padded(trainer, -50.0), padded(sampler, 3.0), mask


def reference(name: str, trainer: Rows, sampler: Rows, clip_max: float = CLIP_MAX) -> Rows:
    """Return the weight of each token."""
    weights = []
    for of_trainer, of_sampler in zip(trainer, sampler, strict=True):
        ratios = [math.exp(p - q) for p, q in zip(of_trainer, of_sampler, strict=True)]
        if name.startswith("sequence"):
            ratios = [math.prod(ratios)] * len(ratios)
        if name.endswith("truncate"):
            ratios = [min(ratio, clip_max) for ratio in ratios]
        elif name.endswith("mask"):
            ratios = [0.0 if ratio > clip_max else ratio for ratio in ratios]
        weights.append([1.0] * len(ratios) if name in WITHOUT else ratios)
    return weights


def flat(rows: Rows) -> list[float]:
    return [value for row in rows for value in row]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_the_ratios_truncated_or_masked(name: str) -> None:
    trainer, sampler = drawn(1)
    found = correction.importance_weights(name, CLIP_MAX, *tensors(trainer, sampler))
    by_token = found.value.expand(len(LENGTHS), WIDTH).tolist()
    tokens = [row[:length] for row, length in zip(by_token, LENGTHS, strict=True)]
    assert flat(tokens) == pytest.approx(flat(reference(name, trainer, sampler)), rel=1e-12)
    assert found.value.shape[1] == (1 if name in WITHOUT or name.startswith("sequence") else WIDTH)
    assert found.is_cut.any() == (name not in WITHOUT), "no ratio is cut, so this case tests no cut"


def test_a_token_without_a_sampler_logprob_has_ratio_1() -> None:
    """TRL has this rule. The other tokens give the ratio of the sequence."""
    trainer, sampler = drawn(2)
    sampler[1][3] = math.nan
    for name in ("token_truncate", "token_mask"):
        assert correction.importance_weights(name, CLIP_MAX, *tensors(trainer, sampler)).value[1, 3] == 1
    found = correction.importance_weights("sequence_truncate", 1e9, *tensors(trainer, sampler)).value[1, 0]
    del trainer[1][3], sampler[1][3]
    assert found.item() == pytest.approx(math.exp(sum(trainer[1]) - sum(sampler[1])), rel=1e-12)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_mismatch_is_pooled_over_the_tokens_of_several_micro_batches(name: str) -> None:
    batches = [drawn(seed) for seed in (3, 4, 5)]
    rows = []
    for trainer, sampler in batches:
        of_tokens = tensors(trainer, sampler)
        rows.append(correction.mismatch_sums(correction.importance_weights(name, CLIP_MAX, *of_tokens), *of_tokens))
    assert all(row.dtype == torch.float64 for row in rows)
    p, q = (flat([row for batch in batches for row in batch[side]]) for side in (0, 1))
    log_ratios = [a - b for a, b in zip(p, q, strict=True)]
    ratios, count = [math.exp(d) for d in log_ratios], len(p)
    weights = [row for batch in batches for row in reference(name, *batch)]
    uncut = [row for batch in batches for row in reference(name, *batch, clip_max=math.inf)]
    counted = [row[0] for row in weights] if name.startswith("sequence") else flat(weights)
    is_cut = [a != b for a, b in zip(flat(weights), flat(uncut), strict=True)]
    expected = {
        "sampler/logprob_gap_mean": sum(map(abs, log_ratios)) / count,
        "sampler/logprob_gap_max": max(map(abs, log_ratios)),
        "sampler/importance_ratio_mean": sum(counted) / len(counted),
        "sampler/kl_k1_nats": -sum(log_ratios) / count,
        "sampler/kl_k3_nats": sum(r - 1 - math.log(r) for r in ratios) / count,
        "sampler/effective_sample_size": sum(ratios) ** 2 / (count * sum(r * r for r in ratios)),
        "sampler/importance_clipped_fraction": sum(is_cut) / count,
    }
    assert correction.mismatch_metrics([row.tolist() for row in rows]) == pytest.approx(expected, rel=1e-12)


def test_k3_keeps_its_digits_at_tiny_differences() -> None:
    """For a small d = log r, r - 1 - log r is d^2 / 2. The plain formula would round it to 0."""
    trainer = torch.full((1, 2), -1.0, dtype=torch.float64)
    of_tokens = trainer, trainer - 1e-9, torch.ones(1, 2)
    found = correction.mismatch_metrics(
        [correction.mismatch_sums(correction.importance_weights("off", 3.0, *of_tokens), *of_tokens).tolist()]
    )
    assert found["sampler/kl_k3_nats"] == pytest.approx(0.5e-18, rel=1e-3, abs=0)


def test_a_nan_logprob_of_the_trainer_makes_the_metrics_nan() -> None:
    trainer, sampler = drawn(6)
    trainer[0][0] = math.nan
    of_tokens = tensors(trainer, sampler)
    found = correction.mismatch_sums(correction.importance_weights("token_truncate", CLIP_MAX, *of_tokens), *of_tokens)
    measured = correction.mismatch_metrics([found.tolist()])
    assert math.isnan(measured["sampler/kl_k1_nats"])
    assert math.isnan(measured["sampler/logprob_gap_mean"])
