"""A folder of benchmark results: what each shows."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from qerl_lab.config.option import ConfigError
from qerl_lab.report import bench_results

COMMITTED = Path(__file__).parents[3] / "results" / "bench"


def rollouts() -> dict[str, Any]:
    """Rollouts of a 7B model, where NVFP4 has 1.5 times the tokens of BF16."""
    usual = {
        "rank": 16, "batch": 8, "tokens_per_second_min": 1.0, "tokens_per_second_max": 1.0, "decode_ms": 1.0,
        "sync_ms": 1.0, "start_seconds": 1.0, "weights_gib": 1.0, "kv_gib": 1.0, "used_gib": 1.0,
    }  # fmt: skip
    rows = [
        {"arm": "bf16_stock", "format": "bf16", "baseline": True, "tokens_per_second": 100.0} | usual,
        {"arm": "nvfp4", "format": "nvfp4", "baseline": False, "tokens_per_second": 150.0} | usual,
        {"arm": "mxfp4", "rank": 16, "died": "OutOfMemoryError"},
    ]
    return {
        "benchmark": "rollout", "rows": rows, "environment": {"gpus": []},
        "options": {"model": "qwen2.5-7b", "prompt": 256, "new": 512},
    }  # fmt: skip


def test_every_committed_result_has_a_table_a_figure_and_an_origin() -> None:
    results = bench_results.read(COMMITTED)
    assert set(results) == {path.stem for path in COMMITTED.glob("*.json")}
    for result in results.values():
        assert any(
            f"{gpu}, torch 2." in bench_results.origin(result) for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
        )
        if result["benchmark"] == "clock":
            assert bench_results.text(result).startswith("waiting costs ")
            continue
        assert len(bench_results.text(result).splitlines()) > 2
        figure = bench_results.figure(result)
        assert figure is not None
        plt.close(figure)


def test_a_clock_is_a_line_without_a_figure() -> None:
    cost = {"cost_percent": 0.31, "low": -0.2, "high": 0.44, "pairs": 7, "steps_a_block": 4}
    result = {"benchmark": "clock", "environment": {"gpus": []}, "options": {"pairs": 20}, **cost}
    said = "waiting costs +0.31% [-0.20, +0.44] of a step, 7 of 20 pairs of 4 steps"
    assert (bench_results.text(result), bench_results.figure(result)) == (said, None)


def test_the_origin_says_when_on_what_and_by_which_code() -> None:
    about = {
        "time": "2026-11-21T11:59:42+0000", "gpus": [{"name": "NVIDIA H200"}], "git_sha": "7d2ebcc92e10", "dirty": True,
        "packages": {"torch": "2.11.0", "vllm": "0.26.0", "peft": "0.21"},
    }  # fmt: skip
    said = bench_results.origin(rollouts() | {"environment": about})
    assert said == "2026-11-21, NVIDIA H200, torch 2.11.0, vllm 0.26.0, commit 7d2ebcc with changes"


def test_where_every_arm_died_there_is_no_figure() -> None:
    assert bench_results.figure(rollouts()) is not None
    plt.close("all")
    assert bench_results.figure({**rollouts(), "rows": [{"arm": "nvfp4", "rank": 16, "died": "x"}]}) is None


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no result\. Make one: python -m qerl_lab\.bench linear out=") as told:
        bench_results.read(tmp_path / "results")
    assert str(told.value).endswith(f" out={tmp_path}/results/linear.")
    (tmp_path / "x.json").write_text(json.dumps({"benchmark": "linear"}))
    with pytest.raises(ConfigError, match=r"x.json is no result of python -m qerl_lab.bench \(KeyError"):
        bench_results.read(tmp_path)
