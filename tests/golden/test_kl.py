"""KL and entropy in float64 against torch's functions, and the standard error against the textbook."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import kl_div

from qerl_lab.evaluate import kl


def logprobs(seed: int, tokens: int = 50, vocabulary: int = 97) -> Tensor:
    """Draw float64 log-probs, of sharp and of flat distributions."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1.5, tokens, dtype=torch.float64)[:, None]
    return (scale * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)).log_softmax(-1)


def test_kl_of_each_token_equals_kl_div_of_torch() -> None:
    p, q = logprobs(0), logprobs(1)
    expected = kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(kl.per_token(p, q), expected, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(kl.per_token(q, p), expected)  # KL(p || q) and not KL(q || p)


def test_entropy_of_each_token_equals_torch() -> None:
    p = logprobs(2)
    torch.testing.assert_close(kl.entropy_per_token(p), Categorical(logits=p).entropy(), rtol=1e-12, atol=1e-14)


def test_a_token_without_probability_adds_zero_under_p_and_infinity_under_q() -> None:
    half = torch.tensor([[0.5, 0.5, 0.0]]).log()
    third = torch.full((1, 3), 1 / 3).log()
    assert kl.per_token(half, third).item() == pytest.approx(torch.tensor(1.5).log().item())
    assert kl.per_token(half, half).item() == 0
    assert kl.per_token(third, half).item() == float("inf")
    assert kl.entropy_per_token(half).item() == pytest.approx(torch.tensor(2.0).log().item())
    assert half[0, 2] == -float("inf")  # the caller's tensor is as it was


def test_a_nan_makes_its_token_nan() -> None:
    p = torch.tensor([[0.5, 0.5], [torch.nan, 0.5]]).log()
    assert kl.per_token(p, p).isnan().tolist() == [False, True]


def test_float32_log_probs_are_summed_in_float64() -> None:
    p, q = logprobs(3, vocabulary=4096), logprobs(4, vocabulary=4096)
    found = kl.per_token(p.float(), q.float())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, kl.per_token(p, q), rtol=1e-5, atol=1e-6)


def test_the_standard_error_is_the_error_of_a_ratio_over_texts() -> None:
    """The error is the textbook error of a mean for texts of equal length, and 0 for equal values."""
    values = torch.tensor([0.1] * 5 + [0.5] * 10 + [0.5] * 10 + [1.0] * 5)
    mean, error = kl.mean_and_error(values, [10, 10, 10])
    texts = torch.tensor([0.3, 0.5, 0.75], dtype=torch.float64)
    assert mean == pytest.approx(texts.mean().item())
    assert error == pytest.approx((texts.std() / 3**0.5).item(), rel=1e-6)
    assert kl.mean_and_error(torch.full((30,), 0.1), [10, 20])[1] == pytest.approx(0, abs=1e-9)


def test_texts_are_weighted_by_their_number_of_tokens() -> None:
    """Worked out by hand: means 1 and 2, lengths 1 and 3, average 7/4; residuals -3/4 and 3/4."""
    mean, error = kl.mean_and_error(torch.tensor([1.0, 2.0, 2.0, 2.0]), [1, 3])
    assert mean == 1.75
    assert error == pytest.approx(((2 * 0.75**2) * 2 / 1) ** 0.5 / 4)
