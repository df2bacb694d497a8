"""Arguments of vLLM that have it hold the noisy norms in float32 (`worker.NormWorker`). Imports no vllm."""

from collections.abc import Sequence
from typing import Any

WORKER = "qerl_lab.rollout.vllm.worker.NormWorker"
KEY = "qerl_lab_float32_norms"  # of additional_config


def arguments(names: Sequence[str]) -> dict[str, Any]:
    """Return arguments of `vllm.LLM`, for the norms with one of `names` as the last part of their name.

    The names are in `additional_config`, which is part of the key of vLLM's compiled code: without it a graph that was
    compiled for norms in bfloat16 would read float32 ones.
    """
    return {"worker_cls": WORKER, "additional_config": {KEY: list(names)}}
