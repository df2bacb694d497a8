"""The noise: what it is a function of, its size, how it is rounded, and that it never stays."""

import hashlib
import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from qerl_lab.aqn import CLEAN, Noise, observed_std, stochastic_round
from qerl_lab.rollout.transformers import TransformersEngine

LAYER = "model.layers.0.input_layernorm"
DRAWS = """
import hashlib, torch
from qerl_lab.aqn import Noise
torch.manual_seed(99), torch.rand(7)
clean = torch.linspace(0.5, 2, 1000)
for dtype in (torch.float32, torch.bfloat16):
    noisy = Noise(0.01, seed=3, step=17).onto(clean, "model.layers.0.input_layernorm", dtype)
    print(hashlib.sha256(noisy.float().numpy().tobytes()).hexdigest())
"""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(sigma: float = 1.0, seed: int = 0, step: int = 1, layer: str = LAYER, n: int = 200_000) -> Tensor:
    """The noise alone, in float32."""
    return Noise(sigma, seed, step).onto(torch.zeros(n), layer, torch.float32)


def test_the_draw_is_a_function_of_seed_step_and_layer() -> None:
    first = drawn()
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(drawn(), first)
    assert torch.equal(torch.get_rng_state(), state)  # nor does it disturb anybody else's draws


def test_the_draw_is_the_same_in_another_process() -> None:
    out = subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, text=True, check=True).stdout.split()
    clean = torch.linspace(0.5, 2, 1000)
    for dtype, digest in zip((torch.float32, torch.bfloat16), out, strict=True):
        own = Noise(0.01, seed=3, step=17).onto(clean, LAYER, dtype)
        assert hashlib.sha256(own.float().numpy().tobytes()).hexdigest() == digest


def test_layers_steps_and_seeds_draw_independently() -> None:
    draws = [drawn(seed=s, step=t, layer=name) for s, t, name in itertools.product((0, 1), (1, 11), (LAYER, "a.norm"))]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(8)
    assert correlations.abs().max() < 5 / 200_000**0.5


def test_the_noise_is_standard_normal_times_sigma() -> None:
    z = drawn(sigma=0.03) / 0.03
    assert abs(z.mean()) < 0.012  # five standard errors
    assert z.std() == pytest.approx(1, abs=0.008)
    assert (z**4).mean() == pytest.approx(3, abs=0.11)
    assert (z > 1).float().mean() == pytest.approx(0.1587, abs=0.004)


def dither(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1 << 16, (count,), generator=generator(seed), dtype=torch.int32)


@pytest.mark.parametrize("sigma", [1e-4, 5e-4, 1e-3])
def test_stochastic_rounding_keeps_in_the_mean_what_rounding_to_nearest_swallows(sigma: float) -> None:
    """Between 1 and 2 bfloat16 has steps of 2**-7. `kept` is the share of the noise that is there after rounding."""
    clean = 1 + torch.randint(0, 128, (1_000_000,), generator=generator()) / 128
    clean[::2] *= -1
    z = torch.randn(clean.shape, generator=generator(1))

    def kept(rounded: Tensor) -> float:
        return ((rounded.float() - clean) @ z / (z @ z)).item() / sigma

    noisy = clean + sigma * z
    rounded = stochastic_round(noisy, torch.bfloat16, dither(len(noisy), 2))
    assert kept(noisy.bfloat16()) < 0.01
    assert kept(rounded) == pytest.approx(1, abs=0.05)
    assert abs((rounded.float() - noisy).mean()) < 1e-5
    assert (rounded.float() - noisy).abs().max() < 2**-7  # up or down, never further


def test_stochastic_rounding_is_unbiased_for_one_value_of_either_sign_and_across_a_power_of_two() -> None:
    for value in (1.0 + 2**-7 * 0.3, -1.0 - 2**-7 * 0.3, 2 - 2**-7 * 0.1, 3e-5, -3e-5):
        rounded = stochastic_round(torch.full((400_000,), value), torch.bfloat16, dither(400_000)).float()
        assert len(rounded.unique()) == 2
        assert rounded.mean().item() == pytest.approx(value, rel=1e-4)


def test_what_bfloat16_holds_exactly_stays() -> None:
    values = torch.randn(100_000, generator=generator()).bfloat16().float()
    assert torch.equal(stochastic_round(values, torch.bfloat16, dither(len(values))).float(), values)


def test_float32_is_not_rounded_and_other_dtypes_are_refused() -> None:
    values = torch.randn(1000, generator=generator())
    assert torch.equal(stochastic_round(values, torch.float32, dither(0)), values)
    for dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(ValueError, match=rf"{dtype} is not supported; allowed: torch\.float32, torch\.bfloat16"):
            stochastic_round(values, dtype, dither(len(values)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigma", [0.0, 0.02])
def test_the_clean_copy_is_never_changed(sigma: float, dtype: torch.dtype) -> None:
    clean = torch.linspace(-2, 2, 999)
    before = clean.clone()
    noisy = Noise(sigma, 0, 1).onto(clean, LAYER, dtype)
    noisy += 1  # nor is it what the engine gets
    assert noisy.dtype == dtype
    assert torch.equal(clean, before)


def test_a_hundred_syncs_do_not_accumulate(tiny, build_policy) -> None:
    policy = build_policy(tiny())
    before = {name: weight.clone() for name, weight in policy.clean_norms.items()}
    engine = TransformersEngine(policy, batch_size=8)
    stds = []
    for step in range(1, 101):
        engine.sync(Noise(0.02, seed=0, step=step))
        stds.append(observed_std(engine.norms(), policy.clean_norms))
    assert stds == pytest.approx([0.02] * 100, rel=0.1)  # a random walk would be at 0.2
    fresh = TransformersEngine(policy, batch_size=8)
    fresh.sync(Noise(0.02, seed=0, step=100))
    assert all(torch.equal(engine.norms()[name], fresh.norms()[name]) for name in before)
    engine.sync(CLEAN)
    for name, clean in before.items():
        assert torch.equal(engine.norms()[name], clean)
        assert torch.equal(policy.clean_norms[name], clean)
        assert torch.equal(policy.norms[name], clean)


def test_the_observed_std_is_over_all_entries_of_what_is_held() -> None:
    """Against float32 clean weights, whatever the dtype of an engine."""
    clean = {"a.norm": torch.tensor([1.0, 2.0]), "b.norm": torch.tensor([3.0, 4.0, 5.0])}
    held = {"b.norm": torch.tensor([3.5, 4.0, 4.5]), "a.norm": torch.tensor([1.0, 5.0])}
    gaps = torch.tensor([0.0, 3.0, 0.5, 0.0, -0.5])
    assert observed_std(held, clean) == pytest.approx(gaps.std().item())
    assert observed_std({name: weight.bfloat16() for name, weight in held.items()}, clean) == observed_std(held, clean)
    assert observed_std(clean, clean) == 0


def test_relative_noise_is_the_same_share_of_every_norm() -> None:
    """|noise| / |clean| is sigma in every norm, whatever its size; a norm of zeros stays as it is."""
    scales = {"large": 30.0, "small": 0.01, "mixed": torch.linspace(0, 2, 50_000), "zero": 0.0}
    clean = {name: scale * torch.randn(50_000, generator=generator()).sign() for name, scale in scales.items()}
    noise = Noise(0.02, seed=0, step=1, relative=True)
    noisy = noise.onto_norms(clean, clean)
    for name in ("large", "small", "mixed"):
        assert (noisy[name] - clean[name]).norm() / clean[name].norm() == pytest.approx(0.02, rel=0.02)
        size = clean[name].square().mean().sqrt()
        assert torch.allclose((noisy[name] - clean[name]) / size, drawn(0.02, layer=name, n=50_000), atol=1e-6)
    assert torch.equal(noisy["zero"], clean["zero"])


def test_relative_noise_of_one_norm_is_that_of_all_at_once() -> None:
    """A server's worker puts it onto norms one by one, each in bfloat16."""
    clean = {"a.norm": torch.linspace(-1, 4, 1000), "b.norm": torch.linspace(20, 30, 500)}
    noise, like = Noise(0.1, 3, 4, relative=True), {name: torch.empty(0, dtype=torch.bfloat16) for name in clean}
    together = noise.onto_norms(clean, like)
    for name, weight in clean.items():
        assert torch.equal(noise.onto(weight, name, torch.bfloat16), together[name])


def test_the_observed_std_of_relative_noise_is_its_sigma() -> None:
    """It tells apart noise that is relative, noise that is not, and noise on one norm alone."""
    clean = {"a.norm": torch.full((40_000,), 5.0), "b.norm": torch.full((40_000,), 0.2)}

    def seen(noisy: dict[str, Tensor]) -> float:
        return observed_std(noisy, clean, relative=True)

    noisy = Noise(0.03, 0, 1, relative=True).onto_norms(clean, clean)
    assert seen(noisy) == pytest.approx(0.03, rel=0.02)
    assert observed_std(noisy, clean) == pytest.approx(0.03 * (12.5 + 0.02) ** 0.5, rel=0.02)
    assert seen(Noise(0.03, 0, 1).onto_norms(clean, clean)) > 0.1
    assert seen(noisy | {"b.norm": clean["b.norm"]}) == pytest.approx(0.03 / 2**0.5, rel=0.02)
    assert observed_std({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, relative=True) == 0


def test_the_norms_in_the_configuration_get_noise_and_no_others(tiny, build_policy) -> None:
    policy = build_policy(tiny(aqn__norms=["post_attention_layernorm"]))
    assert len(policy.norms) == policy.model.config.num_hidden_layers
    assert all(name.endswith(".post_attention_layernorm") for name in policy.norms)
    everywhere = build_policy(tiny())
    assert len(everywhere.norms) == 2 * policy.model.config.num_hidden_layers
    assert {name.rpartition(".")[2] for name in everywhere.norms} == {"input_layernorm", "post_attention_layernorm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_together_get_what_each_gets_alone(dtype: torch.dtype) -> None:
    """Of any shapes, by their names, not by their order."""
    clean = {"a": torch.linspace(-2, 2, 100), "b": torch.ones(3, 5), "c": torch.tensor(0.5)}
    noise, like = Noise(0.1, seed=2, step=5), {name: torch.empty(0, dtype=dtype) for name in "cab"}
    together = noise.onto_norms(clean, like)
    assert list(together) == list(clean)
    for name, weight in clean.items():
        assert together[name].shape == weight.shape
        assert torch.equal(together[name], noise.onto(weight, name, dtype))


def test_norms_of_two_dtypes_are_refused() -> None:
    clean = {"a": torch.ones(3), "b": torch.ones(3)}
    with pytest.raises(ValueError, match=r"norms in \['torch.bfloat16', 'torch.float32'\]; allowed: one"):
        Noise(0.1, 0, 1).onto_norms(clean, {"a": torch.ones(1), "b": torch.ones(1).bfloat16()})
