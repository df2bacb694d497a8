"""The embedded policy: small, as its recipe says, and able to read anything."""

import hashlib
import json
import random

import torch
from transformers import AutoTokenizer

from qerl_lab import tasks
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.tasks import arithmetic
from qerl_lab.tools.pretrain import Recipe, batch_of, make_model, make_tokenizer


def test_its_files_are_those_of_the_recipe() -> None:
    record = json.loads((ASSETS / "recipe.json").read_text())
    assert record["recipe"] == Recipe().__dict__, "the recipe in the code made this file"
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in ASSETS.iterdir()}
    del digests["recipe.json"]
    assert digests == record["sha256"]
    assert record["command"] == "python -m qerl_lab.tools.pretrain out=DIR"


def test_its_tokenizer_reads_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    for text in ("Ann has 12 pens.", "naïve 数学 🧮 \x00\t\r\n", "<think>1+1=2</think><answer>2</answer>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_its_teacher_scores_the_solution_and_its_end_alone() -> None:
    """Loss on every token of the solution with the end token, on nothing else."""
    task, rng = tasks.load(tasks.read_task_config("arithmetic")), random.Random(0)
    of = arithmetic.problem(rng, tasks.read_task_config("arithmetic"))
    solution = arithmetic.worked_solution(rng, of)
    recipe = Recipe(vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=1)
    tokenizer = make_tokenizer(recipe, [of.text, solution])
    solutions = {of.text: solution, "?": "<think>x</think><answer>1</answer>"}
    asked = [tasks.Question("", text, "", {"solution": worked}) for text, worked in solutions.items()]
    batch = batch_of(task, tokenizer, asked)
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    scored = labels != -100
    assert tokenizer.decode(ids[scored]) == solution + "<|im_end|>"
    assert torch.equal(labels[scored], ids[scored])
    assert make_model(recipe, tokenizer)(**batch).loss.isfinite()
