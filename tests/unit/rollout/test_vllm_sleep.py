"""The engine's sleep over a fake LLM: which memory is unmapped, when it is mapped again, and failures between.

tests/gpu/test_vllm_sleep_gpu.py has vLLM's own.
"""

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from played_vllm import PlayedLlm, played_engine
from qerl_lab.aqn import CLEAN
from qerl_lab.config.units import GIB
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import ASLEEP, EngineFailed, Sampling

WEIGHTS, CACHE = [1], [2, 3]  # addresses


class Gpu:
    """Records which parts are mapped, the order of events, and how many parts of memory are left."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.mapped, self.left = {*WEIGHTS, *CACHE}, len(CACHE)
        self.after_sleep: Exception | None = None  # what vLLM raises once it sleeps
        self.before_sleep: Exception | None = None

    def unmap(self, handle: tuple[int, int, int, int]) -> None:
        assert handle[2] in self.mapped, "unmapped twice"
        self.mapped.discard(handle[2])
        self.events.append(f"unmap {handle[2]}")

    def map(self, handle: tuple[int, int, int, int]) -> None:
        assert handle[2] not in self.mapped, "mapped twice"
        if not self.left:
            raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:118")
        self.mapped.add(handle[2])
        self.events.append(f"map {handle[2]}")

    def zero(self, address: int, value: int, size: int) -> None:
        assert address in self.mapped
        assert (value, size) == (0, GIB)
        self.events.append(f"zero {address}")

    def awake(self) -> bool:
        return self.mapped >= {*WEIGHTS, *CACHE}


class Factory:
    classes: dict[str, tuple[str, str]]

    @classmethod
    def register_backend(cls, name: str, module: str, class_name: str) -> None:
        cls.classes[name] = module, class_name


class Llm(PlayedLlm):
    """As vLLM 0.26: a scheduler that pauses, an executor that knows whether it sleeps, a worker that does it."""

    def __init__(self, gpu: Gpu, policy: Policy, arguments: dict[str, Any]) -> None:
        model = copy.deepcopy(policy.model.get_base_model())
        super().__init__(model, arguments["kv_cache_memory_bytes"], lambda: gpu.events.append("end"))
        self.gpu, self.arguments, self.sleeps, self.backend = gpu, arguments, False, None
        config = SimpleNamespace(sleep_mode_backend="cumem")
        self.worker = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config), wake_up=self._worker_wakes)
        self.asked: list[tuple[str, Any]] = []
        vars(self.llm_engine).update(
            add_request=self._add, step=self._step, has_unfinished_requests=lambda: bool(self.asked),
            abort_request=lambda names: self.asked.clear(),
        )  # fmt: skip

    def collective_rpc(self, method: Any) -> list[Any]:
        return [getattr(self.worker, method)() if isinstance(method, str) else method(self.worker)]

    def sleep(self, level: int) -> None:
        assert self.arguments["enable_sleep_mode"]
        assert level == 1
        if self.gpu.before_sleep:
            raise self.gpu.before_sleep
        if self.backend is None:
            module, name = Factory.classes[self.worker.vllm_config.model_config.sleep_mode_backend]
            self.backend = getattr(sys.modules[module], name)()
        self.backend.suspend(level)
        if self.gpu.after_sleep:
            raise self.gpu.after_sleep
        self.sleeps = True

    def wake_up(self) -> None:
        if self.sleeps:
            self._worker_wakes()
        self.sleeps = False

    def _worker_wakes(self) -> None:
        self.backend.resume(None)
        self.gpu.events.append("tables")

    def apply_model(self, function: Callable[[nn.Module], Any]) -> list[Any]:
        self.gpu.events.append("model")
        return super().apply_model(function)

    def reset_prefix_cache(self) -> bool:
        assert self.gpu.awake()
        self.gpu.events.append("reset")
        return True

    def _add(self, name: str, prompt: Any, how: Any, lora_request: Any) -> str:
        assert not self.sleeps, "a request would wait for ever"
        self.asked.append((name, how))
        return f"{name}-5af0"

    def _step(self) -> list[Any]:
        assert self.gpu.awake(), "an illegal access"
        out = SimpleNamespace(token_ids=[5], finish_reason="length", index=0)
        found = [SimpleNamespace(finished=True, request_id=name, outputs=[out] * how.n) for name, how in self.asked]
        self.asked.clear()
        return found

    def adapter_arrives(self) -> None:
        assert self.gpu.awake()
        self.gpu.events.append("adapter")


@pytest.fixture
def policy(tiny: Callable, build_policy: Callable) -> Policy:
    return build_policy(tiny(format__name="bf16"))


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def allocator() -> Any:
    tags = dict.fromkeys(WEIGHTS, "weights") | dict.fromkeys(CACHE, "kv_cache")
    parts = {
        address: SimpleNamespace(handle=(0, GIB, address, 0), tag=tag, is_asleep=False) for address, tag in tags.items()
    }
    pools = {tag: (nn.Module(), "allocator") for tag in ("weights", "kv_cache")}
    return SimpleNamespace(pointer_to_data=parts, allocator_and_pools=pools)


@pytest.fixture
def build(
    policy: Policy, gpu: Gpu, allocator: Any, tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(Factory, "classes", {}, raising=False)
    stubs: dict[str, dict[str, Any]] = {
        "vllm.device_allocator": {},
        "vllm.device_allocator.cumem": {
            "CuMemAllocator": SimpleNamespace(get_instance=lambda: allocator), "create_and_map": gpu.map,
            "unmap_and_release": gpu.unmap, "libcudart": SimpleNamespace(cudaMemset=gpu.zero),
        },
        "vllm.device_allocator.sleep_mode_backend": {"CuMemBackend": object, "SleepModeBackendFactory": Factory},
    }  # fmt: skip
    with played_engine(monkeypatch, lambda model, **arguments: Llm(gpu, policy, arguments), stubs) as module:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gpu.events.append("empty"))

        def make(sleep: bool = True) -> Any:
            cfg = tiny(format__name="bf16")
            cfg.rollout.vllm.sleep = sleep
            engine = module.VllmEngine(policy, cfg)
            gpu.events.clear()
            return engine

        yield make


SLEEP = ["unmap 2", "unmap 3"]
WAKE = ["empty", "map 2", "zero 2", "map 3", "zero 3", "tables", "tables"]  # of the worker, then of the whole


def test_the_cache_alone_goes_once_and_is_back_before_anything_is_written(build: Callable, gpu: Gpu) -> None:
    engine = build()
    for _ in range(2):
        gpu.events.clear()
        engine.sleep()
        engine.sleep()
        assert gpu.events == SLEEP
        assert gpu.mapped == {*WEIGHTS}
        engine.sync(CLEAN)
        assert gpu.events[len(SLEEP) :] == [*WAKE, "adapter", "model", "reset"]
        engine.sync(CLEAN)
        assert gpu.awake()


def test_without_the_key_nothing_sleeps(build: Callable, gpu: Gpu) -> None:
    engine = build(sleep=False)
    engine.sleep()
    assert gpu.events == []
    assert not engine.llm.arguments["enable_sleep_mode"]
    assert engine.llm.worker.vllm_config.model_config.sleep_mode_backend == "cumem"


def test_a_rollout_wakes_it_too(build: Callable, gpu: Gpu) -> None:
    engine = build()
    engine.sleep()
    out = engine.generate([[1], [2]], 2, Sampling(1, seed=0))
    assert out.completion_ids_P_G == [[[5], [5]]] * 2
    assert gpu.events == [*SLEEP, *WAKE]


def test_it_tells_what_it_holds_and_what_sleeps(build: Callable) -> None:
    engine = build()
    awake = engine.held()
    engine.sleep()
    asleep = engine.held()
    assert asleep["vLLM's weights"] == awake["vLLM's weights"] > 0
    assert asleep[ASLEEP] == awake["vLLM's key-value cache"] > 0
    assert ASLEEP not in awake
    assert "vLLM's key-value cache" not in asleep


def test_an_engine_that_ends_gives_all_of_its_memory_back(build: Callable, gpu: Gpu, allocator: Any) -> None:
    """Another one asks of it that no part is left."""
    engine = build()
    engine.sleep()
    engine.close()
    engine.close()
    assert gpu.events == [*SLEEP, "end", "unmap 1"]
    assert not allocator.pointer_to_data


def test_a_waking_that_failed_half_way_goes_on_with_the_rest(
    build: Callable, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.sleep()
    zero = gpu.zero

    def last(address: int, value: int, size: int) -> None:
        zero(address, value, size)
        gpu.left = 0

    monkeypatch.setattr(sys.modules["qerl_lab.rollout.vllm.sleep"].libcudart, "cudaMemset", last)
    with pytest.raises(EngineFailed, match=r"out of memory in wake_up \(CUDA Error.*Type a lower rollout.vllm.kv_cach"):
        engine.sync(CLEAN)
    assert gpu.mapped == {1, 2}
    gpu.left = 1
    engine.sync(CLEAN)
    assert gpu.events.count("map 2") == gpu.events.count("map 3") == 1
    assert gpu.awake()


def test_another_program_on_the_gpu_does_not_end_the_run(build: Callable, gpu: Gpu) -> None:
    """vLLM asserts that more memory is free than before, and then does not know that it sleeps."""
    engine = build()
    gpu.after_sleep = AssertionError("Memory usage increased after sleeping.")
    engine.sleep()
    assert not engine.llm.sleeps
    engine.sync(CLEAN)
    assert gpu.awake()
    gpu.before_sleep = AssertionError("no backend")
    with pytest.raises(AssertionError, match="no backend"):
        engine.sleep()


def test_the_pools_outlive_vllm(build: Callable, allocator: Any) -> None:
    """Torch frees a pool that nobody refers to."""
    pool = weakref.ref(allocator.allocator_and_pools["weights"][0])
    build().close()
    allocator.allocator_and_pools.clear()
    gc.collect()
    assert pool() is not None
