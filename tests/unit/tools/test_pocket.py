"""The embedded policy: its files are those of its recipe, and its tokenizer reads any text."""

import hashlib
import json
import runpy
from pathlib import Path

from transformers import AutoTokenizer

from qerl_lab.model.on_disk import ASSETS


def test_the_files_are_those_of_the_recipe() -> None:
    record = json.loads((ASSETS / "recipe.json").read_text())
    pretrain = runpy.run_path(str(Path(__file__).parents[3] / "results/pocket/pretrain.py"))
    assert record["recipe"] == pretrain["Recipe"]().__dict__, "the recipe in the script made this file"
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in ASSETS.iterdir()}
    del digests["recipe.json"]
    assert digests == record["sha256"]
    assert record["command"] == "python results/pocket/pretrain.py out=DIR"


def test_the_tokenizer_reads_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    for text in ("Ann has 12 pens.", "naïve 数学 🧮 \x00\t\r\n", "<think>1+1=2</think><answer>2</answer>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
