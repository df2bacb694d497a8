"""Every command parses KEY=VALUE arguments into typed options, or refuses them and says what to type."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import pytest

from qerl_lab.cli import grammar
from qerl_lab.config.option import ConfigError, option


@dataclass
class Options:
    name: str = option("a", "a name")
    path: str | None = option(None, "a path")
    parts: list[str] = option(["x"], "some parts", choices=("x", "y", "z", "a,b"))
    sizes: list[int] = option([1], "some sizes", at_least=1)
    sigmas: list[float] = option([0.1], "some sigmas", above=0)
    number: int = option(3, "a number", at_least=1)
    step: int | None = option(None, "a step", at_least=1)
    ratio: float = option(0.5, "a ratio", above=0, at_most=1)
    flag: bool = option(False, "a flag")
    way: str = option("up", "a way", choices=("up", "down", "off"))


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("name=b=c, d", "name", "b=c, d"),
        ("name=1e3", "name", "1e3"),  # a commit
        ("name=", "name", ""),
        ("+name=b", "name", "b"),
        ("path=null", "path", None),
        ("path='null'", "path", "null"),
        ("parts=[y, z]", "parts", ["y", "z"]),
        ("parts=['a,b']", "parts", ["a,b"]),
        ("parts=[]", "parts", []),
        ("sizes=1,20", "sizes", [1, 20]),
        ("sigmas=[1,0.5,1e-3]", "sigmas", [1.0, 0.5, 1e-3]),
        ("ratio=1", "ratio", 1.0),
        ("flag=true", "flag", True),
        ("way=off", "way", "off"),
    ],
)
def test_a_value_gets_the_type_of_its_key_and_the_others_their_defaults(word: str, key: str, value: object) -> None:
    read, defaults = grammar.parse_options(Options, [word]), Options()
    assert getattr(read, key) == value
    assert repr(getattr(read, key)) == repr(value), "1 is no 1.0"
    assert {f.name for f in fields(Options) if getattr(read, f.name) != getattr(defaults, f.name)} <= {key}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("nmae=b", ["nmae is not a known key", "Did you mean name?", "Allowed: name, number"]),
        ("model.path=b", ["model.path is not a known key. Did you mean path?"]),
        ("name", ["name has no value. Type name=VALUE, without spaces around the sign."]),
        ("help", ["help cannot be read. Type --help."]),
        ("--name=b", ["--name=b is not a flag", "Type name=b."]),
        ("--hlep", ["--hlep is not a flag", "Did you mean --help?"]),
        ("name=a name=b", ["name is given 2 times: name=a name=b. Type one of them."]),
        ("name=null", ["name=null", "allowed: text"]),
        ("parts=null", ["parts=[null]", "a list of names", "parts=[x]"]),
        ("parts=[w]", ["w in parts=[w] is not allowed; allowed: x, y, z, a,b. Type for example parts=[x]."]),
        ("sizes=[1,x]", ["sizes=[1,x]", "a list of whole numbers", "sizes=[1]"]),
        ("sigmas=[0]", ["sigmas=[0.0]", "above 0", "sigmas=[1]"]),
        ("number=0", ["number=0", "at least 1"]),
        ("step=x", ["step=x", "a whole number or null", "step=1"]),
        ("ratio=nan", ["ratio=nan", "finite"]),
        ("ratio=2", ["ratio=2", "at most 1"]),
        ("flag=yes", ["flag=yes", "true or false", "flag=true"]),
        ("way=dwon", ["way=dwon", "up, down", "Did you mean down?"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(words: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        grammar.parse_options(Options, words.split())
    assert "\n" not in str(refusal.value)
    for part in parts:
        assert part in str(refusal.value)


@dataclass
class OnFiles:
    step: int = option(1, "a step")
    files: list[str] = option([], "files")


@dataclass
class OnOne:
    step: int = option(1, "a step")
    file: str = option("", "a file")


def test_a_path_is_typed_without_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seed=1").mkdir()
    Path("step=9").mkdir()
    read = grammar.parse_options(OnFiles, ["a (b)", "step=2", "seed=1", "~/c"], "files")
    assert (read.files, read.step) == (["a (b)", "seed=1", "~/c"], 2)
    Path("files").mkdir()
    assert grammar.parse_options(OnFiles, ["files"], "files").files == ["files"]
    assert grammar.parse_options(OnFiles, ["files=[a,b]"], "files").files == ["a", "b"]
    assert grammar.parse_options(OnFiles, ["step=9"], "files") == OnFiles(step=9), "the key comes first"
    assert grammar.parse_options(OnOne, ["step=2", "d"], "file") == OnOne(step=2, file="d")


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (OnFiles, "a sede=1", "sede is not a known key. Allowed: step, files."),
        (OnFiles, "a --step=2", "--step=2 is not a flag; keys are typed without dashes. Type step=2."),
        (OnFiles, "a files=[b]", "files is given 2 times: files=[b] a. Type one of them."),
        (OnOne, "a step", "step has no value. Type step=VALUE, without spaces around the sign."),
        (OnOne, "a b", "file is given 2 times: a b. Type one of them."),
    ],
)
def test_what_is_no_path_is_refused(kind: type, words: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        grammar.parse_options(kind, words.split(), "files" if kind is OnFiles else "file")
    assert str(refusal.value) == said


def test_the_manual_has_every_key_with_default_meaning_and_bounds() -> None:
    examples = (("python -m x name=b", "an example"),)
    text = grammar.command_help(grammar.Command("python -m x", "About.", Options, print, examples=examples))
    words = " ".join(text.split())
    for part in (
        "python -m x KEY=VALUE ...", "name=a a name", "path=null a path", "parts=[x] some parts (x, y, z, a,b)",
        "number=3 a number (at least 1)", "ratio=0.5 a ratio (above 0, at most 1)", "flag=false a flag",
        "way=up a way (up, down, off)", "python -m x name=b an example",
    ):  # fmt: skip
        assert part in words
    assert max(map(len, text.splitlines())) <= grammar.WIDTH


def test_the_manual_shows_a_long_list_whole_and_cuts_a_long_text() -> None:
    """A list is typed with a change, so its default must be known."""
    default = [f"name-{n}" for n in range(30)]

    @dataclass
    class Long:
        names: list[str] = option(default, "some names")
        text: str = option("a word " * 20, "a text")

    text = grammar.command_help(grammar.Command("python -m x", "About.", Long, print))
    assert f"names=[{','.join(default)}]" in "".join(text.split())
    assert "text=a word a word" in text
    assert "..." in text
    assert max(map(len, text.splitlines())) <= grammar.WIDTH


# --- every command


class Typed(NamedTuple):
    """A command: its module, its subcommand, and arguments that it accepts."""

    module: str
    pick: str
    right: str


COMMANDS = (
    Typed("qerl_lab", "", "device=cpu"),
    Typed("qerl_lab.quantize", "", "model=pocket out=made"),
    Typed("qerl_lab.evaluate", "sigma", ""),
    Typed("qerl_lab.bench", "train_step", "out=made"),
    Typed("qerl_lab.report", "", "runs"),
    Typed("qerl_lab.tools.samples", "", "run"),
    Typed("qerl_lab.tracking", "resync", "run"),
    Typed("qerl_lab.tracking", "table", ""),
)
Main = Callable[[list[str]], int]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.module} {command.pick}")


def main_of(command: Typed) -> Main:
    is_package = (Path(grammar.__file__).parents[1] / command.module.partition(".")[2].replace(".", "/")).is_dir()
    return importlib.import_module(f"{command.module}{'.__main__' if is_package else ''}").main


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@every_command
def test_help_is_the_manual(command: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of(command)([*filter(None, [command.pick]), *command.right.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"python -m {command.module} {command.pick}".strip() in out
    assert "Exit codes: 0 done, 1" in out
    assert err == ""


@every_command
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_wrong_word_is_one_line_and_nothing_is_done(
    command: Typed, processes: str, capsys: pytest.CaptureFixture[str], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that computes refuses to run in several processes. A command that only reads does not."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    reads = command.module in ("qerl_lab.report", "qerl_lab.tools.samples", "qerl_lab.tracking")
    said = "no_such_key is not a " if reads or processes == "1" else "WORLD_SIZE=2 is set"
    assert main_of(command)([*filter(None, [command.pick]), *command.right.split(), "no_such_key=1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1
    assert not list(empty.iterdir())


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.pick], ids=lambda command: command.pick)
def test_a_command_of_several_is_picked_by_its_first_word(command: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main_of(command)(words) == 0
        out = capsys.readouterr().out
        assert f"python -m {command.module} {command.pick}" in out
        assert out.endswith("\nType --help after a command for its keys.\n")
    assert main_of(command)([f"{command.pick}e"]) == 2
    said = f"error: {command.pick}e is not a command. Did you mean {command.pick}? Allowed: "
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("quantize.__main__", ["model=pocket"], "out= is missing. Type for example out=checkpoints/pocket-nvfp4."),
        ("report.__main__", ["baseline=a"], "sweep= is missing. Type for example python -m qerl_lab.report runs."),
    ],
)
def test_what_a_command_cannot_do_without_is_asked_for(
    module: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"qerl_lab.{module}").main
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert main(words[:-1]) == 0
    assert "Exit codes: 0 done" in capsys.readouterr().out, "the manual answers a command without a word"


NOWHERE = (
    ("qerl_lab.evaluate", "accuracy nope"),
    ("qerl_lab.evaluate", "sigma model=/nope"),
    ("qerl_lab.tools.export", "nope out=made"),
)


def test_refusals_help_and_the_check_of_a_sweep_import_no_torch() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_grammar import COMMANDS, NOWHERE, Typed, main_of
assert main_of(COMMANDS[0])(["+sweeps=weight_formats", "seed=0", "experiment=nf4", "dry_run=true"]) == 0
heavy = {{"torch", "transformers", "mlflow", "trl", "datasets", "numpy", "pandas"}} & set(sys.modules)
assert not heavy, heavy
for command in COMMANDS:
    picked = [command.pick] if command.pick else []
    main_of(command)([*picked, "--help"]), main_of(command)([*picked, *command.right.split(), "no_such_key=1"])
for module, words in NOWHERE:
    main_of(Typed(module, "", ""))(words.split())
print(sorted({{"torch", "transformers", "mlflow", "pandas", "matplotlib"}} & set(sys.modules)), file=sys.__stdout__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stderr.count("no_such_key is not a known key") == len(COMMANDS)
    assert done.stderr.count("nope is no directory") == len(NOWHERE)
