"""Files in a run directory with one JSON record per line, each with its step.

samples.jsonl is such a file. It has a few completions of every step.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from qerl_lab.config.option import ConfigError
from qerl_lab.system.disk import replace_file

T = TypeVar("T")


@dataclass(frozen=True)
class LineFile(Generic[T]):
    """Reads and writes the file `name` in a run directory. A missing file reads as empty.

    A killed process may leave an incomplete last line. Readers skip it, and `cut` removes it.

    Attributes:
        kind: what messages call a record, e.g. "a sample".
        decode: converts parsed JSON, with the key "step", to a record; raises ValueError or TypeError if it cannot.
    """

    name: str
    kind: str
    decode: Callable[[Any], T]

    def read(self, run_dir: Path, offset: int = 0) -> tuple[list[T], int]:
        """Read the complete lines from byte `offset` on; return their records and the offset of the next line.

        Raises ConfigError for a line that is not a record.
        """
        parsed = self._parse(run_dir, offset)
        return [record for _, _, record in parsed], offset + sum(len(line) for line, _, _ in parsed)

    def cut(self, run_dir: Path, last_step: int) -> None:
        """Delete the records of steps after `last_step`, atomically. Raises ConfigError for a damaged file."""
        if (run_dir / self.name).exists():
            kept = [line for line, step, _ in self._parse(run_dir) if step <= last_step]
            replace_file(run_dir / self.name, b"".join(kept))

    def _parse(self, run_dir: Path, offset: int = 0) -> list[tuple[bytes, int, T]]:
        """Return (line, step, record) of each complete line from byte `offset` on; [] if there is no file.

        Raises ConfigError for a line that is not a record.
        """
        path, parsed = run_dir / self.name, list[tuple[bytes, int, T]]()
        if not path.exists():
            return parsed
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        for index, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True)):
            try:
                values = json.loads(line)
                record = self.decode(values)
                parsed.append((line, values["step"], record))
            except (ValueError, TypeError, AttributeError, OverflowError) as error:
                number = path.read_bytes().count(b"\n", 0, offset) + index + 1
                raise ConfigError(
                    f"{path}, line {number}, is not {self.kind}: {line.rstrip()[:80]!r}. "
                    "Delete the line, or put the file back as it was."
                ) from error
        return parsed

    def append(self, run_dir: Path, lines: bytes) -> None:
        """Append complete lines in one write. Raises OSError with the file's name, also if the disk is full."""
        path = run_dir / self.name
        try:
            with path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            error.filename = str(path)  # a failed write names no file
            raise


PER_STEP = 4  # questions per step, one completion each
CHARACTERS = 4000  # the middle of a longer completion is cut out


@dataclass(frozen=True)
class Sample:
    """A completion sampled in a training step (from 1).

    `rewards` maps each part of the reward to its value; their sum is the reward. `finished` tells whether the
    completion ended with an end token, not at the token limit.
    """

    step: int
    question_id: str
    question: str
    completion: str
    rewards: dict[str, float]
    finished: bool


def encode_samples(samples: Iterable[Sample]) -> bytes:
    """Encode completions as lines of samples.jsonl; cut out the middle of those longer than CHARACTERS."""
    half, lines = CHARACTERS // 2, list[str]()
    for sample in samples:
        text, left_out = sample.completion, len(sample.completion) - CHARACTERS
        if left_out > 0:
            text = f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"
        lines.append(json.dumps(asdict(sample) | {"completion": text}) + "\n")
    return "".join(lines).encode()


def _decode_sample(values: Any) -> Sample:
    """Convert a parsed line of samples.jsonl; raise an error unless it has the fields of Sample and number rewards."""
    sample = Sample(**values)
    float(sum(sample.rewards.values()))  # raises for anything but numbers
    return sample


SAMPLES_FILE = LineFile("samples.jsonl", "a sample", _decode_sample)
