"""Adaptive quantization noise (AQN, paper Sec. 3.3): the schedule of sigma, and the noise added to RMSNorm weights.

Departures from the released code, where AQN is a no-op (its isinstance test never matches an engine's norms):

1. Noise is independent of the weight format: BF16 + AQN is an arm.
2. It is added to a clean fp32 copy at every step, so that it never accumulates.
3. It is drawn from (seed, step, layer) on the CPU, so that every rank, engine and resumed run draws the same.
4. Noisy norms are float32 in trainer and engines, whatever dtype the model computes in. bfloat16 cannot hold a small
   sigma: between 1 and 2 its steps are 0.0078.
5. The noise in the engine is measured (`noise/std_observed`, `noise/kl_nats`), not assumed.

The paper's text resamples "each forward", its code once per rollout; here once per step (rollout).
"""

from qerl_lab.aqn.noise import CLEAN, Noise, observed_std
from qerl_lab.aqn.schedule import level, stage

__all__ = ["CLEAN", "Noise", "level", "observed_std", "stage"]
