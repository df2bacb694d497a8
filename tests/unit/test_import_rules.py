"""Rules for the modules of the package: imports, no torch in the command line, no patched library, no code from files.

Each rule is a function of source text, tried on the whole package and on a line that breaks it.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from qerl_lab.system.processes import LIBRARY_VARIABLES

SOURCE = Path(__file__).parents[2] / "src" / "qerl_lab"
MODULES = sorted(SOURCE.rglob("*.py"))

# A package, or a file at the top -> those of ours that it may import.
MAY_IMPORT = {
    "__init__": "", "config": "", "system": "config", "formats": "",
    # what they are about
    "aqn": "config", "tasks": "config system record", "algorithms": "config", "record": "config system",
    "tracking": "config record", "model": "config system formats", "preflight": "config system model tasks tracking",
    # what is done with it
    "rollout": "config system model aqn formats",
    "report": "config system record",
    "evaluate": "config system model rollout tasks aqn formats record report preflight",
    "quantize": "config system formats model record",
    "train": "config system record tracking formats model aqn tasks rollout algorithms evaluate report preflight",
    "bench": "config system formats model record report aqn tasks rollout quantize train",
    # the command line, which reaches the core only by starting a process
    "cli": "config system record tracking model tasks report preflight",
    "tools": "cli config evaluate system model record rollout tasks",
    "__main__": "system cli",
}  # fmt: skip
COMMANDS = "cli system"  # what a file that is a command may import besides
RUNS_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def is_command(path: Path) -> bool:
    """Return whether `python -m` starts this file."""
    return "__main__" in (path.stem, *re.findall(r'^if __name__ == "(\w+)"', path.read_text("utf-8"), re.MULTILINE))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def unit_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(dotted name of what is imported, name that it is bound to) of every import, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((f"{module}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def ours(tree: ast.AST) -> set[str]:
    """Return our modules and packages that are imported; "." stands for a relative import, which hides its target."""
    names = [name for name, _ in imported(tree)]
    found = {name.split(".")[1] for name in names if name.startswith("qerl_lab.")}
    return found | ({"."} if any(name.startswith(".") for name in names) else set())


def root_name(node: ast.expr) -> str | None:
    """`a` of `a.b[0].c`; None for anything else."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def patches(tree: ast.AST) -> list[int]:
    """Return the lines that assign into, delete from or setattr on something imported from a third-party package."""
    third_party = {
        bound for name, bound in imported(tree) if name.split(".")[0] not in {*sys.stdlib_module_names, "qerl_lab", ""}
    }
    lines = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "any")]
        into = [target for target in targets if isinstance(target, ast.Attribute | ast.Subscript)]
        lines += [node.lineno for target in into if root_name(target) in third_party]
    return lines


def unsafe(tree: ast.AST) -> list[str]:
    """Return calls and imports that could run code from a file or from the hub."""
    found = [name for name, _ in imported(tree) if name.split(".")[0] in RUNS_CODE]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg: getattr(keyword.value, "value", "?") for keyword in call.keywords}
        if given.get("trust_remote_code", False) is not False:
            found.append("trust_remote_code")
        if (
            name.startswith("Auto")
            and name.endswith(".from_pretrained")
            and given.get("trust_remote_code") is not False
        ):
            found.append(f"{name} without trust_remote_code=False")
        if (
            name.startswith("AutoModel")
            and name.endswith(".from_pretrained")
            and given.get("use_safetensors") is not True
        ):
            found.append(f"{name} without use_safetensors=True")
        if name == "torch.load" and given.get("weights_only") is not True:
            found.append(name)
        if name in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load") or given.get("allow_pickle"):
            found.append(name)
    return found


def gibs(tree: ast.AST) -> list[str]:
    """Return expressions that spell out the bytes of a GiB."""
    written = {"2 ** 30", "1 << 30", "1024 ** 3"}
    return [text for node in ast.walk(tree) if isinstance(node, ast.BinOp) and (text := ast.unparse(node)) in written]


def violations(rule: Callable[[ast.AST], list]) -> dict[str, list]:
    found = {str(path.relative_to(SOURCE)): rule(tree_of(path)) for path in MODULES}
    return {path: bad for path, bad in found.items() if bad}


def test_every_module_has_its_place_in_the_table() -> None:
    assert {unit_of(path) for path in MODULES} == set(MAY_IMPORT)


def test_a_module_imports_only_what_it_may() -> None:
    def may(path: Path) -> set[str]:
        unit = unit_of(path)
        return {unit, *MAY_IMPORT[unit].split(), *(COMMANDS.split() if is_command(path) else ())}

    beyond = {str(path.relative_to(SOURCE)): ours(tree_of(path)) - may(path) for path in MODULES}
    assert {path: names for path, names in beyond.items() if names} == {}


def test_the_table_has_no_circle_and_nothing_in_it_imports_the_main_module() -> None:
    done: set[str] = set()
    while ready := {unit for unit, may in MAY_IMPORT.items() if unit not in done and set(may.split()) <= done}:
        done |= ready
    assert done == set(MAY_IMPORT)
    assert not any("__main__" in may.split() for may in MAY_IMPORT.values())


def test_no_module_patches_a_library() -> None:
    assert violations(patches) == {}


def test_no_module_runs_code_from_a_file() -> None:
    """Except the jailed process that runs a model's program."""
    assert violations(unsafe) == {"tasks/code_jail.py": ["exec"]}


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (patches, "import trl; trl.GRPOTrainer.log = None"),
        (patches, "import transformers.trainer as t; t.Trainer.x += 1"),
        (patches, "from vllm import lora; del lora.models.f"),
        (patches, "def f():\n    from peft import tuners\n    tuners.REGISTRY['a'] = 1"),
        (patches, "from trl import GRPOTrainer; setattr(GRPOTrainer, 'log', None)"),
        (patches, "import torch; a, torch.load = 1, None"),
        (unsafe, "import pickle"),
        (unsafe, "from joblib import load"),
        (unsafe, "torch.load(path)"),
        (unsafe, "AutoTokenizer.from_pretrained(path)"),
        (unsafe, "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)"),
        (unsafe, "AutoConfig.from_pretrained(path, trust_remote_code=True)"),
        (unsafe, "load_dataset(path, trust_remote_code=flag)"),
        (unsafe, "eval(text)"),
        (unsafe, "yaml.load(text)"),
        (unsafe, "np.load(path, allow_pickle=True)"),
        (gibs, "GIB = 2**30"),
        (gibs, "1 << 30"),
        (gibs, "1024**3"),
    ],
)
def test_a_line_that_breaks_a_rule_is_found(rule: Callable[[ast.AST], list], line: str) -> None:
    assert rule(ast.parse(line))


def test_what_is_ours_or_pythons_may_be_assigned_to() -> None:
    assert not patches(
        ast.parse("import os, torch\nos.environ['A'] = '1'\nself.x = torch.zeros(1)\nmodel.norm.data = x")
    )


def test_the_bytes_of_a_gib_are_written_once() -> None:
    assert violations(gibs) == {"config/units.py": ["2 ** 30"]}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from qerl_lab import aqn, tasks", {"aqn", "tasks"}),
        ("def f():\n    import qerl_lab.model.linear", {"model"}),
        ("from ..config import RunConfig", {"."}),
    ],
)
def test_an_import_of_ours_is_found(line: str, found: set[str]) -> None:
    assert ours(ast.parse(line)) == found


def test_these_modules_import_no_torch() -> None:
    """One process imports them all, and names the first after which one of these libraries is there."""
    modules = (
        "config.schema config.option config.conf_folder config.arm config.rules config.keys "
        "record.directory record.metrics record.checkpoint record.environment "
        "tracking.tracker tracking.mlflow tracking.wandb "
        "cli.train cli.compose cli.launch cli.intent cli.manual cli.grammar model.on_disk preflight tools.samples "
        "quantize.__main__ quantize.quantize_options evaluate.__main__ evaluate.evaluate_options bench.__main__ "
        "train.__main__ train.health "
        "report.arms report.plots report.runs report.stats report.run_summary report.comparison report.page "
        "report.__main__ tools.warmup tools.export tools.search tools.queue tools.serve_line"
    )
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}.split():\n"
        "    importlib.import_module(f'qerl_lab.{name}')\n"
        "    found = {'torch', 'transformers', 'trl', 'mlflow'} & set(sys.modules)\n"
        "    assert not found, f'{name} imports {found}'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_libraries_are_as_they_were_installed_and_none_comes_before_it_is_needed() -> None:
    """Importing the whole core leaves the classes whose seams it uses as they were.

    It leaves MLflow to the mirror's thread and matplotlib to the end of the run.
    """
    code = """
import gc, os
gc.disable()  # a third of the time, with the teardown that the last line leaves out
import trl, peft, transformers
def fingerprint():
    classes = [trl.GRPOTrainer, transformers.Trainer, transformers.GenerationMixin, peft.PeftModel, peft.LoraConfig]
    return {f"{c.__name__}.{n}": id(v) for c in classes for n, v in vars(c).items()}
before = fingerprint()
import sys, qerl_lab.train.run
early = {"mlflow", "matplotlib"} & set(sys.modules)
assert not early, early
import qerl_lab.evaluate.sigma
assert fingerprint() == before
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **LIBRARY_VARIABLES}).returncode == 0
