"""What every command does that refuses its words."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def refusal_of(
    main: Callable[[list[str]], int], words: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 2
) -> str:
    """Return the message of a command that ends with `code`.

    Asserts that the message is one line, and that the command prints nothing else and makes no file here.
    """
    before = set(Path.cwd().rglob("*"))
    ended = main(list(words))
    out, message = capsys.readouterr()
    assert (ended, out) == (code, ""), message
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    for noise in ("Traceback", "HYDRA_FULL_ERROR", "full_key", "object_type"):
        assert noise not in message
    assert set(Path.cwd().rglob("*")) == before
    return message
