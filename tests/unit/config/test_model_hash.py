"""The hash of a local model: changes that it sees, changes that it ignores, and parts that it does not read."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qerl_lab.config import model_hash as module
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError

NORM, MATRIX = 512, 1_000_000  # bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with a bias, a large matrix and a norm."""
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    folder.mkdir()
    tensors = {"a.bias": rng.bytes(8), "a.weight": rng.bytes(MATRIX), "norm.weight": rng.bytes(NORM)}
    save_file({name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}, folder / "model-1.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def flip(file: Path, at: int) -> None:
    """Change one byte; `at` counts from the end."""
    with file.open("r+b") as opened:
        opened.seek(-at, os.SEEK_END)
        (byte,) = opened.read(1)
        opened.seek(-at, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte in the middle of a tensor": lambda folder: flip(folder / "model-1.safetensors", NORM + MATRIX // 3),
    "another name of a file": lambda folder: (folder / "model-1.safetensors").rename(folder / "model.safetensors"),
    "another size": lambda folder: os.truncate(folder / "model-1.safetensors", 10_000),
    "config.json": lambda folder: (folder / "config.json").write_text('{"rope_theta": 1}'),
    "a chat template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
    "an added token": lambda folder: (folder / "added_tokens.json").write_text("{}"),
    "a special token": lambda folder: (folder / "special_tokens_map.json").write_text("{}"),
    "an end token": lambda folder: (folder / "generation_config.json").write_text("{}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_content_is_another_model(model: Path, change: str) -> None:
    before = model_hash(model)
    assert re.fullmatch("[0-9a-f]{12}", str(before))
    CHANGES[change](model)
    assert model_hash(model) != before


def test_place_time_and_the_records_beside_a_model_do_not_count(model: Path, tmp_path: Path) -> None:
    before = model_hash(model)
    (model / "warmup.json").write_text('{"seconds": 3}')
    (model / "README.md").write_text("mine")
    (model / "checkpoint").mkdir()
    os.utime(model / "config.json", (1, 1))
    copy, link = shutil.copytree(model, tmp_path / "elsewhere"), tmp_path / "link"
    link.symlink_to(model)
    assert model_hash(copy) == model_hash(link) == model_hash(model) == before


def test_every_tensor_of_a_large_file_is_sampled_and_small_tensors_are_read_whole(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change between the samples of a matrix is missed, as the docstring of `model_hash` says."""
    monkeypatch.setattr(module, "MAX_WHOLE_FILE", 1000)
    file, found = model / "model-1.safetensors", [model_hash(model)]
    for at in (1, NORM, NORM // 2, NORM + 1, NORM + MATRIX, NORM + MATRIX // 3):  # the last is where a piece lies
        flip(file, at)
        found.append(model_hash(model))
    assert len(set(found)) == len(found)
    flip(file, NORM + MATRIX // 2)
    assert model_hash(model) == found[-1]
    file.write_bytes(file.read_bytes().replace(b"a.bias", b"b.bias"))
    assert model_hash(model) != found[-1], "another name of a tensor"


@pytest.mark.parametrize("size", [100, 5 * 2**20])
def test_a_gguf_file_is_known_by_its_bytes(tmp_path: Path, size: int) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + bytes(size))
    before = model_hash(file)
    assert model_hash(shutil.copyfile(file, tmp_path / "b.gguf")) == before
    for at in (1, size + 4):
        flip(file, at)
        assert model_hash(file) != before
        flip(file, at)
    os.truncate(file, size)
    assert model_hash(file) != before


@pytest.mark.parametrize("name", ["empty", "missing", "file.txt", "missing.gguf"])
def test_what_is_no_local_model_has_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "file.txt").touch()
    assert model_hash(tmp_path / name) is None


def test_a_large_file_without_a_header_is_refused(model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(b"version https://git-lfs" + bytes(5 * 2**20))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors is no safetensors file, or not whole"):
        model_hash(model)
