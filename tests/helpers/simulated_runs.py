"""Simulated records with known truth that vary by seed and question, for tests of the report.

python tests/helpers/simulated_runs.py 4000    # error rates of verdicts, over 4000 repetitions each
"""

import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from qerl_lab.report.claims import Claim, of_paper
from qerl_lab.report.runs import FINISHED, Run
from qerl_lab.report.verdicts import Row, Verdict, judge

BY_NAME = {claim.name: claim for claim in of_paper()}
RATES = ("0.001", "0.002", "0.003")  # learning rates of a claim with best_of
SETTINGS = {"optim.learning_rate": "0.001", "eval.samples": "2", "lora.rank": "32", "task.answer_reward": "1.0"}


def record(settings: Mapping[str, str], seed: int, entropy: float, accuracy_Q: np.ndarray | None = None) -> Run:
    """Return a finished run with this policy entropy in its first steps and this held-out accuracy after training."""
    own = SETTINGS | dict(settings)
    name = f"{own.get('format.name', 'run')}-{len(own)}-{seed}-{own['optim.learning_rate']}-{own['lora.rank']}"
    after = pd.Series(np.zeros(4) if accuracy_Q is None else accuracy_Q).rename(index=lambda n: f"q{n}")
    accuracy = {"before": after * 0, "after": after, "gain": after}
    summary = {"entropy_first": entropy}
    return Run(name, name, seed, own, frozenset(), FINISHED, 0.0, "c0ffee0", summary=summary, accuracy=accuracy)


def arms(claim: Claim, effects: Mapping[str, float], seeds: int, sd: float, draw: np.random.Generator) -> list[Run]:
    """Return runs of every contrast's arms, for `best_of` at each of `RATES`, which are equally good.

    Arms share a random part of each seed, which pairing removes. `effects` are by arm name, 0 by default; `sd` is the
    standard deviation of the part that is not shared.
    """
    settings = {c.treated: c.treated_settings for c in claim.contrasts}
    settings |= {c.control: c.control_settings for c in claim.contrasts}
    shared, rates = draw.normal(0, 0.05, seeds), RATES if claim.best_of else RATES[:1]
    return [
        record(
            {**own, "optim.learning_rate": rate}, seed, 0.3 + shared[seed] + effects.get(name, 0.0) + draw.normal(0, sd)
        )
        for name, own in settings.items() for seed in range(seeds) for rate in rates
    ]  # fmt: skip


def held_out_arms(claim: Claim, effect: float, seeds: int, draw: np.random.Generator) -> list[Run]:
    """Return runs of a contrast's arms with held-out answers: 256 questions, two samples each.

    Each question has its own probability, shifted by the arm (standard deviation of the effect over questions: 0.1) and
    by the seed (0.01).
    """
    (contrast,) = claim.contrasts
    base_Q, effect_Q = draw.uniform(0.2, 0.7, 256), effect + draw.normal(0, 0.1, 256)
    made = []
    for own, moved_Q in ((contrast.treated_settings, effect_Q), (contrast.control_settings, 0 * effect_Q)):
        for seed in range(seeds):
            chance_Q = np.clip(base_Q + moved_Q + draw.normal(0, 0.01), 0, 1)
            made.append(record(own, seed, 0.3, draw.binomial(2, chance_Q) / 2))
    return made


def verdicts(claim: Claim, records: list[Run]) -> list[Row]:
    return judge(records, records, [claim])


SCALAR = replace(BY_NAME["initial_entropy"], guardrail=None)
BEST = replace(SCALAR, contrasts=SCALAR.contrasts[:1], best_of="optim.learning_rate")
EQUAL = replace(BY_NAME["rank_insensitivity"], measure="entropy_first", smallest=0.02)
GRADED = replace(BY_NAME["final_accuracy"], guardrail=None, smallest=0.05)
QUIET, NOISY = 0.005, 0.02  # standard deviations of a seed; the smallest effect is 0.02


def shown(kind: str, effect: float, repeats: int, sd: float = NOISY) -> list[set[str]]:
    """Return the verdicts of the contrasts of each repetition.

    Every treated arm has `effect`. "scalar" and "equal" have three contrasts of five seeds with standard deviation `sd`
    (smallest effect 0.02), "best" one of these, each arm at its best of `RATES`; "graded" has one, with
    `held_out_arms` and five seeds (smallest effect 0.05).
    """
    draw, found = np.random.default_rng(0), []
    claim = {"scalar": SCALAR, "best": BEST, "equal": EQUAL, "graded": GRADED}[kind]
    treated = {contrast.treated: effect for contrast in claim.contrasts}
    for _ in range(repeats):
        made = held_out_arms(claim, effect, 5, draw) if kind == "graded" else arms(claim, treated, 5, sd, draw)
        found.append({str(row.verdict) for row in verdicts(claim, made)})
    return found


CASES = (
    ("scalar", 0, NOISY), ("scalar", 0.02, NOISY), ("scalar", 0, QUIET), ("scalar", 0.02, QUIET),
    ("equal", 0, NOISY), ("equal", 0.02, NOISY), ("equal", 0, QUIET), ("equal", 0.04, QUIET),
    ("graded", 0, 0), ("graded", 0.05, 0), ("graded", 0.08, 0), ("best", 0, NOISY), ("best", 0.02, NOISY),
    ("best", 0, QUIET), ("best", 0.02, QUIET),
)  # fmt: skip

if __name__ == "__main__":
    for kind, effect, sd in CASES:
        found = shown(kind, effect, int(sys.argv[1]), sd)
        shares = {str(name): f"{sum(name in each for each in found) / len(found):.4f}" for name in Verdict}
        print(f"{kind:7} effect {effect:<5} sd {sd:<6} {shares}", flush=True)
