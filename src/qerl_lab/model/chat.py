"""Load and save a tokenizer, render questions with its chat template, and choose its padding token."""

from collections.abc import Collection
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError

# How a tokenizer was loaded. transformers (5.17) saves this as if it were a property of the tokenizer.
LOADING_OPTIONS = ("is_local", "local_files_only")
# Replaces transformers' strftime_now, by which templates ask for the date. It is part of the template because
# transformers from 5.22 on gives a template plain data, no functions. The newline ends the tag, and is not written.
DATE_MACRO = (
    "{% macro strftime_now(form) %}{{ dates[form] or raise_exception('no date in the form ' ~ form) }}{% endmacro %}\n"
)
LEFT_OUT = {"system": "the instruction", "user": "the question"}  # role -> content, as messages name it


class Chat:
    """Renders chats with a tokenizer's template.

    Attributes:
        key: the key with which the user sets the instruction, for messages; empty in a command without one.
        embeddings: the model's number of embeddings; None if the ids of prompts are not to be checked.
        end_ids: the token ids that end a completion; empty if the template's end of an answer is not to be checked.
        day: the date for templates that write a date. A run keeps the day of its start when it resumes, so that its
            prompts stay the same.
        writes_date: whether the template has written the date into a prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, key: str = "task.instruction", embeddings: int | None = None,
        end_ids: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.tokenizer, self.key, self.embeddings, self.end_ids = tokenizer, key, embeddings, end_ids
        self.day, self.writes_date = date.today(), False

    @property
    def notes(self) -> list[str]:
        """Return lines to print for the user: on a date in the prompts, on an end of turn that ends no completion."""
        notes = list[str]()
        if self.writes_date:
            notes.append(f"the chat template writes a date into each prompt, here always {self.day}")
        end = self._end_of_answer()
        if end and self.end_ids and (number := self.tokenizer.convert_tokens_to_ids(end)) not in self.end_ids:
            notes.append(
                f"the chat template ends an answer with {end}, which ends no completion: a model that writes it goes "
                f"on to the token limit. Add {number} to eos_token_id in the model's generation_config.json"
            )
        return notes

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat up to the answer.

        `messages` have keys `role` and `content`. Raises ConfigError if the template raises an error or leaves a
        message out, or if the model has no embedding for a token.
        """
        template = f"the chat template of {self.tokenizer.name_or_path}"
        another = "another model, or put a chat_template.jinja into its directory that writes every message."
        remedy = f"Type {self.key}='' if it takes no system message, or {another}" if self.key else f"Type {another}"
        try:
            dates = self._dates()
            text = self._apply_template(messages, dates, add_generation_prompt=True, tokenize=False)
            ids = self._apply_template(messages, dates, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template is a program and may raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ConfigError(f"{template} refuses the questions ({kind}{in_one_line(error)}). {remedy}") from error
        self.writes_date = self.writes_date or any(day in text for day in dates.values())
        for message in reversed(messages):  # the question first, because no instruction mends a template without it
            if message["content"].strip() not in text:
                problem = f"{template} leaves out {LEFT_OUT[message['role']]}, so that the model would never read it."
                raise ConfigError(f"{problem} {remedy if message['role'] == 'system' else f'Type {another}'}")
        if self.embeddings is not None and (largest := max(ids)) >= self.embeddings:
            raise ConfigError(
                f"{template} writes {self.tokenizer.decode([largest])!r}, token {largest}, and the model has "
                f"{self.embeddings} embeddings; allowed: tokens below that. Put the model's own tokenizer beside it."
            )
        return ids

    def _end_of_answer(self) -> str | None:
        """Return the special token that the chat template writes after an answer.

        None if it writes no special token there, or if the template or the tokenizer fails.
        """
        chat = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
        try:
            text = self._apply_template(chat, self._dates(), tokenize=False)
            tokens = self.tokenizer.added_tokens_decoder.values()  # mistral-common's tokenizers have none
        except Exception:  # a template is a program and may raise anything; no prompt has an answer
            return None
        after = text.rpartition("This.")[2].lstrip()
        ends = [token.content for token in tokens if token.special and after.startswith(token.content)]
        return max(ends, key=len, default=None)

    def _dates(self) -> dict[str, str]:
        """Return the chat's day in each form that the template has, such as "%d %b %Y": {} if it asks for no date."""
        template = str(self.tokenizer.chat_template)
        tokens = Environment().lex(template) if "strftime_now" in template else ()
        forms = [text[1:-1] for _, kind, text in tokens if kind == "string" and "%" in text]
        return {form: datetime.combine(self.day, time()).strftime(form) for form in forms}

    def _apply_template(self, messages: list[dict[str, str]], dates: dict[str, str], **options: bool) -> Any:
        """Write a chat with the template, and return it.

        Returns text with tokenize=False, and a dict with the token ids as "input_ids" with return_dict=True.
        """
        dated: dict[str, Any] = {}
        # mistral-common's tokenizers, used where vLLM is installed, refuse unknown variables.
        if "strftime_now" in str(self.tokenizer.chat_template):
            dated = {"chat_template": DATE_MACRO + self.tokenizer.get_chat_template(), "dates": dates}
        return self.tokenizer.apply_chat_template(messages, **options, **dated)


def load_tokenizer(folder: Path, **options: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder` as tokenizer.json says; `options` are further arguments of `from_pretrained`.

    AutoTokenizer is asked only without such a file. transformers (5.17) chooses a class by tokenizer_config.json or by
    the architecture, and some classes replace the file's rules by their own (transformers #48206): the LlamaTokenizer
    of DeepSeek-Math drops all spaces, and every model of type qwen2 gets Qwen's groups of digits.
    """
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, **options)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files to `folder`, identical with and without access to the hub (HF_HUB_OFFLINE=1).

    Otherwise model.hash would differ between two copies of one model.
    """
    for name in LOADING_OPTIONS:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def pad_id(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> int:
    """Return the id of the token to pad with: the tokenizer's padding token, or its end token.

    The end token serves if the model has no embedding for the padding token; padding is masked, so any token would do.
    `embeddings` is the model's number of embeddings. Raises ConfigError if neither id is below it.
    """
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None and number < embeddings:
            return number
    raise ConfigError(
        f"the tokenizer's end token is {tokenizer.eos_token!r}, id {tokenizer.eos_token_id}, and the model has "
        f"{embeddings} embeddings; allowed: an end token that the model has. Put the model's own tokenizer beside it."
    )
