"""A tokenizer's files are those of the tokenizer, wherever it was loaded; the token that pads has an embedding."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.model import chat, policy
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.rollout.engine import Sampling
from qerl_lab.rollout.transformers import TransformersEngine


def saved(folder: Path, **loading: bool) -> dict[str, bytes]:
    folder.mkdir()
    chat.save_tokenizer(AutoTokenizer.from_pretrained(ASSETS, **loading), folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_hub_in_reach_or_not_gives_the_same_files(tmp_path: Path) -> None:
    online, offline = saved(tmp_path / "on"), saved(tmp_path / "off", local_files_only=True)
    assert "tokenizer.json" in online
    assert online == offline
    for name in ("on", "off"):
        (tmp_path / name / "model.safetensors").write_bytes((ASSETS / "model.safetensors").read_bytes())
    assert model_hash(tmp_path / "on") == model_hash(tmp_path / "off")


def test_a_padding_id_without_an_embedding_gives_way_to_the_end_token(tmp_path: Path, tiny) -> None:
    """Padding is masked, so any id serves that the model has."""
    shutil.copytree(ASSETS, tmp_path, dirs_exist_ok=True)
    own = AutoTokenizer.from_pretrained(ASSETS)
    own.add_special_tokens({"pad_token": "<beyond>"})
    own.save_pretrained(tmp_path)
    built = policy.build(tiny(model__path=str(tmp_path)), torch.device("cpu"))
    assert own.pad_token_id >= built.model.get_input_embeddings().num_embeddings
    assert built.tokenizer.pad_token_id == own.eos_token_id
    prompts = [built.prompt_ids([{"role": "user", "content": text}]) for text in ("1 + 1", "123 + 456")]
    assert TransformersEngine(built, 2).generate(prompts, 1, Sampling(2, seed=0)).tokens > 0


def test_an_end_token_without_an_embedding_is_refused() -> None:
    own = AutoTokenizer.from_pretrained(ASSETS)
    with pytest.raises(ConfigError, match="allowed: an end token that the model has"):
        chat.pad_id(own, min(own.pad_token_id, own.eos_token_id))
