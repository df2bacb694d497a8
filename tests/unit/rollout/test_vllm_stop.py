"""The loop of vLLM's engine over an `LLM` that a test makes. tests/unit/rollout/test_contract.py has vLLM's own."""

from types import SimpleNamespace

import pytest

from played_vllm import PlayedLlm, played_engine
from qerl_lab.rollout.engine import Sampling


class Endless:
    """An engine of vLLM that never finishes a request."""

    def __init__(self) -> None:
        self.steps, self.added, self.aborted = 0, list[str](), list[str]()

    def add_request(self, name: str, *_: object, **__: object) -> str:
        self.added.append(name)
        return name

    def has_unfinished_requests(self) -> bool:
        return True

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        assert self.steps < 100, "nobody stopped it"
        return [SimpleNamespace(finished=False) for _ in self.added]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names


def test_a_caller_may_stop_after_every_token(policy, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def stop_at_the_third(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            raise InterruptedError

    with played_engine(monkeypatch, PlayedLlm) as module:
        engine = object.__new__(module.VllmEngine)
        engine.policy, engine.cfg, engine.llm, engine._adapter = policy, tiny(), PlayedLlm(policy.model), None
        vllm = engine.llm.llm_engine = Endless()
        with pytest.raises(InterruptedError):
            engine.generate([[3], [4, 5]], 2, Sampling(24, seed=7), stop_at_the_third)
    assert told == [0, 0, 0]
    assert vllm.steps == 3
    assert vllm.aborted == vllm.added == ["0", "1"]
