"""Runs of a queue on a machine of several GPUs: each sees one GPU, and no two see the same one at once."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from qerl_lab.tools.queue import Machine, RunOptions


def machine(options: RunOptions) -> Machine:
    return Machine.of(queue=None, options=options)  # type: ignore[arg-type]  # no run is planned here


@pytest.mark.parametrize(("seen", "expected"), [("", ["0", "1"]), ("4,7", ["4", "7"])])
def test_a_run_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, seen: str, expected: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    here, at_once, most = machine(RunOptions(gpus=2, jobs=2)), Counter[str](), Counter[str]()

    def run(_: int) -> None:
        with here.take_gpu() as visible:
            gpu = visible["CUDA_VISIBLE_DEVICES"]
            at_once[gpu] += 1
            most[gpu] = max(most[gpu], at_once[gpu])
            time.sleep(0.02)
            at_once[gpu] -= 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(24)))
    assert dict(most) == dict.fromkeys(expected, 2)


def test_a_machine_of_one_gpu_leaves_the_environment_alone() -> None:
    with machine(RunOptions()).take_gpu() as visible:
        assert visible == {}
