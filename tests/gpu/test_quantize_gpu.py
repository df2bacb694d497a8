"""The quantize command writes the same bytes on a GPU as on a CPU."""

import json
from pathlib import Path

import pytest

from qerl_lab.quantize import __main__ as quantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4", "nf4", "fp8"])
def test_the_bytes_do_not_depend_on_the_device(tmp_path: Path, weight_format: str) -> None:
    for device in ("cpu", "cuda"):
        words = ["model=pocket", f"format={weight_format}", f"device={device}", f"out={tmp_path / device}"]
        assert quantize.main(words) == 0
    files = [(tmp_path / device / "model.safetensors").read_bytes() for device in ("cpu", "cuda")]
    assert files[0] == files[1]
    cpu, cuda = (json.loads((tmp_path / device / "quality.json").read_text()) for device in ("cpu", "cuda"))
    assert cuda["sqnr_db"]["layers"] == pytest.approx(cpu["sqnr_db"]["layers"], abs=1e-3)
