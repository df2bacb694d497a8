"""Read the rows of a question set from local files or the Hugging Face hub.

A row that cannot become a question is left out and counted. More than 1% of such rows is an error, because then the
file or its columns are wrong.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab.config.message import first_line, say_hub_is_asked
from qerl_lab.config.option import ConfigError, parse_json
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import BadRow, LeftOut, Question, Questions, is_heldout, label, wording
from qerl_lab.tasks.answers import number

SUFFIXES = (".jsonl", ".parquet")
BATCH_ROWS = 1024
_BRACES, _STEP = re.compile(r"(?:\\\\.)|[{}]"), {"{": 1, "}": -1}
Located = tuple[str, "dict[str, Any] | BadRow"]  # location and row


@dataclass(frozen=True)
class Source:
    """A question set on the hub.

    Attributes:
        train: training split; None for a set for evaluation only.
        test: evaluation split; None if there is none, so that a share of `train` is held out by hash.
        columns: column names for "question", "answer", and "id" if rows have one. A dot leads into a struct.
        one_in: one question in this many is held out by a hash of its text, ignoring whitespace and case.
        repeats: whether the set repeats rows, which then count once.
        file: name of its files, if different from the split's.
    """

    hub_id: str
    hub_config: str
    train: str | None
    test: str | None
    columns: Mapping[str, str]
    one_in: int = 64
    repeats: bool = False
    file: str | None = None

    def split(self, of_heldout: bool) -> str:
        """Return the split that contains the training or held-out questions."""
        found = self.test if of_heldout and self.test else self.train
        assert found is not None, f"{self.hub_id} has no training split"
        return found


@dataclass(frozen=True)
class Row:
    """A row, read by the roles of its columns. Every method raises BadRow for an unusable value."""

    values: Mapping[str, Any]
    columns: Mapping[str, str]

    def value(self, what: str) -> Any:
        """Return the value of the column for `what`, of any type but null."""
        found: Any = self.values
        for part in self.columns[what].split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            raise BadRow(f"has no {self.columns[what]!r}; it has {sorted(map(str, self.values))}")
        return found

    def text(self, what: str) -> str:
        """Return a non-empty text."""
        return as_text(self.value(what), self.columns[what])

    def number_or_text(self, what: str) -> str:
        """Return a text, or a number as text: 27.0 becomes "27"."""
        found = self.value(what)
        if type(found) is float and math.isfinite(found):
            return str(int(found) if found.is_integer() else found)
        return str(found) if type(found) is int else self.text(what).strip()

    def number(self, what: str) -> str:
        """Return one number as written."""
        found = self.number_or_text(what)
        if number(found) is None:
            raise BadRow(f"has no number in {self.columns[what]!r}: {found[:80]!r}")
        return found

    def latex(self, what: str) -> str:
        """Return LaTeX with balanced braces, or a number."""
        found = self.number_or_text(what)
        depths = list(
            itertools.accumulate(_BRACES.findall(found), lambda depth, found: depth + _STEP.get(found, 0), initial=0)
        )
        if min(depths) < 0 or depths[-1] != 0:
            raise BadRow(f"has braces that do not close in {self.columns[what]!r}: {found[:80]!r}")
        return found


def as_text(value: Any, column: str) -> str:
    """Return `value` if it is non-empty text that UTF-8 can encode. Raises BadRow."""
    if not isinstance(value, str):
        raise BadRow(f"has no text in {column!r}, but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"has nothing in {column!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"has half a character (a lone surrogate) in {column!r}") from None
    return value


Make = Callable[[str, Row], Question | None]


def read(cfg: TaskConfig, source: Source, of_heldout: bool, make: Make) -> Questions:
    """Return the training or held-out questions, in row order.

    Args:
        make: makes a question from id and row. None filters the row out, BadRow counts it as bad.

    Raises:
        ConfigError: nothing can be read, or more than 1% of the rows are bad.
    """
    columns = {**source.columns, **{what: name for what, name in vars(cfg.columns).items() if name is not None}}
    found, split, place = dict[str, Question](), source.split(of_heldout), _place(cfg, source, of_heldout)
    total, bad = 0, list[str]()
    for total, (where, values) in enumerate(place.rows(), start=1):
        try:
            if isinstance(values, BadRow):
                raise values
            row = Row(values, columns)
            question = make(_id(label(cfg), split, total - 1, row), row)
            if question is not None:
                _add(found, question, source.repeats)
        except BadRow as error:
            bad.append(f"{where} {error}")
    left_out = LeftOut(len(bad), total, bad[0] if bad else "")
    left_out.check(place.remedy)
    by_hash = source.test is None
    kept = (q for q in found.values() if not by_hash or is_heldout(wording(q.prompt), source.one_in) == of_heldout)
    return Questions(kept, [left_out])


def _id(name: str, split: str, number: int, row: Row) -> str:
    """Return a question id from the set's own id column, or else from the row number."""
    if row.columns.get("id"):
        return f"{name}-{row.number_or_text('id')}"
    return f"{name}-{split}-{number}"


def _add(found: dict[str, Question], question: Question, repeats: bool) -> None:
    """Add a question. Raises BadRow for a repeated id."""
    known = found.setdefault(question.id, question)
    if known is question or (repeats and known == question):
        return
    raise BadRow(f"has the id {question.id.partition('-')[2]!r} of a row before it")


def is_local(path: str, before: str = "task.path=") -> bool:
    """Return whether a path means local files and not a hub dataset. Raises ConfigError if it is neither.

    `before` is the text before the path in the typed option.
    """
    local = Path(path).expanduser()
    if local.exists() or local.suffix in SUFFIXES:
        return True
    if path.startswith(("/", ".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ConfigError(
            f"{before}{path} is not there; allowed: a directory, a file (.jsonl, .parquet), or a hub id such as "
            f"openai/gsm8k. Type {before}DIRECTORY."
        )
    return False


def respelled(error: ConfigError, before: str) -> ConfigError:
    """Rewrite an error for a command that takes the path after `before` and has no column options."""
    said = str(error).replace("Check task.path.", f"Check {before}PATH.").replace("task.path=", before)
    columns = f"Check {before}PATH and the names of its columns."
    return ConfigError(re.sub(r"Check task\.path, or say .*", columns, said))


@dataclass(frozen=True)
class Place:
    """Where rows are read; `remedy` says what to type if they are unusable."""

    rows: Callable[[], Iterator[Located]]
    remedy: str


def _place(cfg: TaskConfig, source: Source, of_heldout: bool) -> Place:
    """Return where to read the rows: the hub, a folder or a file. Raises ConfigError."""
    path = cfg.path or source.hub_id
    local, split = Path(path).expanduser(), source.split(of_heldout)
    columns = (
        "Check task.path, or say which columns to read: task.columns.question=NAME task.columns.answer=NAME"
        f"{' task.columns.id=NAME (empty numbers the rows)' if source.columns.get('id') else ''}."
    )
    if not is_local(path):
        return Place(lambda: _read_hub(path, split, source), columns)
    if local.is_dir():
        files = _files_of(local, _names(source, split, of_heldout), source.hub_config)
    else:
        files = [_file(local, source, of_heldout)]
    return Place(lambda: (row for file in files for row in _read_file(file)), columns)


def _file(file: Path, source: Source, of_heldout: bool) -> Path:
    """Check a single file: it must exist and belong to a set without separate splits, or be for evaluation."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(
            f"task.path={file} is a file that is neither .jsonl nor .parquet. Type task.path=FILE.jsonl, FILE.parquet, "
            "or a directory with train.jsonl and test.jsonl."
        )
    if not file.is_file():
        raise ConfigError(f"task.path={file} is not there. Type task.path=FILE.jsonl, or a directory.")
    if source.test and not of_heldout:
        raise ConfigError(
            f"task.path={file} is a file, and this task keeps training and test questions in two. "
            "Type task.path=DIRECTORY with train.jsonl and test.jsonl."
        )
    return file


def _names(source: Source, split: str, of_heldout: bool) -> list[str]:
    """Return the possible file names for a role: the split's, the set's own, and "test" for evaluation."""
    return [split, *([source.file] if source.file else []), *(["test"] if of_heldout and source.test else [])]


def _files_of(folder: Path, names: list[str], hub_config: str) -> list[Path]:
    """Return the files named after the first match in `names`, in a plain folder or the hub's layout."""
    for inside in (folder, folder / "data", folder / hub_config):
        for name in names:
            for pattern in (f"{name}.jsonl", f"{name}.parquet", f"{name}-*-of-*.parquet"):
                if files := sorted(inside.glob(pattern)):
                    return files
    raise ConfigError(
        f"task.path={folder} has no {names[0]}.jsonl, and no {names[0]}.parquet. Put the rows there, or name a file: "
        "task.path=FILE.jsonl."
    )


def _read_file(file: Path) -> Iterator[Located]:
    return _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)


def _read_jsonl(file: Path) -> Iterator[Located]:
    """Yield one row per line, skipping blank lines."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}:{number}", _parsed(line)
    except OSError as error:  # a directory of that name, or no read permission
        raise _unreadable(file, error) from error


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        row = parse_json(line.decode("utf-8-sig"))  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return BadRow(f"is not JSON ({error})")
    return row if isinstance(row, dict) else BadRow(f"is JSON but no object: {line[:80]!r}")


def _read_parquet(file: Path) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            yield from _of_batches(str(file), opened.iter_batches(BATCH_ROWS))
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} cannot be read as {file.suffix} ({first_line(error)}). Check task.path.")


def _of_batches(name: str, batches: Iterable[Any]) -> Iterator[Located]:
    """Yield the rows of Arrow batches or tables. Invalid UTF-8 makes one row bad, not its whole batch."""
    number = 0
    for batch in batches:
        try:
            rows: list[dict[str, Any] | BadRow] = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_decoded(batch.slice(n, 1)) for n in range(batch.num_rows)]
        for row in rows:
            yield f"{name}, row {number},", row
            number += 1


def _decoded(row: Any) -> dict[str, Any] | BadRow:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 ({error.reason})")


def _read_hub(path: str, split: str, source: Source) -> Iterator[Located]:
    """Yield rows of `source` or another hub dataset, in the same configuration if that has it."""
    say_hub_is_asked(f"task.path={path}")
    from datasets import get_dataset_config_names, load_dataset

    try:
        own = path == source.hub_id or source.hub_config in get_dataset_config_names(path)
        rows = load_dataset(path, source.hub_config if own else None, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # offline, unknown id, unknown split
        is_offline = isinstance(error, ConnectionError)
        why = "the hub cannot be reached" if is_offline else f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"the question set {path!r} is no local file or directory, and could not be loaded from the hub ({why}). "
            f"Type task.path=DIRECTORY with {split}.jsonl or "
            f"{split}.parquet, or task.path=FILE.jsonl."
        ) from error
    yield from _of_batches(path, rows.with_format("arrow").iter(BATCH_ROWS))
