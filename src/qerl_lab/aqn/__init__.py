"""Adaptive quantization noise (AQN, paper Sec. 3.3): how strong it is in a step, the noise, and what it is added to.

Departures from the released code, where AQN is a no-op (its isinstance test never matches an engine's norms):

1. Noise is independent of the weight format: BF16 + AQN is an arm.
2. It is added to a clean fp32 copy at every step, so that it never accumulates.
3. It is drawn from (seed, step, layer) on the CPU, so that every rank, engine and resumed run draws the same.
4. It reaches the engine's dtype by stochastic rounding: round-to-nearest bf16 swallows sigma <= 1e-3 where |w| >= 1.
5. What the engine then holds is measured (`noise/std_observed`, `noise/kl_nats`), not assumed.

The paper resamples "each forward" in its text and once per rollout in its code; here once per step (rollout).
"""

from qerl_lab.aqn.noise import CLEAN, Noise, observed_std, stochastic_round
from qerl_lab.aqn.schedule import decay, level, stage

__all__ = ["CLEAN", "Noise", "decay", "level", "observed_std", "stage", "stochastic_round"]
