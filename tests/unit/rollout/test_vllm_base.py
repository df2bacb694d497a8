"""The directory from which vLLM reads the base has the policy's exact weights, and is removed afterwards."""

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from packed_layers import BY_NAME, tiny_model
from qerl_lab.formats.format import PackedAs
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.loading import stored_as
from qerl_lab.model.on_disk import ASSETS, read_model_json
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.rollout.vllm import base
from small_checkpoints import equal, load, write_packed


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "fp8"])
def test_a_dense_model_is_written_as_the_policy_packed_it(name: str, tiny, build_policy) -> None:
    cfg = tiny(format__name=name, lora__rank=4)
    learner = build_policy(cfg)
    own = learner.model.get_base_model()
    with base.model_folder(learner, cfg) as folder:
        assert folder != ASSETS
        stored = stored_as(folder)
        assert stored is not None
        assert name == stored.weight_format.NAME
        again = load(folder)
    assert not folder.exists()
    packed = {name: module for name, module in again.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == 21
    for path, module in packed.items():
        mine = own.get_submodule(path).base_layer.packed()
        assert all(equal(mine[key], tensor) for key, tensor in module.packed().items()), path
    state = {key.replace(".base_layer.", "."): tensor for key, tensor in own.state_dict().items()}
    dense = {
        key: tensor for key, tensor in again.state_dict().items() if key.endswith(("norm.weight", "tokens.weight"))
    }
    assert len(dense) == 8
    assert all(torch.equal(state[key], tensor) for key, tensor in dense.items())


def test_a_directory_with_the_same_weights_is_read_in_place(tiny, build_policy) -> None:
    cfg = tiny(format__name="bf16")
    with base.model_folder(build_policy(cfg), cfg) as folder:
        assert folder == ASSETS


def test_a_packed_directory_is_read_in_place(tmp_path: Path, tiny, build_policy) -> None:
    model = write_packed(tmp_path, tiny_model(), BY_NAME["nvfp4"])
    shutil.copy(ASSETS / "chat_template.jinja", model)
    cfg = tiny(format__name="nvfp4", model__path=str(model))
    with base.model_folder(build_policy(cfg), cfg) as folder:
        assert folder == model


def test_weights_that_bf16_rounds_are_written_rounded(tmp_path: Path, tiny, build_policy) -> None:
    """A directory with some float32 weights differs from a policy in bf16."""
    model = tmp_path / "model"
    shutil.copytree(ASSETS, model)
    fine = load(ASSETS, PackedAs(BY_NAME["bf16"], ()))
    for path, parameter in fine.named_parameters():
        parameter.data += 1e-5 * torch.randn_like(parameter)
        if "mlp" not in path:
            parameter.data = parameter.data.bfloat16()
    fine.save_pretrained(model)
    cfg = tiny(format__name="bf16", model__path=str(model))
    learner = build_policy(cfg)
    with base.model_folder(learner, cfg) as folder:
        assert folder != model
        assert "quantization_config" not in read_model_json(folder / "config.json")
        files, name = WeightFiles(folder), "model.layers.0.mlp.down_proj.weight"
        handed = files.tensor(name)
    mine = learner.model.get_base_model().get_submodule(name.removesuffix(".weight")).base_layer.weight
    assert torch.equal(handed, mine)
    assert not torch.equal(handed, WeightFiles(model).tensor(name))


def test_later_runs_of_one_architecture_and_format_read_the_same_path(tiny, build_policy) -> None:
    """vLLM keeps compiled code under the path of the model."""
    paths = []
    for name, seed in (("nvfp4", 0), ("nvfp4", 1), ("mxfp4", 0)):
        cfg = tiny(format__name=name, seed=seed)
        with base.model_folder(build_policy(cfg), cfg) as folder:
            paths.append(folder)
    assert paths[0] == paths[1] != paths[2]


@contextmanager
def elsewhere(place: Path) -> Iterator[tuple[list[Path], multiprocessing.Process]]:
    """Yield a named and a scratch folder that another process uses, each with a file, and the process."""

    def hold() -> None:
        with base.named_folder("model", place / "named") as named, base.scratch_folder(10) as scratch:
            for made in (named, scratch):
                (made / "weights").write_text("of the other")
            told.send([named, scratch])
            time.sleep(600)

    heard, told = multiprocessing.Pipe(duplex=False)
    other = multiprocessing.get_context("fork").Process(target=hold, daemon=True)  # a fork imports nothing again
    other.start()
    told.close()  # so that `recv` fails if the process has died
    try:
        yield heard.recv(), other
    finally:
        other.kill()
        other.join()


def test_folders_of_another_process_stay_until_it_is_killed(tmp_path: Path, monkeypatch) -> None:
    """A scratch folder with a foreign name has no lock, so it may still be in use and stays."""
    monkeypatch.setattr(base, "IN_MEMORY", tmp_path / "memory")
    place, foreign = tmp_path / "named", tmp_path / "memory" / "qerl-lab-a1b2c3d4"
    place.mkdir(), foreign.mkdir(parents=True)
    with elsewhere(tmp_path) as ((named, scratch), other), base.scratch_folder(10) as mine:
        assert mine.parent == scratch.parent == tmp_path / "memory"
        with base.named_folder("model", place) as beside:
            assert [named.name, beside.name] == ["model-0", "model-1"]
        other.kill()
        other.join()
        assert [(theirs / "weights").read_text() for theirs in (named, scratch)] == ["of the other"] * 2
        with base.scratch_folder(10):
            assert not scratch.exists()  # removed when the next scratch folder is made
        assert sorted(mine.parent.iterdir()) == sorted([mine, foreign])
    with base.named_folder("model", place) as mine:  # taken over, empty
        assert mine == named
        assert not list(mine.iterdir())
    assert not list(place.iterdir())


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    """Otherwise anybody who can write there could make the lab empty any folder of the user."""
    place, own = tmp_path / "place", tmp_path / "own"
    place.mkdir(), own.mkdir()
    (own / "thesis.tex").touch()
    (place / "model-0").symlink_to(own)
    with base.named_folder("model", place) as folder:
        assert folder == place / "model-1"
    assert (own / "thesis.tex").exists()


@pytest.mark.parametrize(("free", "in_memory"), [(1000, False), (1300, True)])
def test_a_copy_goes_into_memory_if_there_is_room(free: int, in_memory: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(base, "IN_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    with base.scratch_folder(1000) as folder:
        assert (folder.parent == tmp_path) is in_memory
