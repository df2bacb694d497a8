"""The choice of vLLM's kernels: which shapes and rows are timed, that they are timed once, and in another process."""

import json
import os
import shutil
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

from qerl_lab.config.schema import FormatConfig, RunConfig
from qerl_lab.model.linear import packed_layers
from qerl_lab.rollout.vllm import backends, fp4_tiles
from small_checkpoints import write_random

AUTO = {"rollout__vllm__linear_backend": "auto"}
SHAPES = {((64, 32, 32), 128): 3, ((256,), 64): 2}


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """What a GPU would measure; `asked` in it counts how often."""
    found = {"marlin": 3.0, "humming": 2.0, "fp4_tiles": 1.0}
    asked = []

    def milliseconds(kernels: list[str], cfg: RunConfig, shapes: object, rows: object) -> dict[str, float]:
        asked.append((kernels, shapes, rows))
        return {name: found[name] for name in kernels}

    monkeypatch.setattr(backends, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found["asked"] = asked
    machine(monkeypatch, capability=(8, 0), humming="0.1.10")
    return found


def machine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], humming: str, mps: bool = False) -> None:
    """A GPU and what is installed beside it."""
    monkeypatch.setattr(fp4_tiles, "shared_by_mps", lambda: mps)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(backends, "version", {"vllm": "0.26.0", "humming-kernels": humming}.__getitem__)


@pytest.fixture
def model(tiny, build_policy) -> nn.Module:
    return build_policy(tiny()).model


def test_shapes_are_those_of_fused_layers_under_the_adapter(model: nn.Module) -> None:
    shapes = backends.shapes_of(model)
    config = model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    expected = {(hidden, keys, keys): hidden, (inner, inner): hidden, (hidden,): inner}
    assert {sizes: columns for sizes, columns in shapes if (sizes, columns) != ((hidden,), hidden)} == expected
    assert shapes.total() == 4 * config.num_hidden_layers


def test_the_fastest_is_taken_and_timed_once(times: dict, tiny, model: nn.Module, tmp_path: Path, capsys) -> None:
    cfg = tiny(format__name="nvfp4", rollout__prompts_per_step=3, rollout__group_size=3,
               optim__micro_batch_size=3, **AUTO)  # fmt: skip
    assert backends.chosen(cfg, model) == "humming"
    said = capsys.readouterr().out
    assert "linear_backend=humming: products and adapter at 9, 5, 3 rows take marlin 3.00 ms, humming 2.00" in said
    times |= {"marlin": 1.0}
    assert backends.chosen(cfg, model) == "humming"
    assert len(times["asked"]) == 1
    assert len(json.loads((tmp_path / "qerl-lab" / "linear_backend.json").read_text())) == 1
    assert backends.chosen(tiny(format__name="mxfp4", rollout__prompts_per_step=3, **AUTO), model) == "marlin"
    assert backends.chosen(tiny(format__name="nvfp4", **AUTO), model) == "marlin", "other rows"
    assert len(times["asked"]) == 3


def test_another_humming_is_timed_anew(times: dict, tiny, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be installed over the one that vLLM requires."""
    cfg = tiny(format__name="nvfp4", **AUTO)
    assert backends.chosen(cfg, model) == "humming"
    machine(monkeypatch, capability=(8, 0), humming="0.1.19")
    times |= {"marlin": 1.0}
    assert backends.chosen(cfg, model) == "marlin"


def test_another_kernel_of_the_lab_s_is_timed_anew(
    times: dict, tiny, model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg = tiny(format__name="nvfp4", **AUTO)
    assert backends.chosen(cfg, model) == "humming"
    folder = tmp_path / "changed"
    shutil.copytree(fp4_tiles.SOURCE.parent, folder)
    monkeypatch.setattr(fp4_tiles, "SOURCE", folder / fp4_tiles.SOURCE.name)
    times |= {"marlin": 1.0}
    assert backends.chosen(cfg, model) == "humming", "the same in another place"
    (folder / "hopper.cuh").write_text("// faster")
    assert backends.chosen(cfg, model) == "marlin"


@pytest.mark.parametrize(("name", "asked", "told"), [
    ("nf4", "auto", "vllm"), ("bf16", "vllm", "vllm"), ("nvfp4", "vllm", "vllm"), ("nvfp4", "humming", "humming"),
    ("nvfp4", "fp4_tiles", "fp4_tiles"),
])  # fmt: skip
def test_nothing_is_timed_for_other_formats_or_unless_asked(
    times: dict, tiny, model: nn.Module, name: str, asked: str, told: str
) -> None:
    assert backends.chosen(tiny(format__name=name, rollout__vllm__linear_backend=asked, lora__rank=8), model) == told
    assert times["asked"] == []


def test_where_the_timing_fails_vllm_chooses_and_that_is_said(
    times: dict, tiny, model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fails(*_: object) -> dict[str, float]:
        raise backends.NotTimed("its process ended with 1: no compiler")

    monkeypatch.setattr(backends, "milliseconds", fails)
    assert backends.chosen(tiny(format__name="nvfp4", **AUTO), model) == "vllm"
    said = "warning: linear_backend=auto timed nothing (its process ended with 1: no compiler), so that vLLM chooses"
    assert said in capsys.readouterr().out


def test_rows_that_go_by_the_dense_copy_are_not_timed(times: dict, tiny, model: nn.Module) -> None:
    keys = {"format__name": "nvfp4", "rollout__prompts_per_step": 3, "rollout__group_size": 3,
            "optim__micro_batch_size": 3}  # fmt: skip
    for dense_rows in (5, 1):
        backends.chosen(tiny(**keys, rollout__vllm__dense_rows=dense_rows), model)
    assert [rows for _, _, rows in times["asked"]] == [[3]]


FITS = {"format__name": "nvfp4", "lora__rank": 8, "model__dtype": "bfloat16"}


@pytest.mark.parametrize(("keys", "capability", "taken"), [
    ({}, (9, 0), ["marlin", "fp4_tiles"]), ({}, (8, 0), ["marlin", "humming"]),
    ({"lora__rank": 4}, (9, 0), ["marlin"]), ({"model__dtype": "float32"}, (9, 0), ["marlin"]),
    ({"format__name": "mxfp4"}, (9, 0), ["marlin"]),
    ({"rollout__vllm__lora": "request"}, (9, 0), ["marlin"]),
    ({"rollout__vllm__share_base": True}, (9, 0), ["marlin", "fp4_tiles"]),
    ({"rollout__vllm__share_base": True}, (8, 0), ["marlin"]),
])  # fmt: skip
def test_only_what_the_run_can_have_is_timed(
    times: dict, tiny, build_policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, keys: dict,
    capability: tuple[int, int], taken: list[str],
) -> None:  # fmt: skip
    machine(monkeypatch, capability, "0.1.10")
    folder = write_random(tmp_path / "dense", hidden_size=128, intermediate_size=192, num_attention_heads=2,
                          num_key_value_heads=1)  # fmt: skip
    cfg = tiny(**{**FITS, "model__path": str(folder)} | keys)
    policy = build_policy(cfg)
    assert backends.chosen(cfg, policy.model) == taken[-1]
    assert [kernels for kernels, _, _ in times["asked"]] == ([taken] if len(taken) > 1 else [])
    assert ("nothing is timed" in capsys.readouterr().out) == (len(taken) == 1)


def test_jobs_that_share_a_gpu_through_mps_have_no_tiles(
    times: dict, tiny, model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Their launches would wait for each other's blocks."""
    machine(monkeypatch, (9, 0), "0.1.13", mps=True)
    assert backends.chosen(tiny(**FITS), model) == "humming"
    assert "leaves out fp4_tiles: it cannot be where MPS shares the GPU" in capsys.readouterr().out


def test_fused_layers_with_a_scale_each_have_no_tiles(tiny, build_policy, tmp_path: Path) -> None:
    folder = write_random(tmp_path / "dense", hidden_size=128, intermediate_size=192, num_attention_heads=2,
                          num_key_value_heads=1)  # fmt: skip
    model = build_policy(tiny(**FITS, model__path=str(folder))).model
    assert backends.tiles_fit(model, 8)
    layer = next(iter(packed_layers(model).values()))
    layer.hold({name: tensor * 2 if "global" in name else tensor for name, tensor in layer.packed().items()})
    assert not backends.tiles_fit(model, 8)


@pytest.mark.parametrize(("capability", "humming", "fastest"), [
    ((9, 0), "0.1.10", "marlin"), ((9, 0), "0.1.13", "humming"), ((8, 9), "0.1.10", "humming"),
    ((9, 0), "0.1.10+cu130", "marlin"), ((9, 0), "0.1.13rc1", "marlin"), ((9, 0), "0.1.13+cu130", "humming"),
])  # fmt: skip
def test_a_humming_with_races_is_not_taken_unless_named(
    times: dict, tiny, model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys, capability: tuple[int, int],
    humming: str, fastest: str,
) -> None:  # fmt: skip
    machine(monkeypatch, capability, humming)
    assert backends.chosen(tiny(format__name="nvfp4", **AUTO), model) == fastest
    assert len(times["asked"]) == (fastest == "humming")
    assert ("has races on this GPU" in capsys.readouterr().out) == (fastest == "marlin")
    named = tiny(format__name="nvfp4", rollout__vllm__linear_backend="humming")
    assert backends.chosen(named, model) == "humming"
    assert ("warning: the installed Humming has races" in capsys.readouterr().out) == (fastest == "marlin")


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Put a program in the place of the one that times."""

    def put(program: str) -> None:
        (tmp_path / "stand_in.py").write_text(f"import json, os, sys, time\n{program}\n")

    monkeypatch.setattr(backends, "TIMER", "stand_in")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return put


def test_another_process_is_asked(timer, tmp_path: Path, tiny) -> None:
    told = tmp_path / "told.json"
    timer(
        f"asked = json.load(sys.stdin)\nasked['process'] = os.getpid()\njson.dump(asked, open({str(told)!r}, 'w'))\n"
        "print('vLLM says something')\njson.dump({'marlin': 2.5, 'humming': 1.5}, open(sys.argv[1], 'w'))"
    )
    cfg = tiny(format__name="mxfp4", lora__rank=4)
    assert backends.milliseconds(["marlin", "humming"], cfg, SHAPES, [9, 5]) == {"marlin": 2.5, "humming": 1.5}
    asked = json.loads(told.read_text())
    assert asked.pop("process") != os.getpid()
    assert FormatConfig(**asked["format"]) == cfg.format
    assert asked["shapes"] == [[[[64, 32, 32], 128], 3], [[[256], 64], 2]]
    assert (asked["kernels"], asked["rank"]) == (["marlin", "humming"], 4)
    assert (asked["rows"], asked["device"]) == ([9, 5], 1)


@pytest.mark.parametrize(("program", "said"), [
    ("raise MemoryError('all of it')", "ended with 1: MemoryError: all of it"),
    ("os._exit(3)", "ended with 3: said nothing"),
    ("time.sleep(60)", "took longer than 0.5 s"),
])  # fmt: skip
def test_a_process_that_fails_is_told(timer, tiny, monkeypatch: pytest.MonkeyPatch, program: str, said: str) -> None:
    monkeypatch.setattr(backends, "LONGEST", 0.5 if "sleep" in program else 60)
    timer(program)
    with pytest.raises(backends.NotTimed, match=f"its process {said}"):
        backends.milliseconds(["marlin"], tiny(format__name="nvfp4"), SHAPES, [9])


def test_a_run_that_would_time_the_same_waits_and_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = []

    def second() -> None:
        with backends.remembered() as known:
            found.append(dict(known))

    waiting = Thread(target=second)
    with backends.remembered() as known:
        waiting.start()
        waiting.join(0.3)
        assert found == [], "the first run times still"
        known["a shape"] = 1.5
    waiting.join(30)
    assert found == [{"a shape": 1.5}]


def test_what_a_failed_run_timed_is_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def fails() -> None:
        with backends.remembered() as known:
            known["a shape"] = 1.5
            raise backends.NotTimed("the GPU is gone")

    with pytest.raises(backends.NotTimed, match="is gone"):
        fails()
    with backends.remembered() as known:
        assert known == {}
