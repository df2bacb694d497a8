"""Kernels compile for an H200 on a machine without one. They have assembly, which the interpreter does not run."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.rollout.vllm import fp4_tiles

pytestmark = pytest.mark.slow

SHARED = 227 * 2**10  # bytes a block may have on sm_90


@pytest.fixture(scope="module")
def every() -> list[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    script = Path(__file__).parents[1] / "helpers" / "compile_for_h200.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def made(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the kernels of the adapter."""
    return [one for one in every if one["kernel"] in ("_shrink", "_expand")]


def test_each_kernel_fits_on_a_multiprocessor_twice(every: list[dict[str, Any]]) -> None:
    kernels = {one["kernel"] for one in every if one["target"] == 90}
    assert kernels == {"_shrink", "_expand", "_unpack_marlin", "_unpack_tiles"}
    for one in every:
        assert one["shared"] <= SHARED / 2, (one["kernel"], one["shared"])


def test_unpacking_compiles_for_a_t4_and_an_l4(every: list[dict[str, Any]]) -> None:
    """A T4 has compute capability 7.5, an L4 8.9. NVFP4 and MXFP4 are unpacked to float32 and bfloat16."""
    found = [(one["target"], one["WIDTH"]) for one in every if one["kernel"] == "_unpack"]
    assert sorted(found) == [(target, width) for target in (75, 89) for width in (16, 16, 32, 32)]


def test_products_run_on_the_tensor_cores_and_weights_load_ahead(made: list[dict[str, Any]]) -> None:
    for one in made:
        assert "mma" in one["ptx"], (one["kernel"], one["BLOCK_M"])
        if one["kernel"] == "_shrink":
            assert "cp.async.cg.shared.global" in one["ptx"], (one["kernel"], one["BLOCK_M"])


def test_adapter_kernels_begin_early_and_wait_before_they_read_results_of_others(made: list[dict[str, Any]]) -> None:
    """`_expand` may read B before it waits: a sync, which writes B, ended long before `_shrink` let `_expand` begin."""
    for one in made:
        lines = one["ptx"].splitlines()
        (wait,) = [at for at, line in enumerate(lines) if "griddepcontrol.wait" in line]
        touched = [at for at, line in enumerate(lines) if "ld.global" in line or "cp.async.cg" in line]
        stored = [at for at, line in enumerate(lines) if "st.global" in line]
        assert stored
        assert min(stored) > wait
        assert any(at > wait for at in touched)
        early = [at for at in touched if at < wait]
        if one["kernel"] == "_shrink":
            assert not early
            (go,) = [at for at, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line]
            assert go > wait
        else:
            assert early, "B is loaded while shrink still runs"


@pytest.mark.parametrize("kernel", ["_unpack_marlin", "_unpack_tiles"])
def test_packed_words_are_loaded_and_dense_weights_stored_16_bytes_at_a_time(
    every: list[dict[str, Any]], kernel: str
) -> None:
    (ptx,) = [one["ptx"] for one in every if one["kernel"] == kernel]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx


def copy_headers(folder: Path) -> None:
    for header in fp4_tiles.SOURCE.parent.glob("*.cuh"):
        shutil.copy(header, folder)


def test_an_error_of_nvrtc_names_file_and_line(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from qerl_lab.rollout.vllm import nvrtc

    copy_headers(tmp_path)
    (broken := tmp_path / "broken.cu").write_text(fp4_tiles.SOURCE.read_text() + "no")
    with pytest.raises(RuntimeError, match=r"could not compile broken.cu for sm_90a: broken.cu\(\d+\): error"):
        nvrtc.compile_source(broken, "sm_90a")


# A note of ptxas: no product runs while the next weight is unpacked.
SERIALIZED = "wgmma.mma_async instructions are serialized"


@pytest.mark.parametrize(
    ("rows", "tile"), [*((fp4_tiles.MAX_ROWS, tile) for tile in fp4_tiles.TILE_SIZES), (16, 5), (32, 5)]
)
def test_nvrtc_compiles_fp4_tiles_without_serializing_products(rows: int, tile: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from qerl_lab.rollout.vllm import nvrtc

    for shared in (False, True):
        name, line = fp4_tiles.instance(rows, tile, fp4_tiles.groups_of(tile), shared)
        code, said = nvrtc.compile_source(fp4_tiles.SOURCE, "sm_90a", line)
        assert name.encode() in code
        assert SERIALIZED not in said


def test_nvrtc_reports_serialized_products(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from qerl_lab.rollout.vllm import nvrtc

    copy_headers(tmp_path)
    (slow := tmp_path / "slow.cu").write_text(fp4_tiles.SOURCE.read_text().replace("begins();", ""))
    assert SERIALIZED in nvrtc.compile_source(slow, "sm_90a", fp4_tiles.instance(16, 2, 2, False)[1])[1]
