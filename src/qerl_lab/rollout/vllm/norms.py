"""vLLM arguments that make it hold the noisy norms in float32 (`worker.NormWorker`). Imports no vllm."""

from collections.abc import Sequence
from typing import Any

WORKER = "qerl_lab.rollout.vllm.worker.NormWorker"
KEY = "qerl_lab_float32_norms"  # key in additional_config


def arguments(names: Sequence[str]) -> dict[str, Any]:
    """Return the `vllm.LLM` arguments that hold the norms in `names` (last part of the layer name) in float32.

    `additional_config` carries the names because it is part of vLLM's key for compiled code. Otherwise a graph compiled
    for bfloat16 norms would read float32 ones.
    """
    return {"worker_cls": WORKER, "additional_config": {KEY: list(names)}}
