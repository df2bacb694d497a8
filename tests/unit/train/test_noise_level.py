"""Sigma of each step, solved for a KL or adaptive; its metrics, and the probe that measures the KL."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from failing_engines import Runs, StopWhen, retold
from qerl_lab import tasks
from qerl_lab.aqn import CLEAN, Noise, level, observed_std
from qerl_lab.aqn.solver import Solution, adapt_sigma
from qerl_lab.config.schema import AqnConfig, RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Completion, EngineFailed, Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.system.exits import INTERRUPTED, OK
from qerl_lab.train.noise_level import NoiseLevel, build_kl_measure, probe
from qerl_lab.train.ranks import ALONE, Ranks
from qerl_lab.train.step import sampling_settings
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, select
from ranks_as_threads import threads
from repeated import lines_of
from rollouts import distributions, of_tokens

KL = {
    "aqn__schedule": "linear", "aqn__unit": "kl", "aqn__reading": "equation", "aqn__stages": 2, "aqn__kl_start": 0.02,
    "aqn__kl_end": 0.004, "aqn__sigma_start": 0.1, "aqn__solver__prompts": 6, "aqn__solver__draws": 2,
}  # fmt: skip
ADAPTIVE = {
    "aqn__schedule": "adaptive", "aqn__unit": "kl", "aqn__kl_start": 0.02, "aqn__sigma_start": 0.05,
    "aqn__adaptive__factor": 1.5,
}  # fmt: skip
SETTINGS = {
    "steps": 4, "checkpoint__every": 1, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 24,
    "optim__learning_rate": 0.02, "eval__questions": 0, "seed": 3,
}  # fmt: skip


def metrics_of(runs: Runs) -> list[dict[str, float]]:
    """Return the metrics of each step, without those that vary between equal runs."""
    return [metrics for _, metrics in lines_of(runs.directory.path)]


def of(runs: Runs, name: str) -> list[float]:
    return [metrics[f"noise/{name}"] for metrics in metrics_of(runs)]


def adapter(runs: Runs) -> bytes:
    return (runs.directory.path / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(new_runs) -> dict[str, Runs]:
    """A finished run with a solved sigma, and one with an adaptive sigma."""
    found = {}
    for name, changes in (("kl", KL), ("adaptive", ADAPTIVE)):
        found[name] = new_runs(**changes)
        assert found[name].run() == OK
    return found


def test_a_stage_keeps_the_sigma_that_was_solved_for_its_kl(finished) -> None:
    runs = finished["kl"]
    assert of(runs, "kl_target") == pytest.approx([0.02, 0.02, 0.004, 0.004])
    first, again, third, last = of(runs, "sigma")
    assert first == again > third == last > 0
    assert of(runs, "kl_solved") == pytest.approx(of(runs, "kl_target"), rel=0.05)
    assert all(1 <= probes <= 12 for probes in of(runs, "probes"))
    assert of(runs, "std_observed") == pytest.approx(of(runs, "sigma"), rel=0.1)
    measured = of(runs, "kl_nats")  # differs by its texts alone, and six are few
    assert 0.1 < sum(measured[:2]) / 0.04 < 10
    assert 0.1 < sum(measured[2:]) / 0.008 < 10


def test_the_controller_follows_what_was_measured(finished) -> None:
    runs = finished["adaptive"]
    sigmas, measured = of(runs, "sigma"), of(runs, "kl_nats")
    assert sigmas[0] == 0.05
    for now, kl, then in zip(sigmas, measured, sigmas[1:], strict=False):
        assert then == adapt_sigma(runs.cfg.aqn, now, kl)
    assert len(set(sigmas)) > 2
    assert of(runs, "kl_target") == [0.02] * 4
    assert of(runs, "std_observed") == pytest.approx(sigmas, rel=0.1)
    assert "noise/kl_solved" not in metrics_of(runs)[0]


def test_the_probes_take_no_question_from_the_run(finished, new_runs, build_policy) -> None:
    """The probes use seeds of their own and sample without noise. The usual run here has relative noise."""
    usual = new_runs(aqn__schedule="linear", aqn__reading="equation", aqn__relative=True, aqn__sigma_start=0.1, steps=1)
    assert usual.run() == OK
    assert of(usual, "sigma") == [0.1]
    clean = build_policy(usual.cfg).clean_norms
    noisy = Noise(0.1, usual.cfg.seed, 1, relative=True).onto_norms(clean)
    relative, absolute = (observed_std(noisy, clean, relative=kind) for kind in (True, False))
    assert of(usual, "std_observed") == [pytest.approx(relative, rel=1e-6)]
    assert relative != pytest.approx(absolute, rel=1e-5)
    solved = finished["kl"].plan
    (prompts, how) = solved.asked[0]
    assert (len(prompts), how.max_tokens) == (6, 24)
    assert solved.sigmas[0] == 0
    assert solved.asked[1] == usual.plan.asked[0]
    assert prompts[:2] == usual.plan.asked[0][0]
    seeds = [how.seed for _, how in solved.asked]
    assert len(set(seeds)) == len(seeds) == 6  # four steps, two stages


def test_noise_in_the_trainer_is_the_noise_of_the_rollout_in_every_update(new_runs) -> None:
    both = {"aqn__scope": "rollout_and_train", "algorithm__updates_per_rollout": 2, "optim__learning_rate": 0.0}
    runs = new_runs(**(ADAPTIVE | {"aqn__sigma_start": 0.2}), **both)
    assert runs.run() == OK
    assert all(kl > 1e-4 for kl in of(runs, "kl_nats")), "noise that acts"
    assert len(set(of(runs, "sigma"))) > 1
    assert all(metrics["sampler/logprob_gap_max"] < 1e-4 for metrics in metrics_of(runs))


def test_a_run_that_is_stopped_after_every_step_is_the_uninterrupted_one(finished, new_runs) -> None:
    """test_kill_9_at_the_worst_moments has a run whose sigma is solved."""
    runs = new_runs(**ADAPTIVE)
    for _ in range(3):  # once a step has begun: before it, nothing is to be stopped
        assert runs.run(stop=StopWhen(holds=lambda: bool(runs.plan.asked))) == INTERRUPTED
    assert runs.run() == OK
    assert metrics_of(runs) == metrics_of(finished["adaptive"])
    assert adapter(runs) == adapter(finished["adaptive"])


def test_an_engine_that_fails_while_sigma_is_found_changes_nothing(finished, new_runs) -> None:
    runs = new_runs(**KL)
    with pytest.raises(EngineFailed, match="2 of 4 steps are saved"):
        runs.run("die@4")  # the texts of the second stage
    assert runs.run() == OK
    assert metrics_of(runs) == metrics_of(finished["kl"])
    assert adapter(runs) == adapter(finished["kl"])


@pytest.mark.parametrize("relative", [False, True])
def test_the_solved_sigma_gives_the_target_kl_over_the_noises_of_its_stage(tiny, build_policy, relative: bool) -> None:
    small = {"steps": 6, "optim__micro_batch_size": 4, "rollout__temperature": 0.7, "aqn__solver__draws": 3}
    cfg = tiny(**(SETTINGS | KL | small), aqn__relative=relative)
    policy = build_policy(cfg)
    cursor = Cursor(select(cfg, policy, tasks.load(cfg.task)), 3)
    engine, found = TransformersEngine(policy, 8), NoiseLevel(cfg)
    result = found.solve(4, build_kl_measure(cfg, 4, cursor, policy, engine, ALONE))
    assert cursor.position == 3
    how = replace(sampling_settings(cfg, 4, -1, 0), max_tokens=24)
    prompts = [policy.chat.prompt_ids(cursor.data.task.messages(question)) for question in cursor.take(6)]
    out = engine.generate(prompts, 1, how)
    clean, nats, count = distributions(policy, out, temperature=0.7), 0.0, 0
    for step, share in ((4, slice(2)), (5, slice(2, 4)), (6, slice(4, 6))):
        norms = Noise(result.sigma, cfg.seed, step, relative).onto_norms(policy.clean_norms)
        noisy = torch.cat(distributions(policy, out, norms, 0.7)[share])
        nats += (noisy.exp() * (noisy - torch.cat(clean[share]))).sum().item()
        count += len(noisy)
    assert nats / count == pytest.approx(result.kl, rel=1e-3)
    assert result.kl == pytest.approx(0.004, rel=0.05)
    assert found.noise(6) == Noise(result.sigma, cfg.seed, 6, relative)
    assert not found.needs_solving(6)


def test_two_ranks_come_to_the_same_sigma_over_the_texts_of_both(tiny, build_policy) -> None:
    cfg = tiny(**(SETTINGS | KL | {"gpus": 2, "aqn__solver__prompts": 5}))
    asked = [None, None]
    policies = [build_policy(cfg), build_policy(cfg)]  # threads cannot share one, whose norms are swapped

    class Keeps(TransformersEngine):
        def generate(self, prompts: list[list[int]], group_size: int, how: Sampling):
            asked[policies.index(self.policy)] = (prompts, how.seed)
            # Its draws come from the process's generator, which the threads would share.
            with lock:
                return super().generate(prompts, group_size, how)

    lock = threading.Lock()

    def solve(ranks: Ranks) -> tuple[Solution, float]:
        policy = policies[ranks.rank]
        cursor = Cursor(select(cfg, policy, tasks.load(cfg.task)))
        measure = build_kl_measure(cfg, 1, cursor, policy, Keeps(policy, 8), ranks)
        return NoiseLevel(cfg).solve(1, measure), measure([Noise(0.1, 0, 1)])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(solve, threads(2))
    assert first == second
    assert first[0].kl == pytest.approx(0.02, rel=0.05)
    assert [len(prompts) for prompts, _ in asked] == [3, 2]
    assert asked[0][1] != asked[1][1]
    assert not {tuple(ids) for ids in asked[0][0]} & {tuple(ids) for ids in asked[1][0]}


def test_ranks_with_one_text_each_measure_different_noises(tiny, build_policy) -> None:
    cfg = tiny(**(SETTINGS | KL | {"gpus": 2, "aqn__solver__prompts": 2}))
    policies, lock = [build_policy(cfg), build_policy(cfg)], threading.Lock()

    class Alone(TransformersEngine):
        def generate(self, prompts: list[list[int]], group_size: int, how: Sampling):
            with lock:
                return super().generate(prompts, group_size, how)

    def kl_of_pairs(ranks: Ranks) -> list[float]:
        policy = policies[ranks.rank]
        cursor = Cursor(select(cfg, policy, tasks.load(cfg.task)))
        measure, noisy = build_kl_measure(cfg, 1, cursor, policy, Alone(policy, 8), ranks), Noise(0.1, 0, 1)
        return [measure(noises) for noises in ([CLEAN, CLEAN], [CLEAN, noisy], [noisy, CLEAN], [noisy, noisy])]

    with ThreadPoolExecutor(2) as pool:
        (none, of_second, of_first, both), _ = pool.map(kl_of_pairs, threads(2))
    assert none == 0
    assert of_first > 0
    assert of_second > 0
    assert of_first + of_second == pytest.approx(both)


def test_fewer_texts_than_ranks_leave_a_rank_without(tiny, build_policy) -> None:
    """It still takes part in every probe."""
    cfg = tiny(**(SETTINGS | KL | {"aqn__solver__prompts": 1}))
    policy = build_policy(cfg)
    cursor = Cursor(select(cfg, policy, tasks.load(cfg.task)))

    class Second(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [4 if isinstance(value, int) else None if value is None else 0.5, value]

    measure = build_kl_measure(cfg, 1, cursor, policy, TransformersEngine(policy, 8), Second(1, 2))
    assert measure([Noise(0.1, 0, 1)]) == 0.5 / 4


@pytest.mark.parametrize(("kl", "is_said"), [(0.0209, False), (0.0212, True), (0.0, True), (math.nan, True)])
def test_a_kl_that_no_sigma_has_is_said(tiny, kl: float, is_said: bool) -> None:
    found = NoiseLevel(tiny(**(SETTINGS | KL)))
    found.state = {"stage": 0, "kl": kl, "sigma": 0.1, "probes": 12}
    message = found.warning_if_missed(1)
    assert message == "" or f"a KL of 0.02 nats: it is {kl:.2g} at sigma 0.1, after 12 tries" in message
    assert bool(message) == is_said


def test_a_run_at_a_bound_says_so_and_goes_on(new_runs, capsys) -> None:
    runs = new_runs(**(KL | {"aqn__sigma_max": 0.11, "aqn__kl_end": 0.02}), steps=1)
    assert runs.run() == OK
    assert "warning, step 1: no sigma was found with a KL of 0.02 nats" in capsys.readouterr().err
    assert of(runs, "sigma") == [pytest.approx(0.11)]
    assert of(runs, "kl_solved")[0] < 0.02


def test_a_clean_stage_is_not_solved(tiny) -> None:
    cfg = tiny(**(SETTINGS | KL | {"aqn__reading": "released"}))
    found = NoiseLevel(cfg)
    assert [level(cfg.aqn, step, 4) for step in range(1, 5)] == [0, 0, 0.02, 0.02]
    assert [found.needs_solving(step) for step in range(1, 5)] == [False, False, True, True]
    assert found.noise(2).sigma == 0
    assert found.metrics(2) == {"noise/sigma": 0, "noise/kl_target": 0}


@pytest.mark.parametrize(("steps", "draws", "drawn"), [(12, 2, [1, 4]), (4, 8, [1, 2])])
def test_sigma_is_solved_on_noises_of_steps_spread_over_its_stage(tiny, steps: int, draws: int, drawn: list) -> None:
    cfg = tiny(**(SETTINGS | KL | {"aqn__solver__draws": draws, "steps": steps}))
    found, asked = NoiseLevel(cfg), list[list[int]]()

    def measure(noises: list[Noise]) -> float:
        asked.append([noise.step for noise in noises])
        return 5 * noises[0].sigma ** 2

    found.solve(1, measure)
    assert asked == [drawn] * len(asked)


def test_the_second_stage_begins_where_the_first_one_led(tiny) -> None:
    """The KL here is 5 sigma^2, so the first guess in the second stage is exact."""
    found, tried = NoiseLevel(tiny(**(SETTINGS | KL))), list[float]()

    def measure(noises: list[Noise]) -> float:
        tried.append(noises[0].sigma)
        assert [noise.step for noise in noises] == ([1, 2] if len(tried) < 3 else [3, 4])
        return 5 * noises[0].sigma ** 2

    assert found.solve(1, measure).probes == 2
    assert found.solve(3, measure).probes == 1
    assert tried == pytest.approx([0.1, (0.02 / 5) ** 0.5, (0.004 / 5) ** 0.5])


# The probe: KL of the noise, and what else parts the sampler from the policy with its norms

NOISE = Noise(0.3, seed=0, step=1)
PROMPTS = [[5], [3, 4, 5, 6, 7, 8], [9, 8, 7]]
COMPLETIONS = [[[7, 9, 11], [5]], [[1, 3, 4, 5], [8, 8]], [[6], [2, 3]]]
ROLLOUT = Rollout(
    PROMPTS, [[Completion(row, [-1.0 - token / 8 for token in row], "stop") for row in group] for group in COMPLETIONS],
    seconds=1.0,
)  # fmt: skip


def held(policy: Policy, noise: Noise) -> dict[str, Tensor]:
    return noise.onto_norms(policy.clean_norms)


def kl(policy: Policy, noisy: dict[str, Tensor], every: int = 1) -> float:
    """Return the KL at temperature 0.8 over every `every`-th completion, summed over the vocabulary in float64."""
    p, q = (torch.cat(distributions(policy, ROLLOUT, norms, 0.8)[::every]) for norms in (noisy, None))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def measured(policy: Policy, norms: dict[str, Tensor], completions: int, temperature: float = 0.8) -> float:
    return probe(policy, norms, ROLLOUT, completions, temperature)[0].mean().item()


def test_it_is_zero_without_noise_and_the_vocabulary_sum_with_it(policy: Policy) -> None:
    assert measured(policy, held(policy, CLEAN), 4) == 0
    noisy = held(policy, NOISE)
    expected = kl(policy, noisy)
    assert expected > 0.01
    assert measured(policy, noisy, 100) == measured(policy, noisy, 6) == pytest.approx(expected, rel=1e-3)
    assert measured(policy, noisy, 6, temperature=1.0) != pytest.approx(expected, rel=1e-2)


def test_the_completions_measured_are_spread_over_the_prompts(policy: Policy) -> None:
    noisy = held(policy, NOISE)
    assert measured(policy, noisy, 3) == pytest.approx(kl(policy, noisy, every=2), rel=1e-3)


def test_norms_of_an_engine_in_another_dtype_are_measured_as_they_are(policy: Policy) -> None:
    rounded = {name: weight.bfloat16() for name, weight in held(policy, NOISE).items()}
    exact = {name: weight.float() for name, weight in rounded.items()}
    as_held, in_full = (probe(policy, norms, ROLLOUT, 6, 0.8) for norms in (rounded, exact))
    assert all(map(torch.equal, as_held, in_full))


def test_the_kernel_gap_is_what_the_sampler_says_beyond_its_own_weights(policy: Policy) -> None:
    noisy = held(policy, NOISE)
    logps = of_tokens(distributions(policy, ROLLOUT, noisy, 0.8), ROLLOUT).tolist()
    sound = retold(ROLLOUT, lambda one: [logps.pop(0) for _ in one.ids])
    assert probe(policy, noisy, sound, 6, temperature=0.8)[1].max() < 1e-5
    off = retold(sound, lambda one: [logprob + 0.1 * n * (-1) ** n for n, logprob in enumerate(one.logprobs)])
    expected = [0.1 * n for group in COMPLETIONS for row in group for n in range(len(row))]
    assert probe(policy, noisy, off, 6, temperature=0.8)[1].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_results_of_a_probe_are_pooled_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gets the mean over all tokens, and the largest gap of any rank.

    Together the ranks probe as many completions as one rank would; the third rank probes none.
    """
    own, probed = [(Tensor([0.1]), Tensor([1.0])), (Tensor([0.3, 0.5]), Tensor([0.0, 8.0]))], dict[int, int]()

    def probe_own(policy: Policy, norms: object, rank: int, completions: int, temperature: float) -> Any:
        probed[rank] = completions
        return own[rank]

    monkeypatch.setattr("qerl_lab.train.trainer.probe", probe_own)
    monkeypatch.setattr("qerl_lab.train.trainer.aqn.observed_std", lambda *_: 0.0)

    def found(ranks: Ranks) -> dict[str, float]:
        engine, level = Mock(norms=lambda: {"norm": torch.ones(1)}), Mock(metrics=lambda step: {})
        cfg = RunConfig(aqn=AqnConfig(probe_prompts=2))
        trainer = Mock(ranks=ranks, measured={}, engine=engine, level=level, cfg=cfg)
        trainer.policy.clean_norms = {"norm": torch.zeros(1)}
        LabTrainer._measure_noise(trainer, ranks.rank)
        return trainer.measured

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(found, threads(3))
    assert first == second == third
    assert probed == {0: 1, 1: 1}
    assert (first["sampler/kernel_gap_mean"], first["sampler/kernel_gap_max"]) == (3.0, 8.0)
    assert first["noise/kl_nats"] == pytest.approx(0.3)
