"""Sleep mode that releases only the key-value cache; everything else stays in GPU memory.

vLLM's own sleep also moves the weights: level 1 copies them to the host and back, level 2 drops them. This module
registers a backend (`SleepModeBackendFactory`) that unmaps only the cache, which needs no copy. Addresses stay, so CUDA
graphs remain valid; weights, adapter and norms can be read meanwhile.

On shutdown vLLM would let torch free every part of its memory pools, also parts that vLLM unmapped after loading and
forgot. The allocator's error for such a part leaks the memory of the parts after it (vLLM #36651). So torch never frees
a pool here, and `release` unmaps what is left.
"""

import ctypes
from typing import Any

import torch
from vllm import LLM
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, libcudart, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

NAME = "qerl_lab_cache"
TAG = "kv_cache"  # vLLM's tag for the cache's allocations, small zeroed tensors among them


class CacheAlone(CuMemBackend):
    """Sleep backend that unmaps only the key-value cache.

    It marks each allocation as asleep or awake, so that a wake-up which failed halfway can be continued.
    """

    def suspend(self, level: int = 1) -> None:
        """Override vLLM's hook: unmap the key-value cache, and nothing else at any `level`."""
        for part in _cache_allocations():
            if not part.is_asleep:
                unmap_and_release(part.handle)
                part.is_asleep = True

    def resume(self, tags: list[str] | None = None) -> None:
        """Override vLLM's hook: map the cache again, zeroed. Raises OutOfMemoryError if too little memory is free."""
        for part in _cache_allocations():
            if part.is_asleep:
                _, size, address, _ = part.handle
                try:
                    create_and_map(part.handle)
                except RuntimeError as error:
                    if "out of memory" in str(error):
                        raise torch.OutOfMemoryError(str(error)) from error
                    raise
                part.is_asleep = False
                libcudart.cudaMemset(address, 0, size)

    def state(self) -> str:
        """Override vLLM's hook: return "SUSPENDED" while any of the key-value cache is unmapped, else "RUNNING"."""
        return "SUSPENDED" if asleep_bytes() else "RUNNING"


SleepModeBackendFactory.register_backend(NAME, __name__, CacheAlone.__name__)


def install(llm: LLM) -> None:
    """Make `llm.sleep()` release only the key-value cache. `llm` must have been built with `enable_sleep_mode`."""

    def choose_backend(worker: Any) -> None:
        worker.vllm_config.model_config.sleep_mode_backend = NAME  # `LLM` has no argument for it

    llm.collective_rpc(choose_backend)
    pools = list(CuMemAllocator.get_instance().allocator_and_pools.values())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pools))  # never released, because torch frees an unreferenced pool


def release() -> None:
    """Release all GPU memory that vLLM's allocator still holds. Call it after vLLM has been shut down."""
    parts = CuMemAllocator.get_instance().pointer_to_data
    torch.cuda.synchronize()
    while parts:
        _, part = parts.popitem()
        if not part.is_asleep:
            unmap_and_release(part.handle)


def asleep_bytes() -> int:
    """Return the bytes of the key-value cache that are unmapped now."""
    return sum(part.handle[1] for part in _cache_allocations() if part.is_asleep)


def _cache_allocations() -> list[Any]:
    """Return vLLM's memory allocations that belong to the key-value cache."""
    return [part for part in CuMemAllocator.get_instance().pointer_to_data.values() if part.tag == TAG]
