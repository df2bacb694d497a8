"""Effects of formats and noise, by block and over the vocabulary, compared with direct computations."""

import pandas as pd
import pytest
import torch

from packed_layers import BF16, MXFP4, NF4, NVFP4
from qerl_lab.aqn import Noise
from qerl_lab.evaluate import entropy, format_effects
from qerl_lab.evaluate.evaluate_options import EntropyOptions
from qerl_lab.report import plots

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn.q_proj"


def test_values_of_a_block_are_all_values_that_the_format_can_store() -> None:
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert format_effects.values_of_a_block(NVFP4, 6.0) == pytest.approx([*(-v for v in reversed(e2m1[1:])), *e2m1])
    assert len(format_effects.values_of_a_block(NF4)) == 16
    assert max(format_effects.values_of_a_block(MXFP4, 0.7)) == 0.75  # a power of two, and the code for 6


def test_largest_of_blocks_is_the_stored_share_of_the_largest_weight_of_a_block() -> None:
    weight = torch.zeros(1, 64)  # two blocks
    weight[0, 3], weight[0, 52], weight[0, 53] = -5.0, 4.0, 1.0
    assert format_effects.largest_of_blocks(MXFP4, weight).tolist() == pytest.approx(
        [0.8, 1.0]
    )  # 5 lies between 4 and 6


def test_blocks_beyond_the_axis_are_drawn_in_the_outer_bars() -> None:
    figure = plots.plot_block_maxima({"nvfp4": [0.8, 1.0, 1.2], "nf4": [-2.8, 1.0, 1.0, 3.9]})
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert list(map(sum, heights)) == [3, 4]
    assert (heights[1][0], heights[1][-1]) == (1, 1)
    assert [axis.get_xlabel() for axis in figure.axes] == ["stored / exact", "stored / exact, 50.0% beyond"]


def test_errors_of_a_linear_layer_are_measured_on_its_own_inputs(texts: entropy.Texts) -> None:
    weight, inputs = format_effects.linear_of(texts, LAYER)
    layer = texts.model.get_submodule(LAYER)
    assert torch.equal(weight, layer.base_layer.weight.float())
    assert inputs.shape == (sum(len(given) + len(compared) for given, compared in texts.pairs), weight.shape[1])
    found = format_effects.errors([NVFP4, BF16], weight, inputs)
    nearest = format_effects.rounded(NVFP4, weight)
    assert found.loc["nvfp4", "weight error"] == pytest.approx(((nearest - weight).norm() / weight.norm()).item(), 1e-4)
    moved = (inputs @ (nearest - weight).t()).norm() / (inputs @ weight.t()).norm()
    assert found.loc["nvfp4", "output error"] == pytest.approx(moved.item(), rel=1e-3)
    assert found.loc["bf16", "weight error"] == 0


def test_effects_of_a_format_equal_those_of_the_entropy_command(texts: entropy.Texts) -> None:
    found = format_effects.effects_of_formats(texts, "pocket", [MXFP4, BF16]).loc["mxfp4"]
    cfg = entropy.run_config(EntropyOptions(), "mxfp4")
    entropies_T, kl_T = entropy.compare_to_dense(format_effects.policy.load_base(cfg, CPU)[0], texts)
    expected = entropy.entropy_columns(entropies_T, texts)["entropy_change"]
    assert found[["entropy_change", "change_low", "change_high", "p"]].tolist() == list(expected.values())
    assert found["kl"] == kl_T.mean().item() > 1e-4


def test_noise_acts_only_while_it_is_measured(texts: entropy.Texts) -> None:
    before = {name: norm.clone() for name, norm in texts.policy.norms.items()}
    noise = format_effects.effects_of_noise(texts, [0.05, 0.1, 0.2], draws=2)
    assert noise["kl"].groupby(noise["sigma"]).mean().is_monotonic_increasing
    assert noise["kl"].min() > 0
    assert noise["draw"].tolist() == [1, 2] * 3
    assert noise["kl"].is_unique, "each draw is other noise"
    assert all(torch.equal(norm, before[name]) for name, norm in texts.policy.norms.items())
    assert format_effects.compare_noisy_to_clean(texts, Noise(0.0, seed=0, step=1))[1].abs().max() < 1e-9
    target = noise["kl"].groupby(noise["sigma"]).mean()
    as_much = format_effects.effects_at_kl(texts, noise, pd.Series({"x": (target[0.1] * target[0.2]) ** 0.5}))
    assert as_much.loc["x", "sigma"] == pytest.approx((0.1 * 0.2) ** 0.5)  # halfway in logarithms
    again = format_effects.effects_of_noise(texts, [as_much.loc["x", "sigma"]], draws=2)
    assert as_much.loc["x", "kl"] == pytest.approx(again["kl"].mean())
    with pytest.raises(ValueError, match="x: a KL of 1 is outside those measured"):
        format_effects.effects_at_kl(texts, noise, pd.Series({"x": 1.0}))
    figure = plots.plot_noise_and_formats(noise, format_effects.effects_of_formats(texts, "pocket", [NVFP4]))
    assert [line.get_label() for line in figure.axes[0].lines] == ["noise, each draw", "noise, mean", "nvfp4"]
    assert figure.axes[0].lines[1].get_ydata().tolist() == pytest.approx(target.tolist())
