"""Engines that fail according to a plan, in place of a run's own.

`FAILING_ENGINES=PLAN` activates them in every Python process that has tests/helpers/failing_site on its path. A plan is
a comma-separated list of failures `KIND@CALL` or `KIND@CALL@RANK`. CALL counts from 1 in each process: calls of `sync`
for the kind "sync", of `close` for "close", of `generate` for other kinds.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from processes import run_module
from qerl_lab import rollout
from qerl_lab.aqn import Noise, observed_std
from qerl_lab.cli.launch import GRACE_SECONDS
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.engine import Completion, Engine, EngineFailed, OnDone, Rollout, Sampling, do_nothing
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.train.stop import Stop
from run_directories import write_config

VARIABLE = "FAILING_ENGINES"


class Plan:
    """Planned failures and call counts by name. `asked` and `sigmas` record arguments and noise of each `generate`."""

    def __init__(self, words: str) -> None:
        rank = os.environ.get("RANK", "0")
        failures = [word.split("@") for word in words.split(",") if word]
        self.failures = [(kind, int(call)) for kind, call, *of_rank in failures if of_rank in ([], [rank])]
        self.calls, self.asked = Counter[str](), list[tuple[list[list[int]], Sampling]]()
        self.sigmas: list[float] = []

    def now(self, what: str) -> set[str]:
        """Count a call; return the kinds of failure planned for it."""
        self.calls[what] += 1
        return {kind for kind, call in self.failures if call == self.calls[what]}

    def build(self, cfg: RunConfig, policy: Policy) -> Engine:
        """Replacement for `rollout.build`."""
        self.now("build")
        return FailingEngine(policy, cfg.rollout.batch_size, self)


class FailingEngine(TransformersEngine):
    """The transformers engine with planned failures."""

    def __init__(self, policy: Policy, batch_size: int, plan: Plan) -> None:
        self.plan = Plan("")  # do not count the sync while building
        super().__init__(policy, batch_size)
        self.plan = plan

    def sync(self, noise: Noise) -> None:
        if "sync" in self.plan.now("sync"):
            raise EngineFailed("the adapter did not arrive")
        super().sync(noise)

    def close(self) -> None:
        super().close()
        if "close" in self.plan.now("close"):
            raise RuntimeError("the door is stuck")

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        self.plan.asked.append((prompt_ids_P, sampling))
        self.plan.sigmas.append(observed_std(self.norms(), self.policy.clean_norms))
        kinds = self.plan.now("generate")
        if "die" in kinds:
            on_done(1)
            raise EngineFailed("the worker died\nof something")
        if "timeout" in kinds:
            time.sleep(0.2)
            raise EngineFailed("no answer in 0.2 s")
        out = super().generate(prompt_ids_P, group_size, sampling, on_done)
        return next((TAKES_AWAY[kind](out) for kind in TAKES_AWAY.keys() & kinds), out)


def retold(out: Rollout, logprobs: Callable[[Completion], list[float]]) -> Rollout:
    """Return the rollout with other log-probs of each completion."""
    groups = [[one._replace(logprobs=logprobs(one)) for one in group] for group in out.completions_P_G]
    return replace(out, completions_P_G=groups)


TAKES_AWAY: dict[str, Callable[[Rollout], Rollout]] = {
    "group": lambda out: replace(out, completions_P_G=out.completions_P_G[1:]),
    "logprobs": lambda out: retold(out, lambda one: [] if one is out.completions[0] else one.logprobs),
    "nan": lambda out: retold(out, lambda one: [math.nan] * len(one.ids)),
}


def install(words: str) -> Plan:
    """Make the runs of this process build engines that fail according to the plan."""
    plan = Plan(words)
    rollout.build = plan.build
    return plan


@dataclass
class StopWhen(Stop):
    """A request to stop that is there while a condition holds."""

    holds: Callable[[], bool] = lambda: False

    @property
    def requested(self) -> bool:
        return self.holds()


@dataclass
class Runs:
    """Runs of one configuration in its directory, in this process. Each call continues where the last one ended."""

    cfg: RunConfig
    plan: Plan = field(default_factory=lambda: Plan(""))

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.cfg.run_dir))

    def run(self, words: str = "", stop: Stop | None = None) -> int:
        """Run with an engine that fails according to the plan `words`."""
        from qerl_lab.train import run as run_module

        write_config(self.directory.path, self.cfg)
        usual, self.plan = rollout.build, Plan(words)
        rollout.build = self.plan.build
        try:
            return run_module.run(self.cfg, self.directory, stop or Stop())
        finally:
            rollout.build = usual


def command(run: RunDirectory, plan: str) -> tuple[int, str, str]:
    """Continue a run in a new process with failing engines; return exit code, standard output and error."""
    here = Path(__file__).parent
    paths = [str(here / "failing_site"), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: plan}
    ran = run_module("qerl_lab", f"resume={run.path}", cwd=run.path.parent, **variables)
    if ran.returncode:
        waited = time.time() - (run.path / "FAILED").stat().st_mtime
        assert waited < GRACE_SECONDS / 2, "a rank waited for another until it was killed"
    return ran.returncode, ran.stdout, ran.stderr
