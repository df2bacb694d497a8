"""Tables of what weight formats and noise do to a block, a Linear and the next-token distribution, for notebooks/.

`entropy.sample_texts` samples the texts from the dense policy. Every other policy is evaluated on the same tokens. Any
`Format` works, including one that is not in `FORMATS`.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from qerl_lab.aqn import Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate import kl
from qerl_lab.evaluate.entropy import Texts, compare_to_dense, interval, mean_change
from qerl_lab.formats.format import Format, PackedAs
from qerl_lab.model import loading, policy, weight_error
from qerl_lab.model.dense import base_tensors
from qerl_lab.model.weight_files import WeightFiles, local_folder

_RAMP = 4096  # weights from -largest to largest that are rounded to list a block's values


def values_of_a_block(weight_format: Format, largest: float = 1.0) -> list[float]:
    """Return, sorted, every value that a format can store in a block with the largest magnitude `largest`."""
    assert weight_format.BLOCK is not None, f"{weight_format.NAME} has no blocks"
    others = (weight_format.BLOCK or 256) - 1
    ramp = torch.linspace(-largest, largest, others * math.ceil(_RAMP / others)).view(-1, others)
    blocks = torch.cat([torch.full((len(ramp), 1), largest), ramp], 1)
    return rounded(weight_format, blocks).unique().tolist()


def largest_of_blocks(weight_format: Format, weight: Tensor) -> Tensor:
    """Return stored / exact of the largest magnitude in each block of `weight[N, K]`: a ratio per block."""
    assert weight_format.BLOCK is not None, f"{weight_format.NAME} has no blocks"
    block = weight_format.BLOCK or weight.shape[1]
    exact, stored = weight.float().reshape(-1, block), rounded(weight_format, weight).reshape(-1, block)
    at = exact.abs().argmax(1, keepdim=True)
    return (stored.gather(1, at) / exact.gather(1, at)).flatten()


def rounded(weight_format: Format, weight: Tensor) -> Tensor:
    """Quantize and dequantize `weight[N, K]`; return float32 [N, K]."""
    return weight_format.dequantize(weight_format.quantize(weight), (weight.shape[0], weight.shape[1]), torch.float32)


def errors(weight_formats: Iterable[Format], weight: Tensor, inputs: Tensor) -> pd.DataFrame:
    """Tabulate errors of y = x W^T by format: W is `weight[N, K]`, x is `inputs[T, K]`; W', y' are after quantization.

    Columns: bits per weight; weight error |W' - W| / |W|; output error |y' - y| / |y|.
    """
    weight, rows = weight.float(), []
    exact = inputs @ weight.t()
    for weight_format in weight_formats:
        nearest = rounded(weight_format, weight)
        squared = weight_error.sum_of_squares(nearest - weight) / weight_error.sum_of_squares(weight)
        rows.append({
            "format": weight_format.NAME, "bits": weight_format.bits_per_weight,
            "weight error": math.sqrt(squared),
            "output error": ((inputs @ nearest.t() - exact).norm() / exact.norm()).item(),
        })  # fmt: skip
    return pd.DataFrame(rows).set_index("format")


def linear_of(texts: Texts, layer: str) -> tuple[Tensor, Tensor]:
    """Return weight [N, K] and inputs [T, K] of the dense policy's Linear with the full name `layer`, float32.

    T are all tokens of the texts, prompts included.
    """
    inputs: list[Tensor] = []
    linear = texts.model.get_submodule(layer)
    with linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1).float())):
        kl.hidden_states(texts.model, texts.pairs, batch_size=1)  # without padding
    return base_tensors(texts.policy)[f"{layer}.weight"].float(), torch.cat(inputs)


def packed_model(model: str, weight_format: Format, device: torch.device) -> PreTrainedModel:
    """Load the dense model `model` (hub id, directory, GGUF file or `pocket`), all but lm_head in `weight_format`.

    Raises ValueError if the model cannot be loaded or packed.
    """
    folder, cfg = local_folder(model, None, key="model"), RunConfig()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    packed_as = PackedAs(weight_format, tuple(cfg.format.ignore))
    empty = loading.empty_model(config, policy.compute_dtype(cfg, device))
    return loading.fill(empty, WeightFiles(folder), packed_as, is_packed=False, device=device)


def effects_of_formats(texts: Texts, model: str, weight_formats: Iterable[Format]) -> pd.DataFrame:
    """Tabulate bits per weight, KL to the dense policy and entropy, a row per format.

    `model` is the dense model that sampled `texts`.
    """
    rows = []
    for weight_format in weight_formats:
        packed = packed_model(model, weight_format, texts.states.device)
        about = {"format": weight_format.NAME, "bits": weight_format.bits_per_weight}
        rows.append(about | _effect(texts, *compare_to_dense(packed, texts)))
    return pd.DataFrame(rows).set_index("format")


def effects_of_noise(texts: Texts, sigmas: Sequence[float], draws: int) -> pd.DataFrame:
    """Tabulate KL to the clean dense policy and entropy of the dense policy with AQN noise: `draws` rows per sigma."""
    return pd.DataFrame(
        {"sigma": sigma, "draw": draw} | _effect(texts, *compare_noisy_to_clean(texts, Noise(sigma, seed=0, step=draw)))
        for sigma in sigmas
        for draw in range(1, draws + 1)
    )


def effects_at_kl(texts: Texts, noise: pd.DataFrame, kls: pd.Series) -> pd.DataFrame:
    """Tabulate sigma, KL and entropy change of noise that causes each KL in `kls`, in a row per KL.

    `noise` is a table of `effects_of_noise`. The sigma is interpolated between the mean KLs in this table, then
    measured with as many noise draws as the table has. Raises ValueError if a KL is outside the table's range.
    """
    means, rows = noise.groupby("sigma")["kl"].mean(), {}
    for name, target in kls.items():
        if not means.min() <= target <= means.max():
            raise ValueError(f"{name}: a KL of {target:.2g} is outside those measured, {means.min():.2g} to "
                             f"{means.max():.2g}")  # fmt: skip
        sigma = float(np.exp(np.interp(np.log(target), np.log(means), np.log(means.index))))
        effect = effects_of_noise(texts, [sigma], draws=int(noise["draw"].max()))
        rows[name] = effect[["sigma", "kl", "entropy_change"]].mean()
    return pd.DataFrame(rows).T.rename_axis(kls.index.name)


def compare_noisy_to_clean(texts: Texts, noise: Noise) -> tuple[Tensor, Tensor]:
    """Compare the dense policy with noise to the one without, at each of the T completion tokens.

    Returns the entropy with noise and KL(noisy || clean), each float64 [T] on the CPU.
    """
    dense = texts.policy
    with dense.as_sampler(noise.onto_norms(dense.clean_norms)):
        return compare_to_dense(texts.model, texts)


def _effect(texts: Texts, entropies_T: Tensor, kl_T: Tensor) -> dict[str, float]:
    """Return a row with the means over tokens, in nats: KL to the dense policy, entropy and its change.

    Columns that end in _low and _high are 95% intervals; `p` is the p-value of the change.
    """
    changed = mean_change(entropies_T - texts.entropies_T, texts)
    nats, low, high = interval(kl_T, texts.lengths)
    return {
        "kl": nats, "kl_low": low, "kl_high": high, "entropy": entropies_T.mean().item(),
        "entropy_change": changed["mean"], "change_low": changed["low"], "change_high": changed["high"],
        "p": changed["p"],
    }  # fmt: skip
