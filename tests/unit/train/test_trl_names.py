"""Private names of TRL and transformers that the trainer stands on: which they are, and that they are still there."""

import ast
import inspect
from pathlib import Path

from transformers import Trainer
from trl import GRPOTrainer

from qerl_lab.train import trainer
from qerl_lab.train.trainer import LabTrainer

OVERRIDDEN = {"_generate_and_score_completions", "_get_per_token_logps_and_entropies", "_save_checkpoint"}
ATTRIBUTES = {"_metrics", "_last_world_entropy"}


def private_names(source: str) -> set[str]:
    """What the class LabTrainer defines or reads of itself with one underscore."""
    (owner,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "LabTrainer")
    defined = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    read = {
        node.attr for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }  # fmt: skip
    return {name for name in defined | read if name.startswith("_") and not name.startswith("__")}


def test_the_private_names_are_these_and_are_still_there() -> None:
    ours = {name for name in vars(LabTrainer) if not hasattr(GRPOTrainer, name)}
    names = private_names(Path(trainer.__file__).read_text(encoding="utf-8"))
    assert names - ours == OVERRIDDEN | ATTRIBUTES
    assert all(callable(getattr(GRPOTrainer, name, None)) for name in OVERRIDDEN)
    written = inspect.getsource(GRPOTrainer) + inspect.getsource(Trainer)
    assert all(f"self.{name}" in written for name in ATTRIBUTES)
