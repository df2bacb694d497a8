"""The kernels compile for an H200 where there is none: what the interpreter does not run, assembly, is in them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED = 227 * 2**10  # bytes a block may have on sm_90


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    script = Path(__file__).parents[1] / "helpers" / "compile_for_h200.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_each_kernel_fits_on_a_multiprocessor_twice(made: list[dict[str, Any]]) -> None:
    assert {one["kernel"] for one in made} == {"_shrink", "_expand", "_products", "_finish"}
    for one in made:
        assert one["shared"] <= SHARED / 2, (one["kernel"], one["BLOCK_M"], one["shared"])


def test_products_run_on_the_tensor_cores_and_weights_load_ahead(made: list[dict[str, Any]]) -> None:
    for one in made:
        assert "mma" in one["ptx"], (one["kernel"], one["BLOCK_M"])
        if one["kernel"] in ("_shrink", "_products"):
            assert "cp.async.cg.shared.global" in one["ptx"], (one["kernel"], one["BLOCK_M"])
        if one["kernel"] == "_products":
            assert one["ptx"].count("mul.rn.bf16x2") >= 64


def test_unpacking_nearly_keeps_up_with_the_memory_of_an_h200(made: list[dict[str, Any]]) -> None:
    """At 4.3 TB/s and 4.5 bits a multiprocessor gets 33 weights a cycle, and issues 128 lanes: 3.9 a weight."""
    for one in made:
        if one["kernel"] == "_products" and one["WHOLE"]:
            weights = one["BLOCK_N"] * one["BLOCKS"] * 16 / one["threads"]
            slots = {name: count / weights for name, count in one["loop"].items()}
            print(f"{one['BLOCK_M']} rows: {slots['all']:.2f} issue slots a weight, {slots['integer']:.2f} integer")
            assert 2 < slots["all"] < {8: 4.2, 16: 4.9, 32: 5.7}[one["BLOCK_M"]]
