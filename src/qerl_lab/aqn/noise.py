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

    def onto(self, clean: Tensor, layer: str, dtype: torch.dtype) -> Tensor:
        """`onto_norms` of one norm: `clean` is its weight in float32, `layer` its full name."""
        return self.onto_norms({layer: clean}, {layer: torch.empty(0, dtype=dtype)})[layer]

    def onto_norms(self, clean: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """clean + sigma * Z of every norm, Z ~ N(0, 1) drawn for (seed, step, layer); `relative`: sigma * rms(clean).

        Args:
            clean: weights in float32 by the full name of their layer, e.g. `model.layers.0.input_layernorm`, on any
                one device; not changed, and never what is returned.
            like: has the dtype in which they come by the same names, one for all.
        """
        dtypes = {like[name].dtype for name in clean}
        if len(dtypes) != 1:
            raise ValueError(f"norms in {sorted(map(str, dtypes))}; allowed: one dtype for all")
        (dtype,) = dtypes
        if self.sigma == 0:
            return {name: weight.to(dtype, copy=True) for name, weight in clean.items()}
        # All norms at once but for the draws: copies of a few thousand numbers to a GPU, one by one, take longer.
        drawn, dither = zip(*(self._draw(name, weight.shape, dtype) for name, weight in clean.items()), strict=True)
        flat = torch.cat([weight.flatten() for weight in clean.values()])
        noise = (self.sigma * torch.cat(drawn)).to(flat.device)
        if self.relative:
            noise = noise * size_of_each(clean)
        noisy = flat + noise
        rounded = stochastic_round(noisy, dtype, torch.cat(dither).to(flat.device))
        parts = rounded.split([weight.numel() for weight in clean.values()])
        return {name: part.view_as(clean[name]) for name, part in zip(clean, parts, strict=True)}

    def _draw(self, layer: str, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Z and, for bfloat16 only, the dither that decides the rounding; flat, on the CPU: the same everywhere."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # torch takes 63 bits
        drawn = torch.randn(shape, generator=generator).flatten()
        count = 0 if dtype == torch.float32 else drawn.numel()
        return drawn, torch.randint(0, 1 << 16, (count,), generator=generator, dtype=torch.int32)


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


def stochastic_round(values: Tensor, dtype: torch.dtype, dither: Tensor) -> Tensor:
    """`values` (float32) in `dtype`, rounded up or down at random so that the expectation is exact.

    bfloat16 is the upper half of a float32. A uniform 16-bit number of `dither` (int32), added below it, carries into
    the upper half with just the probability that the lower half stands for. float32 needs none.
    """
    if dtype == torch.float32:
        return values
    if dtype != torch.bfloat16:
        raise ValueError(f"stochastic rounding to {dtype} is not supported; allowed: torch.float32, torch.bfloat16")
    bits = (values.contiguous().view(torch.int32) + dither) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)
