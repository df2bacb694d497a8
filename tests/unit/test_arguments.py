"""KEY=VALUE words: read into typed options, or refused with what to type."""

from dataclasses import dataclass, fields

import pytest

from qerl_lab import arguments
from qerl_lab.config import ConfigError, option


@dataclass
class Options:
    name: str = option("a", "a name")
    path: str | None = option(None, "a path")
    parts: list[str] = option(["x"], "some parts")
    number: int = option(3, "a number", at_least=1)
    ratio: float = option(0.5, "a ratio", above=0, at_most=1)
    flag: bool = option(False, "a flag")
    way: str = option("up", "a way", choices=("up", "down"))


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("name=b=c", "name", "b=c"),
        ("name=1", "name", "1"),
        ("path=/x", "path", "/x"),
        ("path=null", "path", None),
        ("parts=[y, z]", "parts", ["y", "z"]),
        ("parts=y,z", "parts", ["y", "z"]),
        ("parts=[]", "parts", []),
        ("number=7", "number", 7),
        ("ratio=1", "ratio", 1.0),
        ("ratio=1e-3", "ratio", 1e-3),
        ("flag=true", "flag", True),
        ("way=down", "way", "down"),
    ],
)
def test_a_value_gets_the_type_of_its_key_and_the_others_their_defaults(word, key, value):
    read, defaults = arguments.read(Options, [word]), Options()
    assert getattr(read, key) == value
    assert type(getattr(read, key)) is type(value)
    assert {f.name for f in fields(Options) if getattr(read, f.name) != getattr(defaults, f.name)} <= {key}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("nmae=b", ["nmae is not a known key", "Did you mean name?", "Allowed: name, path"]),
        ("zzz=b", ["zzz is not a known key", "Allowed: name"]),
        ("name", ["Type name=VALUE"]),
        ("--name=b", ["--name=b is not a flag", "Type name=VALUE"]),
        ("--nope", ["--nope is not a flag", "Allowed: --help"]),
        ("name=a name=b", ["name is given twice"]),
        ("number=seven", ["number=seven", "a whole number", "number=3"]),
        ("number=1.5", ["number=1.5", "a whole number"]),
        ("number=0", ["number=0", "at least 1"]),
        ("number=null", ["number=null", "a whole number"]),
        ("ratio=x", ["ratio=x", "a number", "ratio=0.5"]),
        ("ratio=nan", ["ratio=nan", "finite"]),
        ("ratio=0", ["ratio=0", "above 0"]),
        ("ratio=2", ["ratio=2", "at most 1"]),
        ("flag=yes", ["flag=yes", "true or false", "flag=false"]),
        ("way=dwon", ["way=dwon", "up, down", "Did you mean down?"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(words, parts):
    with pytest.raises(ConfigError) as refusal:
        arguments.read(Options, words.split())
    assert "\n" not in str(refusal.value)
    for part in parts:
        assert part in str(refusal.value)


def test_the_manual_has_every_key_with_default_meaning_and_bounds():
    text = arguments.manual("About.", "python -m x", Options(), (("python -m x name=b", "an example"),))
    words = " ".join(text.split())
    for part in (
        "name=a a name", "path=null a path", "parts=[x] some parts", "number=3 a number (at least 1)",
        "ratio=0.5 a ratio (above 0, at most 1)", "flag=false a flag", "way=up a way (up, down)",
        "python -m x name=b an example",
    ):  # fmt: skip
        assert part in words
    assert max(map(len, text.splitlines())) <= arguments.WIDTH
