"""Tables and figures of `bench rollout` and `bench step`: ratios of comparable rows, and notes on differences."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from qerl_lab.report import bench, bench_figures

SPEEDS = {"bf16_stock": 100.0, "qlora_stock": 40.0, "nvfp4": 150.0, "nvfp4 rollout.vllm.lora=request": 120.0}
COMMITTED = Path(__file__).parents[3] / "results" / "bench"
FORMATS = {"bf16_stock": "bf16", "qlora_stock": "nf4"}


def row(arm: str, speed: float, **changes: Any) -> dict[str, Any]:
    """Return a row of a rollout benchmark."""
    return {
        "model": "qwen2.5-14b", "arm": arm, "format": FORMATS.get(arm, "nvfp4"), "baseline": arm.endswith("stock"),
        "rank": 32, "batch": 8, "tokens_per_second": speed, "tokens_per_second_min": 0.9 * speed,
        "tokens_per_second_max": 1.1 * speed, "decode_ms": 4.5, "host_share": 0.254, "sync_ms": 9.0,
        "start_seconds": 60.0, "weights_gib": 5.5, "kv_gib": 2.0, "used_gib": 12.0, "max_num_seqs": 64,
        "sm_mhz": 1900.0,
    } | changes  # fmt: skip


def rollouts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "rollout", "rows": rows, "environment": {"gpus": []},
        "options": {"model": "qwen2.5-14b", "prompt": 256, "new": 512},
    }  # fmt: skip


def several(**changes: Any) -> list[dict[str, Any]]:
    return [row(arm, speed * batch / 8, batch=batch, **changes) for arm, speed in SPEEDS.items() for batch in (8, 64)]


def test_ratios_compare_rows_of_the_same_batch_and_rank() -> None:
    rows = [*several(), row("bf16_stock", 50.0, rank=64), row("nvfp4", 70.0, rank=64)]
    ratios = bench.measured(rollouts(rows)).set_index(["arm", "rank", "batch"])
    assert ratios.loc[("nvfp4", 32, 8), "of_bf16"] == 1.5
    assert ratios.loc[("nvfp4", 32, 64), "of_qlora"] == 3.75
    assert ratios.loc[("nvfp4", 64, 8), "of_bf16"] == 1.4
    assert ratios["of_qlora"].isna().sum() == 2  # QLoRA was not measured at rank 64


def test_the_baseline_is_the_stock_arm_without_overrides() -> None:
    eager, stock = row("bf16_stock enforce_eager=true", 50.0, baseline=True), row("bf16_stock", 100.0)
    for baselines, of_bf16 in (([eager, stock], 1.5), ([stock, eager], 1.5), ([eager], 3.0)):
        ratios = bench.measured(rollouts([*baselines, row("nvfp4", 150.0)])).set_index("arm")["of_bf16"]
        assert ratios["nvfp4"] == of_bf16


def test_an_arm_has_no_ratio_at_a_rank_without_its_baseline() -> None:
    """A ratio to the stock arm with overrides would mix two baselines in one column."""
    eager = row("bf16_stock enforce_eager=true", 50.0, rank=64, baseline=True)
    rows = [row("bf16_stock", 100.0), eager, row("nvfp4", 150.0, rank=64)]
    assert bench.measured(rollouts(rows)).set_index("arm")["of_bf16"].dropna().to_dict() == {"bf16_stock": 1.0}


def test_the_table_has_a_line_for_each_arm_and_batch_and_for_dead_arms() -> None:
    dead = {"arm": "mxfp4", "rank": 32, "died": "OutOfMemoryError: 3 GiB", "log": "a\nb"}
    lines = bench.text(rollouts([*several(), dead])).splitlines()
    line = next(line for line in lines if line.endswith(" nvfp4") and line.split()[1] == "64")
    assert line.split() == ["32", "64", "1,200", "1,080", "1,320", "1.50", "3.75", "4.50", "25%", "9.0", "60", "5.5",
                            "2.0", "12.0", "nvfp4"]  # fmt: skip
    assert "mxfp4, rank 32, died: OutOfMemoryError: 3 GiB" in lines
    assert not any(line.startswith("note:") for line in lines)


@pytest.mark.parametrize(("new", "is_told"), [(2, False), (42, False), (43, True)])
def test_the_time_of_a_token_is_left_out_where_completions_are_too_short_to_tell(new: int, is_told: bool) -> None:
    result = rollouts([row("nvfp4", 150.0)])
    result["options"]["new"] = new
    assert ("4.50" in bench.text(result)) == is_told


@pytest.mark.parametrize("older", [{"host_share": None}, {}], ids=["model runner 1", "older file"])
def test_the_hosts_share_is_left_out_where_it_was_not_measured(older: dict[str, Any]) -> None:
    told = bench.text(rollouts([row("nvfp4", 150.0)]))
    untold = {key: value for key, value in row("nvfp4", 150.0).items() if key != "host_share"} | older
    found = bench.text(rollouts([untold]))
    assert "near 100% the host limits" in told
    assert "near 100%" not in found
    assert found.splitlines()[1].split()[8] == "-"
    assert found.splitlines()[1].split()[5:7] == ["-", "-"]  # no baseline, no ratio


def test_other_differences_between_rows_are_noted() -> None:
    rows = [*several(), row("mxfp4", 10.0, max_num_seqs=8, sm_mhz=1400.0), row("nvfp4 gpus=2", 10.0, gpus=2)]
    found = bench.notes(pd.DataFrame([{"gpus": 1} | row for row in rows]))
    assert found.pop(0).endswith("; 2 in nvfp4 gpus=2")
    assert found[0].startswith("max_num_seqs differs: 64 in bf16_stock, qlora_stock, nvfp4")
    assert found[0].endswith("; 8 in mxfp4")
    assert found[1].startswith("the GPU's clock was between 1,400 and 1,900 MHz")
    alike = [row("a", 1.0, sm_mhz=1900.0), row("b", 1.0, sm_mhz=1920.0), row("c", 1.0, sm_mhz=None)]
    assert bench.notes(pd.DataFrame(alike)) == []


def test_a_baseline_with_overrides_is_named_in_figure_and_table() -> None:
    merged = "bf16_stock enable_lora=false"
    rows = [each | {"arm": merged} if each["arm"] == "bf16_stock" else each for each in several()]
    result = rollouts(rows)
    assert f'note: "of BF16" is the ratio to {merged}' in bench.text(result).splitlines()
    assert bench_figures.figure(result).axes[1].get_title(loc="left") == f"ratio to {merged}"
    assert "of BF16" not in " ".join(bench.notes(bench.measured(rollouts([*rows, *several()]))))


@pytest.mark.parametrize("ranks", [(32,), (16, 32)])
def test_without_a_baseline_no_panel_stays_empty(ranks: tuple[int, ...]) -> None:
    """The baseline may not have been measured, or may have died."""
    rows = [each for rank in ranks for each in several(rank=rank)]
    rest = [each for each in rows if each["arm"] != "bf16_stock"]
    whole, alone = (bench_figures.figure(rollouts(kept)) for kept in (rows, rest))
    assert len(whole.axes) == 1 + len(ranks)
    assert len(alone.axes) == len(ranks)
    assert all(axis.lines for axis in alone.axes)
    itself = [each for each in rows if each["arm"] == "bf16_stock"]
    assert len(bench_figures.figure(rollouts(itself)).axes) == len(ranks)


@pytest.mark.parametrize(("base", "of_largest"), [("qlora_stock", 3.75), ("bf16_stock", 1.5)])
def test_the_panel_of_ranks_has_ratios_to_a_measured_baseline_beside_the_papers(base: str, of_largest: float) -> None:
    rows = [each | {"tokens_per_second": each["tokens_per_second"] * 16 / rank}
            for rank in (16, 32) for each in several(rank=rank) if each["arm"] in ("nvfp4", base)]  # fmt: skip
    result = rollouts(rows)
    paper = {"qlora_stock": 92.9 / 44.2, "bf16_stock": 92.9 / 63.1}[base]
    for prompt, of_paper in ((256, [paper]), (2048, [])):  # the paper's prompts, and longer ones
        result["options"]["prompt"] = prompt
        by_batch, *_, axis = bench_figures.figure(result).axes
        assert by_batch.get_title(loc="left") == "tokens/s, rank 16"
        assert [150.0, 1200.0] in [list(line.get_ydata()) for line in by_batch.lines]
        assert axis.get_title(loc="left") == f"ratio to {base}, batch 8"
        drawn = [line.get_ydata()[1] for line in axis.lines]  # at rank 32
        assert sorted(drawn) == pytest.approx(sorted([1.0, of_largest, *of_paper]))


def test_a_benchmark_where_every_arm_died_has_no_numbers_and_no_figure(tmp_path: Path) -> None:
    result = rollouts([{"arm": "mxfp4", "rank": 32, "died": "x"}])
    assert bench.text(result) == "mxfp4, rank 32, died: x"
    bench_figures.draw(result, tmp_path / "rollout.png")
    assert list(tmp_path.iterdir()) == []


def step(arm: str, seconds: float, **changes: Any) -> dict[str, Any]:
    """Return a row of a step benchmark. A baseline has no times of phases."""
    about = {
        "arm": arm, "format": "bf16", "baseline": arm.endswith("trl"), "rank": 32, "step_seconds": seconds,
        "tokens_per_second": 64 / seconds, "start_seconds": 60.0, "policy_gib": 14.2, "peak_gib": 60.0,
    }  # fmt: skip
    phases = {"rollout": 0.5, "reward": 0.01, "sync": 0.01, "probe": 0.03, "train": 0.4}
    own = {f"{phase}_seconds": share * seconds for phase, share in phases.items()}
    return about | (own if not about["baseline"] else {}) | changes


def steps() -> dict[str, Any]:
    return {
        "benchmark": "step", "environment": {"gpus": []},
        "rows": [step("bf16_trl", 8.0), {"arm": "qlora_trl", "rank": 32, "died": "ValueError: x"}, step("nvfp4", 4.0)],
        "options": {"model": "m", "groups": 8, "group_size": 8, "new": 1024},
    }  # fmt: skip


@pytest.mark.parametrize("train", [1.0, 3.0])
def test_the_bar_of_a_step_is_as_long_as_the_step(train: float) -> None:
    """Medians of phases add up to less than the median step, or to more."""
    result = steps() | {"rows": [step("bf16_trl", 8.0), step("nvfp4", 4.0, train_seconds=train)]}
    (axis,) = bench_figures.figure(result).axes
    assert [text.get_text() for text in axis.texts] == ["8.0", "4.0"]
    ends = [[bar.get_x() + bar.get_width() for bar in bars] for bars in axis.containers]
    assert np.max(ends, axis=0) == pytest.approx([8.0, 4.0])
    whole = next(bars for bars in axis.containers if bars.get_label() == "not timed apart")
    assert [bar.get_width() for bar in whole] == pytest.approx([8.0, 0.0])


def test_steps_with_completions_of_varying_length_name_the_tokens_of_each_arm() -> None:
    """Seconds alone would compare unequal work."""
    result = steps() | {"rows": [step("bf16_trl", 8.0, tokens=12_345.6), step("nvfp4", 4.0, tokens=950.0)]}
    labels = []
    for mean_tokens in (0, 400.0):
        result["options"]["mean_tokens"] = mean_tokens
        figure = bench_figures.figure(result)
        labels.append([label.get_text() for label in figure.axes[0].get_yticklabels()])
    assert labels == [["bf16_trl", "nvfp4"], ["bf16_trl: 12,346 tokens", "nvfp4: 950 tokens"]]


def test_the_table_of_steps_has_times_ratios_and_memory() -> None:
    result = steps()
    result["rows"][2]["gib_by_owner"] = {"frozen base": 5.44, "activations and the rest": 9.0}
    lines = bench.text(result).splitlines()
    assert lines[1].split() == ["8.00", "8", "1.00", *"------", "14.2", "-", "-", "60.0", "-", "bf16_trl"]
    assert lines[2].split()[:8] == ["4.00", "16", "2.00", "-", "2.00", "0.04", "0.04", "0.12"]
    assert "qlora_trl, rank 32, died: ValueError: x" in lines
    assert "memory of nvfp4, GiB: frozen base 5.4; activations and the rest 9.0" in lines


def test_each_panel_of_training_steps_has_the_numbers_of_its_label() -> None:
    rows = [
        {"arm": arm, "rank": 32, "loss": "chunked", "micro_batch_tokens": size, "tokens_per_second": speed * size,
         "peak_gb": peak}
        for arm, speed, peak in (("bf16", 2.0, 24.0), ("nvfp4", 1.0, 15.0)) for size in (100, 1000)
    ]  # fmt: skip
    about = {"environment": {"gpus": []}, "options": {"model": "m", "rank": 32}}
    axes = bench_figures.figure({"benchmark": "train_step", "rows": rows, **about}).axes
    assert {axis.get_xlabel(): [text.get_text() for text in axis.texts] for axis in axes} == {
        "tokens/s,\nmicro-batches of 100": ["200", "100"], "tokens/s,\nmicro-batches of 1,000": ["2,000", "1,000"],
        "peak GB,\nmicro-batches of 100": ["24.0", "15.0"], "peak GB,\nmicro-batches of 1,000": ["24.0", "15.0"],
    }  # fmt: skip
    scales = {(axis.get_xlabel().split(",")[0], axis.get_xlim()) for axis in axes}
    assert len(scales) == 2, "panels of one quantity have one scale"


def test_every_committed_result_has_an_origin_and_those_with_a_table_have_a_figure() -> None:
    drawn = set()
    for file in COMMITTED.glob("*.json"):
        result = bench.load(file)
        assert any(f"{gpu}, torch 2." in bench.origin(result) for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
        if result["benchmark"] in bench.TABLES:
            assert len(bench.text(result).splitlines()) > 1
            figure = bench_figures.figure(result)
            assert figure is not None
            plt.close(figure)
            drawn.add(file.stem)
    assert len(drawn) == 51
