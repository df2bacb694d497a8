"""A tokenizer's files are those of the tokenizer, wherever it was loaded."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from qerl_lab.config.model_hash import model_hash
from qerl_lab.model import tokenizer
from qerl_lab.model.on_disk import ASSETS


def saved(folder: Path, **loading: bool) -> dict[str, bytes]:
    folder.mkdir()
    tokenizer.save(AutoTokenizer.from_pretrained(ASSETS, **loading), folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_hub_in_reach_or_not_gives_the_same_files(tmp_path: Path) -> None:
    online, offline = saved(tmp_path / "on"), saved(tmp_path / "off", local_files_only=True)
    assert "tokenizer.json" in online
    assert online == offline
    for name in ("on", "off"):
        (tmp_path / name / "model.safetensors").write_bytes((ASSETS / "model.safetensors").read_bytes())
    assert model_hash(tmp_path / "on") == model_hash(tmp_path / "off")


@pytest.mark.parametrize("text", ["<answer>12</answer>", " a  b\n", "7 - 3"])
def test_what_is_saved_reads_as_before(tmp_path: Path, text: str) -> None:
    saved(tmp_path / "saved")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (ASSETS, tmp_path / "saved"))
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert (after.eos_token_id, after.chat_template) == (before.eos_token_id, before.chat_template)
