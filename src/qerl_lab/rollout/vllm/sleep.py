"""How the engine sleeps: its key-value cache gives its memory back, everything else stays where it is.

vLLM's own sleep takes the weights along: level 1 copies them to the host and back, level 2 drops them. How it sleeps is
left to a backend that can be registered (`SleepModeBackendFactory`). The one here unmaps the memory of the cache alone,
which costs no copy. Addresses stay, so that CUDA graphs hold; weights, adapter and norms can be read meanwhile.

At its end vLLM would have torch free every part of these pools, also those that vLLM itself has unmapped after loading
and forgotten. The allocator's error for such a part keeps the memory of the parts that follow (vLLM #36651). So torch
never frees a pool here, and `release` unmaps what is left.
"""

import ctypes
from typing import Any

import torch
from vllm import LLM
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, libcudart, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

NAME = "qerl_lab_cache"
TAG = "kv_cache"  # of what vLLM allocates for the cache: its tensors, and small ones that begin as zeros too


class CacheAlone(CuMemBackend):
    """Unmaps the cache. Each part knows whether it is mapped, so that a waking that failed can go on."""

    def suspend(self, level: int = 1) -> None:
        for part in _cache():
            if not part.is_asleep:
                unmap_and_release(part.handle)
                part.is_asleep = True

    def resume(self, tags: list[str] | None = None) -> None:
        """Map the cache again, as zeros: others wrote to this memory. Raises OutOfMemoryError where none is left."""
        for part in _cache() if tags is None or TAG in tags else []:
            if part.is_asleep:
                _, size, address, _ = part.handle
                _map(part.handle)
                part.is_asleep = False
                libcudart.cudaMemset(address, 0, size)

    def state(self) -> str:
        return "SUSPENDED" if asleep_bytes() else "RUNNING"


SleepModeBackendFactory.register_backend(NAME, __name__, CacheAlone.__name__)


def install(llm: LLM) -> None:
    """Have `llm`, which was built with `enable_sleep_mode`, sleep this way."""

    def choose(worker: Any) -> None:
        worker.vllm_config.model_config.sleep_mode_backend = NAME  # `LLM` has no argument for it

    llm.collective_rpc(choose)
    pools = list(CuMemAllocator.get_instance().allocator_and_pools.values())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pools))  # for good: torch frees a pool that nobody refers to


def release() -> None:
    """Give back all memory of an `llm` that has ended."""
    parts = CuMemAllocator.get_instance().pointer_to_data
    torch.cuda.synchronize()
    while parts:
        _, part = parts.popitem()
        if not part.is_asleep:
            unmap_and_release(part.handle)


def asleep_bytes() -> int:
    """Bytes of the cache that are unmapped now."""
    return sum(part.handle[1] for part in _cache() if part.is_asleep)


def _cache() -> list[Any]:
    return [part for part in CuMemAllocator.get_instance().pointer_to_data.values() if part.tag == TAG]


def _map(handle: tuple[int, ...]) -> None:
    try:
        create_and_map(handle)
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
