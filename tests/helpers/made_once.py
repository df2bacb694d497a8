"""Make policies and the drawn and tokenized questions of arithmetic once, for many tests."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from qerl_lab.config.schema import POCKET, RunConfig
from qerl_lab.config.task import TaskConfig
from qerl_lab.model.chat import Chat
from qerl_lab.model.policy import Policy
from qerl_lab.tasks import arithmetic
from qerl_lab.tasks.arithmetic import Problem

Build = Callable[[RunConfig, torch.device], Policy]
PROBLEMS: dict[str, list[Problem]] = {}
TOKENS: dict[str, list[int]] = {}


def copies(build: Build) -> Build:
    """Return `build` that makes each kind of embedded policy once, and copies it in a quarter of the time.

    It keeps the last eight kinds.
    """
    known: dict[str, Policy] = {}

    def build_or_copy(cfg: RunConfig, device: torch.device) -> Policy:
        if cfg.model.path != POCKET or cfg.trains_all:  # a copy would separate the clean norms from the trained ones
            return build(cfg, device)
        kind = str((cfg.model, cfg.format, cfg.lora, cfg.aqn.norms, cfg.seed, device))
        if kind not in known:
            if len(known) == 8:
                del known[next(iter(known))]
            known[kind] = build(cfg, device)
        return copy.deepcopy(known[kind], {id(known[kind].tokenizer): known[kind].tokenizer})

    return build_or_copy


@contextmanager
def questions() -> Iterator[pytest.MonkeyPatch]:
    """Draw and tokenize the problems of a difficulty once in this process. Yields a patch for more of the kind."""
    draw, tokenize = arithmetic._distinct, Chat.prompt_ids

    def problems(cfg: TaskConfig, of_heldout: bool) -> list[Problem]:
        key = f"{cfg.arithmetic} {cfg.train_questions} {of_heldout}"
        if key not in PROBLEMS:
            PROBLEMS[key] = draw(cfg, of_heldout)
        return list(PROBLEMS[key])

    def prompt_ids(chat: Chat, messages: list[dict[str, str]]) -> list[int]:
        key = f"{chat.tokenizer.name_or_path} {chat.tokenizer.chat_template} {messages}"
        if key not in TOKENS:
            TOKENS[key] = tokenize(chat, messages)
        return list(TOKENS[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "_distinct", problems)
        patch.setattr(Chat, "prompt_ids", prompt_ids)
        yield patch
