"""What every training here would do again, and no test here asserts: draw the questions, tokenize them, draw curves."""

from collections.abc import Callable, Iterator

import pytest

from failing_engines import Runs
from qerl_lab.config.schema import TaskConfig
from qerl_lab.model.chat import Chat
from qerl_lab.report import plots
from qerl_lab.tasks import arithmetic
from qerl_lab.tasks.arithmetic import Problem

KNOWN: dict[str, list[Problem]] = {}
TOKENS: dict[str, list[int]] = {}


@pytest.fixture(scope="module", autouse=True)
def drawn_once() -> Iterator[None]:
    """The problems of a difficulty are drawn and tokenized once, and a run that ends draws no curves."""
    draw, tokenize = arithmetic._distinct, Chat.prompt_ids

    def problems(cfg: TaskConfig, count: int, of_heldout: bool) -> list[Problem]:
        key = f"{cfg.arithmetic} {count} {of_heldout}"
        if key not in KNOWN:
            KNOWN[key] = draw(cfg, count, of_heldout)
        return list(KNOWN[key])

    def prompt_ids(chat: Chat, messages: list[dict[str, str]]) -> list[int]:
        key = f"{chat.tokenizer.name_or_path} {chat.tokenizer.chat_template} {messages}"
        if key not in TOKENS:
            TOKENS[key] = tokenize(chat, messages)
        return list(TOKENS[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "_distinct", problems)
        patch.setattr(Chat, "prompt_ids", prompt_ids)
        patch.setattr(plots, "save_curves", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def new_runs(request: pytest.FixtureRequest, tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runs]:
    """Makes runs of the test file's SETTINGS with changes, each in a new directory."""

    def make(**changes: object) -> Runs:
        return Runs(tiny(**(request.module.SETTINGS | changes), run_dir=str(tmp_path_factory.mktemp("run"))))

    return make
