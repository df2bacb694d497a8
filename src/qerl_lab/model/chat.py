"""Questions as a model's chat template writes them, and what is refused of a template."""

import multiprocessing
import os
import resource
from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB

SECONDS = 10  # of CPU time for the first chat; a usual one takes a millisecond
WALL_SECONDS = 6 * SECONDS
MEMORY_BYTES = GIB  # that the first chat may take
NO_MEMORY = 3  # exit status of the trial
OF_ROLE = {
    "system": ("the instruction", "Type task.instruction='', or another model"),
    "user": ("the question", "Type another model"),
}


class Chat:
    """Writes chats by a tokenizer's template.

    Attributes:
        day: what a template that writes a date is told. A run keeps the day on which it began, so that its prompts
            stay the same.
        writes_date: whether the template has asked for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.day, self.writes_date, self._is_tried = tokenizer, date.today(), False, False

    @property
    def notes(self) -> list[str]:
        """What to tell of it, once chats were written."""
        return [f"the chat template writes a date into each prompt, here always {self.day}"] if self.writes_date else []

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the answer begins.

        Raises ConfigError for a template that raises, that leaves a message out, or that takes more than SECONDS or
        MEMORY_BYTES for the first chat.
        """
        said = f"the chat template of {self.tokenizer.name_or_path}"
        if not self._is_tried:
            _try(lambda: self._applied(messages, tokenize=False), said)
            self._is_tried = True
        try:
            text = self._applied(messages, tokenize=False)
            ids = self._applied(messages, return_dict=True)["input_ids"]
        except Exception as error:  # a template is a program, which raises what it likes
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ConfigError(
                f"{said} refuses the questions ({kind}{in_one_line(error)}). Where it takes no system message, type "
                "task.instruction=''."
            ) from error
        for message in messages:
            if message["content"].strip() not in text:
                what, remedy = OF_ROLE[message["role"]]
                raise ConfigError(
                    f"{said} leaves out {what}, so that the model would never read it. {remedy}, or put a "
                    "chat_template.jinja into its directory that writes every message."
                )
        return ids

    def _applied(self, messages: list[dict[str, str]], **output: bool) -> Any:
        """What the tokenizer makes of a chat: text with tokenize=False, a dict of token ids with return_dict=True."""

        def strftime_now(form: str) -> str:  # in place of the one of transformers, by which templates ask for the date
            self.writes_date = True
            return datetime.combine(self.day, time()).strftime(form)

        # The tokenizers of mistral-common take no variable that they do not know.
        dated = {"strftime_now": strftime_now} if "strftime_now" in str(self.tokenizer.chat_template) else {}
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **output, **dated)


def _try(write: Callable[[], Any], said: str) -> None:
    """Write in a fork of this process, which the kernel limits. Raises ConfigError, which begins with `said`.

    It tells nothing of what `write` raises, because this process is about to write the same.
    """
    trial = multiprocessing.get_context("fork").Process(target=_limited, args=(write,))
    trial.start()
    trial.join(WALL_SECONDS)
    if trial.exitcode is None:
        trial.kill()
        trial.join()
    if trial.exitcode == 0:
        return
    most = f"{MEMORY_BYTES / GIB:g} GiB of memory" if trial.exitcode == NO_MEMORY else f"{SECONDS} s"
    raise ConfigError(f"{said} takes more than {most} to write one question. Type another model, or mend the template.")


def _limited(write: Callable[[], Any]) -> None:
    """The trial's whole life. It leaves without cleaning up what it shares with its parent, CUDA among it."""
    status = 0
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    for what, most in ((resource.RLIMIT_AS, held + MEMORY_BYTES), (resource.RLIMIT_CPU, SECONDS)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        write()
    except MemoryError:
        status = NO_MEMORY
    finally:  # whatever else it raises
        os._exit(status)
