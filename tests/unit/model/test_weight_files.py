"""Folders of safetensors are read bit for bit, and damaged files are named."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qerl_lab.config.message import say_hub_is_asked
from qerl_lab.config.option import ConfigError
from qerl_lab.model import on_disk
from qerl_lab.model import weight_files as module
from qerl_lab.model.on_disk import ASSETS, INDEX, SINGLE
from qerl_lab.model.weight_files import WeightFiles, local_folder

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b.weight_scale": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "c.weight": torch.arange(40, dtype=torch.uint8).reshape(40, 1),
    "d.scale": torch.tensor([3, 7], dtype=torch.uint8).view(torch.float8_e8m0fnu),
}
SHARDS = {"model-1.safetensors": ["a.weight", "b.weight_scale"], "model-2.safetensors": ["c.weight", "d.scale"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two shards and their index."""
    for file, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    write_index(tmp_path, {name: file for file, names in SHARDS.items() for name in names})
    return tmp_path


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_as_one(folder: Path) -> None:
    files = WeightFiles(folder)
    assert files.files == tuple(folder / name for name in SHARDS)
    assert sorted(files.names) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        read = files.tensor(name)
        assert (files.shape(name), files.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert read.dtype is tensor.dtype
        assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    assert files.where("c.weight") == str(folder / "model-2.safetensors")


@pytest.mark.parametrize(
    ("asked", "opened"), [("cuda", "cuda:1"), (torch.device("cuda"), "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")]
)
def test_a_gpu_without_a_number_is_the_current_one_of_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: torch.device | str, opened: str
) -> None:
    """safetensors would take the first GPU, so the second of two ranks would read its weights onto the wrong GPU."""
    devices: list[str] = []

    def open_on_cpu(file: Path, framework: str, device: str) -> object:
        devices.append(device)
        return safe_open(file, framework=framework)

    files = WeightFiles(folder)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(module, "safe_open", open_on_cpu)
    files.tensor("a.weight", asked)
    assert devices == [opened]


def test_a_tensor_outlives_its_file(folder: Path) -> None:
    tensor = WeightFiles(folder).tensor("c.weight")
    with (folder / "model-2.safetensors").open("r+b") as file:
        file.seek(-42, 2)
        file.write(bytes(42))
    assert torch.equal(tensor, TENSORS["c.weight"])


@pytest.mark.parametrize("kept", [5, 60, -1, None])
def test_a_shard_that_is_not_whole_is_named(folder: Path, kept: int | None) -> None:
    file = folder / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:kept] if kept is not None else file.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=re.escape(f"{file} cannot be read, or is not whole")):
        WeightFiles(folder)


def test_two_sets_of_weights_are_refused_by_every_reader(folder: Path) -> None:
    """transformers would read the single file, and the lab the shards."""
    save_file(TENSORS, folder / SINGLE)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    on_disk.layers.cache_clear()
    for read in (WeightFiles, on_disk.layers, lambda folder: on_disk.check_files(folder, "model=it")):
        with pytest.raises(ConfigError, match=r"two sets of weights\. Remove the set"):
            read(folder)
    write_index(folder, dict.fromkeys(TENSORS, SINGLE))
    assert WeightFiles(folder).files == (folder / SINGLE,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "INDEX cannot be read as JSON"),
        ("[]", "INDEX holds no JSON object"),
        ("{}", "INDEX has no weight_map"),
        ('{"weight_map": {"a": "../model-2.safetensors"}}', "INDEX has no weight_map to files of the same folder"),
        (
            '{"weight_map": {"a": "model-3.safetensors"}}',
            "model-3.safetensors is missing; allowed: model.safetensors, or INDEX and",
        ),
    ],
)
def test_an_index_that_is_malformed_or_lists_missing_files_is_refused(folder: Path, text: str, says: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match=re.escape(says.replace("INDEX", str(folder / INDEX)))):
        WeightFiles(folder)


def test_pocket_and_directories_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_folder("pocket", None) == ASSETS
    assert local_folder(str(tmp_path), None) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert local_folder(f"~/{tmp_path.name}", None) == tmp_path


@pytest.mark.parametrize("path", ["/no/such/place", "~/no-such-place"])
def test_the_hub_is_not_asked_for_a_missing_directory(path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"model.path={path} is no directory")):
        local_folder(path, None)


def test_the_refusal_of_an_unreachable_hub_id_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_hub_is_asked.cache_clear()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model\.path=someone/none is neither .* Type model\.path=DIR or "):
        local_folder("someone/none", None)
    assert "model.path=someone/none: asking the Hugging Face hub" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"model\.path=a/b/c is no directory"):
        local_folder("a/b/c", None)


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    """transformers would add it to the weights, into which it may have been merged."""
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds the adapter of adapter_config\.json beside the weights.*Move the ad"):
        WeightFiles(folder)
