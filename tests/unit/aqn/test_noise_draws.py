"""The noise: its draw from seed, step and name, its size, its measurement, and the norms that get it."""

import pytest
import torch
from torch import Tensor

from qerl_lab.aqn import Noise, observed_std

LAYER = "model.layers.0.input_layernorm"


def drawn(sigma: float = 1.0, seed: int = 0, step: int = 1, layer: str = LAYER, n: int = 200_000) -> Tensor:
    """Draw the noise alone."""
    return onto(Noise(sigma, seed, step), torch.zeros(n), layer)


def onto(noise: Noise, clean: Tensor, layer: str = LAYER) -> Tensor:
    """Return one norm with the noise on it."""
    return noise.onto_norms({layer: clean})[layer]


def test_the_draw_is_the_same_in_every_process() -> None:
    """The draw depends on no hash of Python and on no other draw. Runs resumed with other versions get the same."""
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = drawn(sigma=0.01, seed=3, step=17, n=1000)[:3].tolist()
    assert first == pytest.approx([0.018875772, -0.0040088333, -0.0250920597], rel=1e-5)
    assert torch.equal(torch.get_rng_state(), state)  # other draws are not disturbed


def test_the_noise_is_standard_normal_times_sigma() -> None:
    z = drawn(sigma=0.03) / 0.03
    assert abs(z.mean()) < 0.012  # five standard errors
    assert z.std() == pytest.approx(1, abs=0.008)
    assert (z**4).mean() == pytest.approx(3, abs=0.11)
    assert (z > 1).float().mean() == pytest.approx(0.1587, abs=0.004)


@pytest.mark.parametrize("sigma", [1e-4, 1e-3, 1e-2])
def test_a_norm_of_any_size_holds_the_requested_noise(sigma: float) -> None:
    for weight in (0.25, 1.0, 8.0):
        clean = {LAYER: torch.full((50_000,), weight)}
        noisy = Noise(sigma, seed=0, step=1).onto_norms(clean)
        assert noisy[LAYER].dtype == torch.float32
        assert observed_std(noisy, clean) == pytest.approx(sigma, rel=0.02)


def test_the_observed_std_is_over_all_entries_of_all_norms() -> None:
    """Clean weights are float32, and the norms of an engine may have any dtype."""
    clean = {"a.norm": torch.tensor([1.0, 2.0]), "b.norm": torch.tensor([3.0, 4.0, 5.0])}
    held = {"b.norm": torch.tensor([3.5, 4.0, 4.5]), "a.norm": torch.tensor([1.0, 5.0])}
    gaps = torch.tensor([0.0, 3.0, 0.5, 0.0, -0.5])
    assert observed_std(held, clean) == pytest.approx(gaps.std().item())
    assert observed_std({name: weight.bfloat16() for name, weight in held.items()}, clean) == observed_std(held, clean)
    assert observed_std(clean, clean) == 0


def test_relative_noise_is_the_same_share_of_every_norm() -> None:
    """|noise| / |clean| is sigma in every norm, whatever its size; a norm of zeros stays as it is."""
    scales = {"large": 30.0, "small": 0.01, "mixed": torch.linspace(0, 2, 50_000), "zero": 0.0}
    signs = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).sign()
    clean = {name: scale * signs for name, scale in scales.items()}
    noise = Noise(0.02, seed=0, step=1, relative=True)
    noisy = noise.onto_norms(clean)
    for name in ("large", "small", "mixed"):
        assert (noisy[name] - clean[name]).norm() / clean[name].norm() == pytest.approx(0.02, rel=0.02)
        size = clean[name].square().mean().sqrt()
        assert torch.allclose((noisy[name] - clean[name]) / size, drawn(0.02, layer=name, n=50_000), atol=1e-6)
    assert torch.equal(noisy["zero"], clean["zero"])


@pytest.mark.parametrize("relative", [False, True])
def test_a_norm_gets_the_same_noise_alone_and_among_others(relative: bool) -> None:
    """The noise depends on the name. A worker of a pipeline stage of a server adds it to its own norms only."""
    clean = {"a": torch.linspace(-2, 2, 100), "b": torch.ones(3, 5), "c": torch.tensor(0.5)}
    noise = Noise(0.1, seed=2, step=5, relative=relative)
    together = noise.onto_norms(clean)
    assert list(together) == list(clean)
    for name, weight in clean.items():
        assert together[name].shape == weight.shape
        assert torch.equal(together[name], onto(noise, weight, name))
    assert noise.onto_norms({}) == {}


def test_the_observed_std_of_relative_noise_is_its_sigma() -> None:
    """The measure differs between relative noise, absolute noise, and noise on only one norm."""
    clean = {"a.norm": torch.full((40_000,), 5.0), "b.norm": torch.full((40_000,), 0.2)}

    def seen(noisy: dict[str, Tensor]) -> float:
        return observed_std(noisy, clean, relative=True)

    noisy = Noise(0.03, 0, 1, relative=True).onto_norms(clean)
    assert seen(noisy) == pytest.approx(0.03, rel=0.02)
    assert observed_std(noisy, clean) == pytest.approx(0.03 * (12.5 + 0.02) ** 0.5, rel=0.02)
    assert seen(Noise(0.03, 0, 1).onto_norms(clean)) > 0.1
    assert seen(noisy | {"b.norm": clean["b.norm"]}) == pytest.approx(0.03 / 2**0.5, rel=0.02)
    assert observed_std({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, relative=True) == 0


def test_the_norms_in_the_configuration_get_noise_and_no_others(tiny, build_policy) -> None:
    policy = build_policy(tiny(aqn__norms=["post_attention_layernorm"]))
    assert len(policy.norms) == policy.model.config.num_hidden_layers
    assert all(name.endswith(".post_attention_layernorm") for name in policy.norms)
    everywhere = build_policy(tiny())
    assert len(everywhere.norms) == 2 * policy.model.config.num_hidden_layers
    assert {name.rpartition(".")[2] for name in everywhere.norms} == {"input_layernorm", "post_attention_layernorm"}
