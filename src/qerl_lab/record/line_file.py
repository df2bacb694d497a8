"""Files with a JSON record per line, each of a step: metrics.jsonl and samples.jsonl."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from qerl_lab.config.option import ConfigError, parse_json
from qerl_lab.system.disk import replace_file

T = TypeVar("T")


@dataclass(frozen=True)
class LineFile(Generic[T]):
    """A file of this name in every run directory.

    A killed process may leave an incomplete last line. Readers skip it, and `cut` removes it.

    Attributes:
        kind: name of a record in messages.
        decode: converts parsed JSON, with the key "step", to a record; raises ValueError or TypeError if it cannot.
    """

    name: str
    kind: str
    decode: Callable[[Any], T]

    def read(self, run_dir: Path, offset: int = 0) -> tuple[list[T], int]:
        """Read the complete lines from byte `offset` on; return their records and the next offset.

        Raises FileNotFoundError, and ConfigError for a line that is not a record.
        """
        with (run_dir / self.name).open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        after = f" after byte {offset}" if offset else ""
        lines = ((line, f"line {number}{after}") for number, line in enumerate(whole.splitlines(), 1))
        return [self._decode_line(line, run_dir, where) for line, where in lines], offset + len(whole)

    def _decode_line(self, line: bytes, run_dir: Path, where: str) -> T:
        try:
            return self.decode(parse_json(line))
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"{run_dir / self.name}, {where}, is not {self.kind}: {line[:80]!r}. "
                "Take the line out, or put the file back as it was."
            ) from error

    def append(self, run_dir: Path, lines: bytes) -> None:
        """Append complete lines in one write. Raises OSError with the file's name, also if the disk is full."""
        path = run_dir / self.name
        try:
            with path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            error.filename = str(path)  # a failed write names no file
            raise

    def cut(self, run_dir: Path, last_step: int) -> None:
        """Delete the records of steps after `last_step`, atomically. The file may be missing."""
        path = run_dir / self.name
        if not path.exists():
            return
        self.read(run_dir)  # refuses a damaged file
        whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        replace_file(path, b"".join(line for line in whole if parse_json(line)["step"] <= last_step))
