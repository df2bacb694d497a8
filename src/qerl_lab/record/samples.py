"""RUN_DIR/samples.jsonl: a few sampled completions of every step, with what they earned.

A line a completion. The lines of a step are written at once, after its metrics; a resumed run cuts both files alike.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from qerl_lab.config.option import ConfigError
from qerl_lab.disk import replace_file

PER_STEP = 4  # the first completions of so many questions
CHARACTERS = 4000  # a longer completion is kept without its middle
NAME = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """A completion of a step (from 1). `rewards` are its parts by name; `finished`: it ended by an end token."""

    step: int
    question_id: str
    question: str
    completion: str
    rewards: dict[str, float]
    finished: bool


def append(run_dir: Path, samples: Iterable[Sample]) -> None:
    """Add the samples of one step, in one write; the middle of a long completion is left out."""
    lines = [json.dumps(asdict(sample) | {"completion": _shortened(sample.completion)}) for sample in samples]
    with (run_dir / NAME).open("ab") as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _shortened(text: str) -> str:
    left_out = len(text) - CHARACTERS
    half = CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def read_samples(run_dir: Path) -> list[Sample]:
    """Read the completions in the order written. A last line without its end (a killed process) is left out.

    Raises FileNotFoundError, and ConfigError naming a line that is no sample.
    """
    path = run_dir / NAME
    return [_decode(line, f"{path}, line {n},") for n, line in enumerate(_whole_lines(path), 1)]


def cut(run_dir: Path, last_step: int) -> None:
    """Drop the samples of every step after `last_step`, and a torn line, atomically. No file is no error.

    Raises ConfigError for another line that is no sample.
    """
    path = run_dir / NAME
    if path.exists():
        kept = [line for line in _whole_lines(path) if _decode(line, str(path)).step <= last_step]
        replace_file(path, b"".join(kept))


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _decode(line: bytes, where: str) -> Sample:
    try:
        sample = Sample(**json.loads(line))
        texts, rewards = (sample.question_id, sample.question, sample.completion), sample.rewards
        if not (isinstance(sample.step, int) and all(isinstance(text, str) for text in texts)):
            raise TypeError("not a step and texts")
        if not all(isinstance(reward, int | float) for reward in rewards.values()):
            raise TypeError("rewards are not numbers")
        return sample
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where} is not a sample: {line[:80]!r}. Move the file away to go on without it.") from error
