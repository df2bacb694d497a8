"""Schedules of Humming's product: which are tried, which rows each serves, and that they are timed once."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from qerl_lab.config.schema import FormatConfig
from qerl_lab.rollout.vllm import schedules

SHAPES = [((64, 32, 32), 128), ((256,), 64)]
IN_ONE = {128: 0.5, 64: 1.5}  # microseconds of fp4_linear, by columns of x
OWN = [[0, 32, {"own": 32}], [32, 64, {"own": 64}], [64, 8192, {"own": 8192}]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict]:
    """What the timer was asked, which finds a schedule that names its place."""
    every = []

    def measured(backend: str, timer: str, what: dict, longest: float) -> list[dict]:
        every.append(what)
        assert (backend, timer) == ("tuned", schedules.TIMER)
        return [
            {"schedule": {"of": json.dumps(place)}, "us": [2.0, 1.0], "own": OWN, "in_one": IN_ONE.get(place[0][1])}
            for place in json.loads(json.dumps(what["places"]))
        ]

    monkeypatch.setattr(schedules, "measured", measured)
    monkeypatch.setattr(schedules, "version", lambda package: "0.1.19")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return every


def test_each_shape_and_number_of_rows_is_timed_once(asked: list[dict], capsys: pytest.CaptureFixture) -> None:
    found = schedules.tuned_for(FormatConfig(name="nvfp4"), SHAPES, [8, 16])
    assert set(found.schedules) == {"128x128", "256x64"}
    assert found.schedules["256x64"] == [
        (0, 8, {"of": "[[[256], 64], 8]"}), (8, 16, {"of": "[[[256], 64], 16]"}),
        (16, 32, {"own": 32}), (32, 64, {"own": 64}), (64, 8192, {"own": 8192}),
    ]  # fmt: skip
    assert (
        "256x64, rows: microseconds with an adapter by Humming's own choice, fastest: 8: 2.0 1.0, 16: 2.0 1.0; 8 by "
        "fp4_linear: 1.5" in capsys.readouterr().out
    )
    schedules.tuned_for(FormatConfig(name="nvfp4"), SHAPES[::-1], [16, 32])
    assert [len(one["places"]) for one in asked] == [4, 2], "8 and 16 rows are known, 32 are not"
    schedules.tuned_for(FormatConfig(name="nvfp4"), SHAPES, [8, 16, 32])
    schedules.tuned_for(FormatConfig(name="mxfp4"), SHAPES, [8])
    assert [len(one["places"]) for one in asked] == [4, 2, 2]


def test_few_rows_go_apart_where_that_is_faster_than_fp4_linear(asked: list[dict]) -> None:
    """By the fewest rows that are timed; `fp4_linear` takes none of more."""
    assert schedules.tuned_for(FormatConfig(name="nvfp4"), SHAPES, [8, 16]).apart == ["256x64"]
    assert not schedules.is_apart({"us": [2.0, 1.0], "in_one": None})
    assert not schedules.is_apart({"us": [2.0, 1.0], "in_one": 1.0})


def test_another_humming_is_timed_anew(asked: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    schedules.tuned_for(FormatConfig(name="nvfp4"), SHAPES, [8])
    monkeypatch.setattr(schedules, "version", lambda package: "0.1.20")
    schedules.tuned_for(FormatConfig(name="nvfp4"), SHAPES, [8])
    assert len(asked) == 2


def test_only_tuned_is_timed(asked: list[dict], tiny, build_policy) -> None:
    model: nn.Module = build_policy(tiny()).model
    for backend in ("vllm", "auto", "marlin", "humming"):
        assert (
            schedules.tuned(tiny(format__name="nvfp4", rollout__vllm__linear_backend=backend), model)
            == schedules.Tuned()
        )
    assert asked == []
    cfg = tiny(format__name="nvfp4", rollout__vllm__linear_backend="tuned")
    found = schedules.tuned(cfg, model)
    config = model.config
    assert f"{config.hidden_size}x{config.intermediate_size}" in found.schedules
    assert len(asked) == 1


@pytest.mark.parametrize(("keys", "rows"), [
    ({}, [8, 16, 32, 64, 100]),
    ({"rollout__vllm__dense_rows": 64}, [8, 16, 32]),
    ({"rollout__vllm__dense_rows": 8}, []),
    ({"rollout__batch_size": 8}, [8]),
    ({"rollout__batch_size": 4, "rollout__vllm__fp4_linear": True}, [4]),
    ({"rollout__vllm__fp4_tiles": True}, [100]),
    ({"rollout__vllm__fp4_tiles": True, "rollout__vllm__fp4_linear": True}, [8, 100]),
    ({"rollout__vllm__fp4_tiles": True, "rollout__batch_size": 40}, []),
    ({"rollout__prompts_per_step": 512}, [8, 16, 32, 64, 128, 256, 512]),
])  # fmt: skip
def test_rows_double_up_to_a_full_batch(tiny, keys: dict, rows: list[int]) -> None:
    given = {"rollout__prompts_per_step": 25, "rollout__group_size": 4, "rollout__batch_size": 1024,
             "optim__micro_batch_size": 4, "format__name": "nvfp4"} | keys  # fmt: skip
    assert schedules.doubling_rows(tiny(**given)) == rows


def test_every_row_has_one_schedule() -> None:
    best = [(8, {"best": 8}), (40, {"best": 40})]
    found = schedules.intervals(best, [tuple(one) for one in OWN])
    assert found == [(0, 8, {"best": 8}), (8, 40, {"best": 40}), (40, 64, {"own": 64}), (64, 8192, {"own": 8192})]
    assert schedules.intervals([], [tuple(one) for one in OWN]) == [tuple(one) for one in OWN]


@pytest.mark.parametrize("rows", [1, 8, 16, 24, 32, 64, 128, 256])
def test_what_is_tried_is_whole(rows: int) -> None:
    """Blocks are whole warps, and a warpgroup is four of them side by side; few rows are tried by mma too."""
    tried = list(schedules.first(rows))
    assert len({json.dumps(one, sort_keys=True) for one in tried}) == len(tried)
    assert ("mma" in {one["mma_type"] for one in tried}) == (rows <= 32)
    for one in tried:
        block, warp = one["block_shape"], one["warp_shape"]
        assert all(b % w == 0 for b, w in zip(block, warp, strict=True))
        assert one["mma_type"] == "mma" or block[1] // warp[1] % 4 == 0
        assert block[0] % 8 == 0
        assert min(rows, 64) <= block[0] <= 128


def test_neighbours_differ_in_one_choice() -> None:
    for start in (*schedules.first(16), {"mma_type": "wgmma", "block_shape": [128, 256, 64]}):
        neighbours = list(schedules.near(start))
        assert len(neighbours) > 5
        for key in ("use_stream_k", "use_pdl", "evict_weights_first"):
            assert start | {key: not (schedules.DEFAULTS | start)[key]} in neighbours
        assert all(schedules.DEFAULTS | one != schedules.DEFAULTS | start for one in neighbours)
        for one in neighbours:
            assert len([key for key in one if one[key] != start.get(key)]) == 1
            assert min(one.get("num_ctas_per_sm", 1), one.get("num_stages", 2)) > 0
