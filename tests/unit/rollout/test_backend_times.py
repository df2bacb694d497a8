"""The process that times vLLM's kernels: what it reads and writes, and the weights that it makes up."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from qerl_lab import formats
from qerl_lab.config.schema import FormatConfig
from qerl_lab.formats.format import Format
from qerl_lab.rollout.vllm import backend_times
from qerl_lab.rollout.vllm.backends import TIMED, Shape


def test_what_is_asked_is_timed_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed, devices = [], []

    def milliseconds(
        kernels: list[str], weight_format: Format, rank: int, shapes: dict[Shape, int], rows: list[int]
    ) -> dict[str, float]:
        timed.append((kernels, weight_format, rank, shapes, rows))
        return {"marlin": 1.0}

    monkeypatch.setattr(backend_times, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(backend_times, "end_with", lambda parent: None)
    asked = {"kernels": ["marlin"], "rank": 4, "format": {"name": "mxfp4"},
             "shapes": [[[[64, 32], 128], 3]], "rows": [9, 5], "device": 1, "parent": 7}  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    backend_times.main([str(tmp_path / "times.json")])
    assert json.loads((tmp_path / "times.json").read_text()) == {"marlin": 1.0}
    assert timed == [(["marlin"], formats.build(FormatConfig(name="mxfp4")), 4, {((64, 32), 128): 3}, [9, 5])]
    assert devices == [1]


@pytest.mark.slow
def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """A run or an arm that is killed leaves nothing on the GPU, where the next one is measured."""
    held = tmp_path / "held"
    os.mkfifo(held)
    (tmp_path / "timer.py").write_text(
        "import time, torch; from qerl_lab.rollout.vllm import backend_times\n"
        "torch.cuda.set_device = lambda _: None\n"
        f"backend_times.milliseconds = lambda *_: [open({str(held)!r}, 'w'), time.sleep(100)]\n"
        "backend_times.main(['/nowhere'])"
    )
    run = (
        "import torch; from qerl_lab.config.schema import RunConfig; from qerl_lab.rollout.vllm import backends\n"
        "torch.cuda.current_device, backends.TIMER = lambda: 0, 'timer'\n"
        "backends.milliseconds(['marlin'], RunConfig(), {}, [1])"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen([sys.executable, "-c", run], env=os.environ | {"PYTHONPATH": path}) as killed:
        with held.open() as timer:  # waits for it to begin
            killed.kill()
            began = time.monotonic()
            assert timer.read() == ""  # ends when the timer has
        assert time.monotonic() - began < 30


def test_a_random_weight_has_the_layout_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(backend_times.KERNELS) == set(TIMED)
    real = {name: getattr(torch, name) for name in ("randint", "full")}
    for name, function in real.items():
        monkeypatch.setattr(torch, name, lambda *a, _f=function, **k: _f(*a, **k | {"device": "cpu"}))
    for name in backend_times.KERNELS:
        weight_format = formats.build(FormatConfig(name=name))
        packed = backend_times.random_weight(weight_format, (64, 128))
        layout = {key: (tuple(t.shape), t.dtype) for key, t in packed.items()}
        assert layout == {key: (tuple(size), dtype) for key, (size, dtype) in weight_format.layout((64, 128)).items()}
        assert weight_format.dequantize(packed, (64, 128), torch.float32).isfinite().all()


def test_a_call_is_followed_by_its_adapter() -> None:
    torch.manual_seed(0)
    W, A, B, x = (torch.randn(shape) for shape in ((6, 5), (4, 5), (6, 2), (3, 5)))
    y = backend_times.followed(lambda rows: rows @ W.t(), A, B, [4, 2])(x)
    t = x @ A.t()
    added = torch.cat([t[:, :2] @ B[:4].t(), t[:, 2:] @ B[4:].t()], dim=1)
    torch.testing.assert_close(y, x @ W.t() + added)


def test_rows_are_the_same_for_each_call() -> None:
    seen: list[torch.Tensor] = []
    x = torch.randn(2, 3)
    backend_times.call_each([lambda rows: seen.append(rows.clone())] * 3, x)
    assert len(seen) == 3
    assert all(torch.equal(rows, x) for rows in seen)
