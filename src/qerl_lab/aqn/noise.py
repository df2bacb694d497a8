"""The noise of one step, drawn identically in every process, and its addition to the norms."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """The Gaussian noise on the norms' weights in one step, stored as numbers from which any process can draw it.

    Attributes:
        sigma: standard deviation; 0 means no noise.
        relative: whether sigma is in units of the root mean square of each norm's weights. Then E|noise|^2 =
            sigma^2 |clean|^2 for every norm, as in filter normalization (arXiv 1712.09913, Sec. 4), but per layer.
    """

    sigma: float
    seed: int
    step: int
    relative: bool = False

    def onto_norms(self, clean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the norms with noise: clean + sigma * Z as new float32 tensors, with Z ~ N(0, 1).

        Z is drawn from (seed, step, layer). With `relative` sigma is multiplied by the root mean square of each norm's
        weights. `clean` has the float32 norm weights by full layer name, all on one device.
        """
        if self.sigma == 0 or not clean:
            return {name: weight.clone() for name, weight in clean.items()}
        # Add to all norms at once, because copying each norm's draw to a GPU by itself would take longer.
        drawn = torch.cat([self._draw(name, weight.shape) for name, weight in clean.items()])
        flat = torch.cat([weight.flatten() for weight in clean.values()])
        noise = (self.sigma * drawn).to(flat.device)
        if self.relative:
            noise = noise * rms_per_entry(clean)
        parts = (flat + noise).split([weight.numel() for weight in clean.values()])
        return {name: part.view_as(clean[name]) for name, part in zip(clean, parts, strict=True)}

    def _draw(self, layer: str, shape: torch.Size) -> Tensor:
        """Draw, on the CPU, a vector of standard normal numbers: one per entry of the norm `layer` of this `shape`."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # torch takes 63 bits
        return torch.randn(shape, generator=generator).flatten()


CLEAN = Noise(sigma=0.0, seed=0, step=0)


def rms_per_entry(clean: Mapping[str, Tensor]) -> Tensor:
    """Return the root mean square of each norm's weights, repeated for each entry of the norm.

    The result is one float32 vector, with the norms concatenated in the order of `clean`. Sums in float64, so that the
    float32 result does not depend on the order in which a device sums.
    """
    rms = torch.stack([weight.double().square().mean().sqrt() for weight in clean.values()]).float()
    counts = torch.tensor([weight.numel() for weight in clean.values()], device=rms.device)
    return rms.repeat_interleave(counts)


def observed_std(norms: dict[str, Tensor], clean: dict[str, Tensor], relative: bool = False) -> float:
    """Measure sigma in norms with noise: the standard deviation of (norms - clean) over all entries; 0 without norms.

    With `relative` the differences of each norm are first divided by the root mean square of its clean weights, unless
    that is zero. `norms` and `clean` have weights by full layer name; `norms` must have every layer of `clean`.
    """
    if not clean:
        return 0.0
    gaps = torch.cat([(norms[name].to(weight) - weight).flatten() for name, weight in clean.items()])
    if relative:
        rms = rms_per_entry(clean)
        gaps = gaps / torch.where(rms > 0, rms, 1.0)
    return gaps.std().item()
