"""The noise of a step: three numbers and a flag from which any process draws it, and what it is added to."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """The noise of one step, so that any process can draw it.

    Attributes:
        sigma: standard deviation; with `relative` in units of the root mean square of each norm's own weights, so that
            the noise of every norm is the same share of it: E|noise|^2 = sigma^2 |clean|^2, as the random directions
            of filter normalization (arXiv 1712.09913, Sec. 4), a layer at a time.
    """

    sigma: float
    seed: int
    step: int
    relative: bool = False

    def onto_norms(self, clean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return clean + sigma * Z of every norm, Z ~ N(0, 1) drawn for (seed, step, layer); new tensors in float32.

        With `relative` it is clean + sigma * rms(clean) * Z.

        Args:
            clean: weights in float32 by the full name of their layer, e.g. `model.layers.0.input_layernorm`, on any
                one device; not changed.
        """
        if self.sigma == 0 or not clean:
            return {name: weight.clone() for name, weight in clean.items()}
        # All norms at once but for the draws: copies of a few thousand numbers to a GPU, one by one, take longer.
        drawn = torch.cat([self._draw(name, weight.shape) for name, weight in clean.items()])
        flat = torch.cat([weight.flatten() for weight in clean.values()])
        noise = (self.sigma * drawn).to(flat.device)
        if self.relative:
            noise = noise * size_of_each(clean)
        parts = (flat + noise).split([weight.numel() for weight in clean.values()])
        return {name: part.view_as(clean[name]) for name, part in zip(clean, parts, strict=True)}

    def _draw(self, layer: str, shape: torch.Size) -> Tensor:
        """Draw Z, flat, on the CPU: the same everywhere."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # torch takes 63 bits
        return torch.randn(shape, generator=generator).flatten()


CLEAN = Noise(sigma=0.0, seed=0, step=0)


def size_of_each(clean: Mapping[str, Tensor]) -> Tensor:
    """For every entry of all norms, flat: the root mean square of its norm, in float32.

    Summed in float64, so that another device's order of summing does not show in float32.
    """
    sizes = torch.stack([weight.double().square().mean().sqrt() for weight in clean.values()]).float()
    counts = torch.tensor([weight.numel() for weight in clean.values()], device=sizes.device)
    return sizes.repeat_interleave(counts)


def observed_std(norms: dict[str, Tensor], clean: dict[str, Tensor], relative: bool = False) -> float:
    """Standard deviation of (weights held - clean weights) over all entries of the norms, both by name of the layer.

    With `relative` each difference is first divided by its norm's root mean square, as `Noise.sigma` is meant: what
    comes out equals sigma either way. A norm that is all zeros has no such noise, and counts as it is.
    """
    gaps = torch.cat([(norms[name].to(weight) - weight).flatten() for name, weight in clean.items()])
    if relative:
        sizes = size_of_each(clean)
        gaps = gaps / torch.where(sizes > 0, sizes, 1.0)
    return gaps.std().item()
