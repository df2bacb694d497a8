"""Seconds of a step and of a sync include the work that the GPU still does after the last call has returned."""

from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from qerl_lab.aqn import Noise
from qerl_lab.rollout.transformers import TransformersEngine
from trained import train

pytestmark = pytest.mark.gpu


class Delay(TrainerCallback):
    """Keep the GPU busy after each optimizer update, and after each sync, without waiting for it."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {"update": [], "sync": []}

    def delay(self, after: str) -> None:
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        span[0].record()
        torch.cuda._sleep(10**9)  # cycles, half a second or more
        span[1].record()
        self.spans[after].append(span)

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        self.delay("update")

    def seconds(self, after: str) -> list[float]:
        return [start.elapsed_time(end) / 1000 for start, end in self.spans[after]]


def test_seconds_include_the_work_of_the_gpu_after_the_last_call(tiny, build_policy, tmp_path: Path) -> None:
    assert torch.cuda.device_count() == 1, "TRL refuses several GPUs in one process: type CUDA_VISIBLE_DEVICES=0"
    cfg = tiny(device="cuda", steps=3)
    policy, delay = build_policy(cfg), Delay()

    class SlowToSync(TransformersEngine):
        def sync(self, noise: Noise) -> None:
            super().sync(noise)
            delay.delay("sync")

    engine = SlowToSync(policy, batch_size=64)
    delay.spans["sync"].clear()
    steps = train(cfg, policy, engine, tmp_path, prepare=lambda run: run.trainer.add_callback(delay)).steps
    for metrics, update, sync in zip(steps, delay.seconds("update"), delay.seconds("sync"), strict=True):
        assert update > 0.2
        assert metrics["seconds/train"] >= update
        assert metrics["seconds/sync"] >= sync
        assert metrics["step/seconds"] >= update + sync
