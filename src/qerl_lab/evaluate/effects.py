"""What a weight format, and what noise, do to the distribution over the next token, as tables: for notebooks/.

`entropy.sample` draws the texts by the dense policy. Here every other policy reads the same tokens. Any value of
`Format` can be measured, also one that is not in `FORMATS`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from qerl_lab.aqn import Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate.entropy import Texts, change, compared, interval
from qerl_lab.formats.format import Format, PackedAs
from qerl_lab.model import loading, policy
from qerl_lab.model.files import WeightFiles, local_folder

BATCH = 32  # texts in one forward pass


def packed_model(model: str, weight_format: Format, device: torch.device) -> PreTrainedModel:
    """The dense model of a hub id, directory, GGUF file or `pocket`, packed while it is read; lm_head stays dense.

    Raises ValueError, naming the layer, for a weight that the format cannot hold.
    """
    folder, cfg = local_folder(model, None, key="model"), RunConfig()
    return loading.load_model(
        AutoConfig.from_pretrained(folder, trust_remote_code=False), WeightFiles(folder),
        PackedAs(weight_format, tuple(cfg.format.ignore)), is_packed=False, device=device,
        dtype=policy.compute_dtype(cfg, device), dense_cache=device.type == "cpu",
    )  # fmt: skip


def of_formats(texts: Texts, model: str, weight_formats: Iterable[Format]) -> pd.DataFrame:
    """A row a format of `model`, which sampled the texts: bits a weight, and `_row` in nats per token."""
    rows = []
    for weight_format in weight_formats:
        packed = packed_model(model, weight_format, texts.states.device)
        about = {"format": weight_format.NAME, "bits": weight_format.bits_per_weight}
        rows.append(about | _row(texts, *compared(packed, texts, BATCH)))
    return pd.DataFrame(rows).set_index("format")


def of_noise(texts: Texts, sigmas: Sequence[float], draws: int) -> pd.DataFrame:
    """A row a sigma of AQN and draw of its noise, on the dense policy: `_row` in nats per token."""
    rows = []
    for sigma in sigmas:
        for draw in range(1, draws + 1):
            about = {"sigma": sigma, "draw": draw}
            rows.append(about | _row(texts, *with_noise(texts, Noise(sigma, seed=0, step=draw))))
    return pd.DataFrame(rows)


def of_as_much_noise(texts: Texts, noise: pd.DataFrame, kls: pd.Series) -> pd.DataFrame:
    """A row an entry of `kls`: the sigma with that KL, on the line through the means of `noise`, and its effect.

    Args:
        noise: of `of_noise`; its draws are measured again at the new sigma. Raises ValueError where a KL is outside,
            and where that of noise does not rise with sigma: then many sigmas have it, or none.
    """
    means, rows = noise.groupby("sigma")["kl"].mean(), {}
    if not means.is_monotonic_increasing:
        raise ValueError(f"the mean KL does not rise with sigma: {means.round(6).to_dict()}. Measure more draws.")
    for name, target in kls.items():
        if not means.min() <= target <= means.max():
            raise ValueError(f"{name}: a KL of {target:.2g} is outside those measured, {means.min():.2g} to "
                             f"{means.max():.2g}")  # fmt: skip
        sigma = float(np.exp(np.interp(np.log(target), np.log(means), np.log(means.index))))
        effect = of_noise(texts, [sigma], draws=int(noise["draw"].max()))
        rows[name] = effect[["sigma", "kl", "entropy_change"]].mean()
    return pd.DataFrame(rows).T.rename_axis(kls.index.name)


def with_noise(texts: Texts, noise: Noise) -> tuple[Tensor, Tensor]:
    """Entropy of the dense policy with this noise at each token, and KL(noisy || clean): float64 [T] each."""
    dense = texts.policy
    with dense.as_sampler(noise.onto_norms(dense.clean_norms)):
        return compared(texts.model, texts, BATCH)


def _row(texts: Texts, entropies_T: Tensor, kl_T: Tensor) -> dict[str, float]:
    """KL to the dense policy; entropy; its change, with p-value. Intervals of 95% over texts end in _low and _high."""
    changed = change(entropies_T - texts.entropies_T, texts)
    nats, low, high = interval(kl_T, texts.lengths)
    return {
        "kl": nats, "kl_low": low, "kl_high": high, "entropy": entropies_T.mean().item(),
        "entropy_change": changed["mean"], "change_low": changed["low"], "change_high": changed["high"],
        "p": changed["p"],
    }  # fmt: skip
