"""Engines that each break the contract in one way; tests/unit/rollout/test_contract.py must detect them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import OnDone, Rollout, Sampling, do_nothing
from qerl_lab.rollout.transformers import TransformersEngine


class Wrong(TransformersEngine):
    """Base class that changes inputs or outputs."""

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        out = super().generate(self.prompts(prompt_ids_P), group_size, self.sampling(sampling), on_done)
        return self.out(replace(out, prompt_ids_P=prompt_ids_P))

    def prompts(self, prompt_ids_P: list[list[int]]) -> list[list[int]]:
        return prompt_ids_P

    def sampling(self, sampling: Sampling) -> Sampling:
        return sampling

    def out(self, out: Rollout) -> Rollout:
        return out


class RepeatsOneDraw(Wrong):
    def out(self, out: Rollout) -> Rollout:
        return replace(
            out,
            completion_ids_P_G=[[group[0]] * len(group) for group in out.completion_ids_P_G],
            logprobs_P_G=[[group[0]] * len(group) for group in out.logprobs_P_G],
        )


class ReadsPadding(Wrong):
    def prompts(self, prompt_ids_P: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompt_ids_P))
        return [[self.policy.tokenizer.pad_token_id] * (longest - len(ids)) + ids for ids in prompt_ids_P]


def asking(name: str, change: Callable[[Sampling], Sampling]) -> type[Wrong]:
    """Return an engine that samples otherwise than it is asked."""
    return type(name, (Wrong,), {"sampling": lambda self, sampling: change(sampling)})


ForgetsTheTemperature = asking("ForgetsTheTemperature", lambda how: replace(how, temperature=1.0))
# Tells the log-probs of another temperature than it samples at.
DrawsFlatter = asking("DrawsFlatter", lambda how: replace(how, temperature=1.3 * how.temperature))
ForgetsTheNucleus = asking("ForgetsTheNucleus", lambda how: replace(how, top_p=1.0))
DrawsWhenGreedy = asking("DrawsWhenGreedy", lambda how: replace(how, temperature=how.temperature or 1.0))
DrawsASeed = asking("DrawsASeed", lambda how: replace(how, seed=int(torch.randint(1 << 30, ()))))


class CallsAnEndAtTheLimitALength(TransformersEngine):
    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        out = super().generate(prompt_ids_P, group_size, sampling)
        reasons = [["length" if len(ids) == sampling.max_tokens else "stop" for ids in group]
                   for group in out.completion_ids_P_G]  # fmt: skip
        return replace(out, finish_reasons_P_G=reasons)


class CountsPrompts(TransformersEngine):
    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone) -> Rollout:
        on_done(len(prompt_ids_P))
        return super().generate(prompt_ids_P, group_size, sampling)


class KeepsItsAdapter(TransformersEngine):
    """Samples with the adapter from when it was built."""

    def __init__(self, policy: Policy, batch_size: int) -> None:
        super().__init__(policy, batch_size)
        self.adapter = {n: p.data.clone() for n, p in policy.model.named_parameters() if "lora_" in n}

    def generate(self, *asked) -> Rollout:
        own = {name: self.policy.model.get_parameter(name).data for name in self.adapter}
        for name, weight in self.adapter.items():
            self.policy.model.get_parameter(name).data = weight
        try:
            return super().generate(*asked)
        finally:
            for name, weight in own.items():
                self.policy.model.get_parameter(name).data = weight


class WakesWithoutNoise(TransformersEngine):
    def sleep(self) -> None:
        self.sync(CLEAN)


class StaysNoisy(TransformersEngine):
    def sync(self, noise: Noise) -> None:
        if noise != CLEAN or not hasattr(self, "_norms"):
            super().sync(noise)


class Accumulates(TransformersEngine):
    def sync(self, noise: Noise) -> None:
        held = getattr(self, "_norms", self.policy.clean_norms)
        self._norms = noise.onto_norms(held)


class DrawsOnce(TransformersEngine):
    def sync(self, noise: Noise) -> None:
        super().sync(replace(noise, step=1))


class LeavesItsNorms(TransformersEngine):
    def generate(self, *asked) -> Rollout:
        out = super().generate(*asked)
        for name, norm in self.policy.norms.items():
            norm.data = self._norms[name]
        return out


class StaysInItsMode(TransformersEngine):
    def generate(self, *asked) -> Rollout:
        out = super().generate(*asked)
        self.policy.model.eval()
        return out


class SeedsEverything(TransformersEngine):
    def __init__(self, policy: Policy, batch_size: int) -> None:
        super().__init__(policy, batch_size)
        torch.manual_seed(0)
