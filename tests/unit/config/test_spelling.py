"""A printed command line, pasted into bash, gives the argument that was meant."""

import shlex
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from qerl_lab.cli import grammar
from qerl_lab.cli.compose import make_plan
from qerl_lab.config.option import option
from qerl_lab.config.spelling import shell_override, spell_list, typed_override

TEXTS = [
    "läufe/a=b,c", "it's, $HOME", 'ä="b', "a,`b`", "a!,b", "ä=\\", "a\\\\'b, c\\\\", "[a,b]", "{ä}", " a, b ",
    "ä,\"b\"'c", "/a-1_b.c", "", "7e5", "NULL", "1_0", "-inf", "a:b",
]  # fmt: skip


@dataclass
class Options:
    run_dir: str = option("", "where")


def pasted(line: str) -> list[str]:
    """Return the arguments into which bash splits a line."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_as_it_was(text: str) -> None:
    """The other commands read it, and a run reads it as a value."""
    assert grammar.parse_options(Options, pasted(shell_override("run_dir", text))).run_dir == text
    (job,) = make_plan(pasted(shell_override("task.instruction", text)), False).jobs
    assert job.config.task.instruction == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_in_a_list_is_read_as_it_was(text: str) -> None:
    (read,) = OverridesParser.create().parse_overrides([f"format.ignore={spell_list(['lm_head', text])}"])
    items: Any = read.value()
    assert [item.text if isinstance(item, QuotedString) else item for item in items] == ["lm_head", text]


@pytest.mark.parametrize(("path", "typed"), [
    ("models/a-7B", "model.path=models/a-7B"), ("Meine Däten", "\"model.path='Meine Däten'\""),
    ("Ann's Däten", "\"model.path='Ann\\'s Däten'\""),
    ("Ann's new!", shlex.quote("model.path='Ann\\'s new!'")),  # a shell would read ! as a former command
])  # fmt: skip
def test_a_line_to_type_is_what_people_type(path: str, typed: str) -> None:
    assert shell_override("model.path", path) == typed


@pytest.mark.parametrize(("value", "spelled"), [
    ("~/läufe", "'~/läufe'"), ("7e12345", "'7e12345'"), ("1e1_0", "'1e1_0'"),
    ("runs/a-1", "runs/a-1"), ("null", "null"), ("a,b", "a,b"), ("'ä'", "'ä'"),
    ("a,7e12345,07,null", "a,'7e12345','07',null"), ("~/ä, 'b',1e3", "'~/ä', 'b','1e3'"),
    ("~/a,choice(b)", "~/a,choice(b)"), ("${oc.env:HOME}/ä", "${oc.env:HOME}/ä"),
])  # fmt: skip
def test_a_text_is_quoted_if_hydra_would_not_read_it_as_text(value: str, spelled: str) -> None:
    assert typed_override("run_dir", value) == f"run_dir={spelled}"
