"""Read the rows of a question set from local files or the Hugging Face hub.

A row that cannot become a question is left out and counted. More than 1% of such rows is an error, because then the
file or its columns are wrong.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl_lab.config.message import first_line, say_hub_is_asked, with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks.questions import BadRow, Question, Questions, is_heldout, note_bad_rows, wording

SUFFIXES = (".jsonl", ".parquet")
BATCH_ROWS = 1024
_SHARD = re.compile(r"-(\d+)-of-(\d+)")  # in the name of a file
ONE_IN = 64  # share held out by hash of a set without a test split
Located = tuple[str, Any]  # location and row: a line of JSON, or a dict


@dataclass(frozen=True)
class Source:
    """A question set: its id on the Hugging Face hub, its splits and its columns.

    If `test` is None, one in ONE_IN questions of `train` is held out, by a hash of the text without case and
    whitespace; or the rows of a file called test, if the user's directory has one.
    """

    hub_id: str
    hub_config: str
    train: str | None  # training split; None: for evaluation only
    test: str | None  # evaluation split
    columns: Mapping[str, str]  # names for "question", "answer", and "id" if rows have one; a dot leads into a struct
    file: str | None = None  # name of its files, if different from the split's

    def split(self, of_heldout: bool) -> str:
        """Return the name of the split for the training or held-out questions."""
        split = self.test if of_heldout and self.test else self.train
        assert split is not None, f"{self.hub_id} has no training split"
        return split


@dataclass(frozen=True)
class Row:
    """A row of a question set. Its methods take a role such as "question"; `columns` maps roles to names of columns."""

    values: Mapping[str, Any]
    columns: Mapping[str, str]

    def value(self, role: str) -> Any:
        """Return the value, of any type, in the column for `role`, e.g. "question". Raises BadRow if it is missing."""
        value: Any = self.values
        for part in self.columns[role].split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            has = sorted(name for name, found in self.values.items() if found is not None)
            raise BadRow(f"has no {self.columns[role]!r}; it has {has}")
        return value

    def text(self, role: str) -> str:
        """Return the text in the column for `role`. Raises BadRow if the value is missing, blank or not a text."""
        return checked_text(self.value(role), self.columns[role])

    def number_or_text(self, role: str) -> str:
        """Return the value in the column for `role` as stripped text. Numbers become text, 27.0 becomes "27".

        Raises BadRow if the value is missing, blank, or neither a number nor a text. Also raises it for a float with
        more than 15 significant digits: it is the result of a computation, and hardly any written answer equals it.
        """
        value, column = self.value(role), self.columns[role]
        if isinstance(value, float):
            if not math.isfinite(value):
                raise BadRow(f"has no number in {column!r}: {str(value)!r}")
            if value.is_integer():
                value = int(value)
            elif float(f"{value:.15g}") != value:
                raise BadRow(
                    f"has in {column!r} the computed number {value!r}, which no answer equals digit by digit: write "
                    'text, for example "0.3" or "1/3"'
                )
        return str(value) if type(value) in (int, float) else self.text(role).strip()


def checked_text(value: Any, column: str) -> str:
    """Return `value` unchanged. Raises BadRow unless it is text that is not blank and that UTF-8 can encode.

    The error names `column`.
    """
    if not isinstance(value, str):
        raise BadRow(f"has no text in {column!r}, but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"has nothing in {column!r}")
    try:
        value.encode()  # a tokenizer does, in the middle of a run
    except UnicodeEncodeError:
        raise BadRow(f"has half a character (a lone surrogate) in {column!r}") from None
    return value


Make = Callable[[str, Row], Question | None]


def read(cfg: TaskConfig, source: Source, of_heldout: bool, make: Make, prefix: str = "") -> Questions:
    """Read the training or held-out questions of a set from task.path, or from the hub if task.path is not set.

    `make(id, row)` returns a question. It may return None to leave the row out, or raise BadRow to have the row counted
    as bad. Questions keep the order of their rows. Of rows that repeat an id, the first is kept; one that differs from
    it is bad. Raises ConfigError if the rows cannot be read, or if over 1% of them are bad.

    Ids begin with `prefix`, or if that is empty with the last part of `source.hub_id`, else `cfg.name`. Reports pair
    the questions of runs by id, so ids do not depend on `task.module`, which may only grade the answers.
    """
    prefix = prefix or source.hub_id.rpartition("/")[2] or cfg.name
    columns = {**source.columns, **{role: name for role, name in vars(cfg.columns).items() if name is not None}}
    found, bad, total = dict[str, Question](), list[str](), 0
    if has_test_file(cfg.path, source):
        source = replace(source, test="test", file=None if of_heldout else source.file)
    for total, (where, values) in enumerate(_rows(cfg, source, of_heldout), start=1):
        try:
            row = Row(_parse_line(values) if isinstance(values, bytes) else values, columns)
            name = row.number_or_text("id") if columns.get("id") else f"{source.split(of_heldout)}-{total - 1}"
            question = make(f"{prefix}-{name}", row)
            if question is not None and found.setdefault(question.id, question) != question:
                raise BadRow(f"has the id {name!r} of a row before it")
        except BadRow as error:
            bad.append(f"{where} {error}")
    keys = " ".join(f"task.columns.{role}=NAME" for role in source.columns)
    remedy = (
        f"Check task.path (a line of .jsonl must be one JSON object), or say which columns to read: {keys}"
        f"{' (empty numbers the rows)' if source.columns.get('id') else ''}."
    )
    notes = note_bad_rows(bad, total, remedy)
    by_hash = source.test is None
    kept = (q for q in found.values() if not by_hash or is_heldout(wording(q.prompt), ONE_IN) == of_heldout)
    return Questions(kept, len(bad), notes)


def is_local(path: str, prefix: str = "task.path=") -> bool:
    """Return True if `path` exists on this machine, and False if it can be an id on the hub.

    Raises ConfigError if it is neither. `prefix` is what users type before the path; the message repeats it.
    """
    if (local := Path(path).expanduser()).exists():
        return True
    if local.suffix in SUFFIXES or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):
        raise ConfigError(
            f"{prefix}{path} is not there; allowed: a directory, a file (.jsonl, .parquet), or a hub id such as "
            f"openai/gsm8k. Type {prefix}DIRECTORY, or put the questions there: a link will do."
        )
    return False


def reword_path_error(error: ConfigError, prefix: str) -> ConfigError:
    """Reword an error about task.path for a command in which users type `prefix`, e.g. "task_path=", before the path.

    Such a command has no other keys of a task, such as task.columns.*, so the new message does not propose them.
    """
    message = str(error).replace("Check task.path.", f"Check {prefix}PATH.").replace("task.path=", prefix)
    message = re.sub(r"Type task\.gsm8k\..*", f"Type {prefix}PATH of other questions.", message)
    return ConfigError(re.sub(r"Check task\.path .*", f"Check {prefix}PATH and the names of its columns.", message))


def _rows(cfg: TaskConfig, source: Source, of_heldout: bool) -> Iterator[Located]:
    """Yield (location, row) of each row in task.path, or on the hub if task.path is not set.

    A row is a dict, or the bytes of a line of FILE.jsonl that is not blank; its location is FILE.jsonl:LINE.
    `of_heldout` selects the held-out rows, where these have a file or split of their own. Raises ConfigError if the
    rows cannot be read.
    """
    path = cfg.path or source.hub_id
    if not is_local(path):
        yield from _read_hub(path, source, of_heldout)
        return
    local = Path(path).expanduser()
    if local.is_file() and (local.suffix not in SUFFIXES or (source.test and not of_heldout)):
        raise ConfigError(
            f"task.path={local} is one file; allowed: FILE.jsonl or FILE.parquet of a set without a test split, or for "
            "an evaluation. Type task.path=DIRECTORY with train.jsonl and test.jsonl."
        )
    files = [local] if local.is_file() else _files_of(local, source, of_heldout)
    for file in files:
        try:
            if file.suffix == ".jsonl":
                with file.open("rb") as lines:
                    yield from ((f"{file}:{n}", line) for n, line in enumerate(lines, start=1) if line.strip())
            else:
                import pyarrow.parquet

                with pyarrow.parquet.ParquetFile(file) as opened:
                    yield from _of_batches(str(file), opened.iter_batches(BATCH_ROWS))
        except (OSError, ValueError) as error:  # no permission, a directory of that name, damage
            raise ConfigError(
                f"{file} cannot be read as {file.suffix} ({first_line(error)}). Check task.path."
            ) from error


def _files_of(folder: Path, source: Source, of_heldout: bool) -> list[Path]:
    """Find the file with the training or held-out rows in a local folder, or all shards of that file.

    Raises ConfigError if there is no such file.
    """
    # A file of held-out rows may also be called `test` if the split on the hub has another name.
    names = [source.split(of_heldout), source.file, "test" if of_heldout and source.test else None]
    if files := _find_split(folder, source, [name for name in names if name]):
        return files
    one_file = "" if source.train and source.test else ", or name a file: task.path=FILE.jsonl"
    raise ConfigError(
        f"task.path={folder} has no {names[0]}.jsonl, and no {names[0]}.parquet. Put the rows there{one_file}."
    )


def has_test_file(path: str | None, source: Source) -> bool:
    """Tell whether the directory `path` has a file called test, with held-out rows for a set without a test split."""
    if source.test is not None or path is None:
        return False
    folder = Path(path).expanduser()
    return folder.is_dir() and bool(_find_split(folder, source, ["test"]))


def _find_split(folder: Path, source: Source, names: Sequence[str]) -> list[Path]:
    """Find the rows of a split in a local folder: one file, or all its shards. Return [] if there are none.

    Tries the `names` of the split in order. Raises ConfigError if a shard is missing or there twice.
    """
    for inside in (folder, folder / "data", folder / source.hub_config):
        for name in names:
            for suffix in SUFFIXES:
                if (file := inside / f"{name}{suffix}").exists():
                    return [file]
            shards = sorted(file for file in inside.glob(f"{name}-*-of-*.parquet") if _SHARD.search(file.name))
            if shards:
                _refuse_incomplete(shards)
                return shards
    return []


def _refuse_incomplete(shards: Sequence[Path]) -> None:
    """Raise ConfigError unless the names of `shards`, such as train-00000-of-00002.parquet, have each number once."""
    pairs = [pair for file in shards for pair in _SHARD.findall(file.name)]
    numbers, total = sorted(int(number) for number, _ in pairs), min(int(total) for _, total in pairs)
    if numbers != list(range(total)):
        raise ConfigError(
            f"{shards[0].parent} holds {with_noun(len(shards), 'shard')} like {shards[0].name}, with the numbers "
            f"{', '.join(map(str, numbers))}; allowed: each number below {total} once. Download the split again."
        )


def _parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises BadRow if it is none."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:  # str(error) would count lines within this one
        raise BadRow(f"is not JSON ({error.msg}: character {error.pos + 1})") from None
    except ValueError as error:
        raise BadRow(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadRow(f"is JSON but no object: {line[:80]!r}")
    return row


def _of_batches(name: str, batches: Iterable[Any]) -> Iterator[Located]:
    """Yield (location, row) of each row of Arrow batches or tables. The row is a dict.

    The location is `name` and the number of the row, from 0.
    """
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from ((f"{name}, row {number},", row) for number, row in enumerate(rows))


def _read_hub(path: str, source: Source, of_heldout: bool) -> Iterator[Located]:
    """Yield (location, row) of each row in a split of the hub's dataset `path`. The row is a dict.

    `of_heldout` chooses the split (`Source.split`). The configuration is `source.hub_config`, or the default one if the
    dataset is not `source.hub_id` and lacks it. Raises ConfigError if the dataset cannot be loaded.
    """
    say_hub_is_asked(f"questions of {path}")
    from datasets import get_dataset_config_names, load_dataset

    split = source.split(of_heldout)
    try:
        own = path == source.hub_id or source.hub_config in get_dataset_config_names(path)
        rows = load_dataset(path, source.hub_config if own else None, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # offline, unknown id, unknown split
        is_offline = isinstance(error, ConnectionError)
        files = f"{split}.jsonl or {split}.parquet, or task.path=FILE.jsonl"
        if source.test and not of_heldout:  # one file cannot be both
            files = f"{split}.jsonl and {source.test}.jsonl, or with both as .parquet"
        why = "the hub cannot be reached" if is_offline else f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"the question set {path!r} is no local file or directory, and could not be loaded from the hub ({why}). "
            f"Type task.path=DIRECTORY with {files}."
        ) from error
    yield from _of_batches(path, rows.with_format("arrow").iter(BATCH_ROWS))
