"""Imports of large packages in a process that keeps what they make."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """Import without the garbage collector, and leave what was imported to itself.

    To look through a million new objects for garbage, again and again, takes a sixth of the import; and every
    `gc.collect()` after it, which each training calls, would look through them once more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or Triton's bindings would report leaks
        if was_enabled:
            gc.enable()
