"""Adaptive quantization noise (AQN, paper Sec. 3.3): the schedule sigma(step), the noise, and what it is added to.

Departures from the released code, where AQN is a no-op (its isinstance test never matches an engine's norms):

1. Noise is independent of the weight format: BF16 + AQN is an arm.
2. It is added to a clean fp32 copy at every step, so that it never accumulates.
3. It is drawn from (seed, step, layer) on the CPU, so that every rank, engine and resumed run draws the same.
4. It reaches the engine's dtype by stochastic rounding: round-to-nearest bf16 swallows sigma <= 1e-3 where |w| >= 1.
5. What the engine then holds is measured (`noise/std_observed`, `noise/kl_nats`), not assumed.

The paper resamples "each forward" in its text and once per rollout in its code; here once per step (rollout).
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_lab.config.schema import AqnConfig


def stage(step: int, total_steps: int, stages: int) -> int:
    """Stage (from 0) of a step (from 1): `stages` equal parts of the run, in order.

    With more stages than steps some stages are skipped, evenly.
    """
    return (step - 1) * stages // total_steps


def sigma(cfg: AqnConfig, step: int, total_steps: int) -> float:
    """Standard deviation of the noise in a step. Pure.

    Args:
        step: 1..total_steps; 0 is the untrained policy, which carries no noise.

    Returns:
        0 where the schedule is off or the stage is clean, else a value in [sigma_end, sigma_start].

    Raises:
        ValueError: step outside 0..total_steps.
    """
    if not 0 <= step <= total_steps:
        raise ValueError(f"step={step} is outside 0..{total_steps}")
    if cfg.schedule == "off" or step == 0:
        return 0.0
    now, last = stage(step, total_steps, cfg.stages), cfg.stages - 1
    if cfg.reading == "equation":  # Eq. 8: k = now + 1 of K noisy stages
        return decay(cfg, now, last)
    if now == 0:
        return 0.0
    # The released code spreads K-1 values over stages 2..K; Algorithm 1 keeps Eq. 8's K-1 in the exponent.
    return decay(cfg, now - 1, last - 1 if cfg.reading == "released" else last)


def decay(cfg: AqnConfig, index: int, last: int) -> float:
    """Value `index` of the values 0..last that run from sigma_start to sigma_end (Eq. 8; Fig. 15 for the others)."""
    share = index / last if last > 0 else 0.0
    start, end = cfg.sigma_start, cfg.sigma_end
    match cfg.schedule:
        case "exponential":
            return start * (end / start) ** share if start > 0 else 0.0
        case "linear":
            return start + (end - start) * share
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
        case "logarithmic":
            return start + (end - start) * (math.log(index + 1) / math.log(last + 1) if last > 0 else 0.0)
    raise ValueError(f"aqn.schedule={cfg.schedule} is not a schedule")


@dataclass(frozen=True)
class Noise:
    """The noise of one step, as three numbers: any process can draw it."""

    sigma: float
    seed: int
    step: int

    def onto(self, clean: Tensor, layer: str, dtype: torch.dtype) -> Tensor:
        """`onto_norms` of one norm: `clean` is its weight in float32, `layer` its full name."""
        return self.onto_norms({layer: clean}, {layer: torch.empty(0, dtype=dtype)})[layer]

    def onto_norms(self, clean: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """clean + sigma * Z of every norm, Z ~ N(0, 1) drawn for (seed, step, layer).

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
        noisy = flat + (self.sigma * torch.cat(drawn)).to(flat.device)
        rounded = stochastic_round(noisy, dtype, torch.cat(dither).to(flat.device))
        parts = rounded.split([weight.numel() for weight in clean.values()])
        return {name: part.view_as(clean[name]) for name, part in zip(clean, parts, strict=True)}

    def _draw(self, layer: str, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Z and, for bfloat16, what decides the rounding (else nothing), flat, on the CPU: the same everywhere."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # torch takes 63 bits
        drawn = torch.randn(shape, generator=generator).flatten()
        count = 0 if dtype == torch.float32 else drawn.numel()
        return drawn, torch.randint(0, 1 << 16, (count,), generator=generator, dtype=torch.int32)


CLEAN = Noise(sigma=0.0, seed=0, step=0)


def observed_std(norms: dict[str, Tensor], clean: dict[str, Tensor]) -> float:
    """Standard deviation of (weights held - clean weights) over all entries of the norms, both by name of the layer."""
    return torch.cat([norms[name].to(weight) - weight for name, weight in clean.items()]).std().item()


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
