"""RUN_DIR/samples.jsonl: a few completions of every step with their rewards, one per line.

A step's lines are written together, after its metrics; a resumed run cuts both files at the same step.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from qerl_lab.config.option import ConfigError, parse_json
from qerl_lab.system.disk import replace_file

PER_STEP = 4  # questions per step, one completion each
CHARACTERS = 4000  # the middle of a longer completion is cut out
NAME = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """A completion of a step (from 1). `rewards` are by part; `finished` means that it ended with an end token."""

    step: int
    question_id: str
    question: str
    completion: str
    rewards: dict[str, float]
    finished: bool


def append(run_dir: Path, samples: Iterable[Sample]) -> None:
    """Append the samples of one step in one write; cut out the middle of long completions."""
    lines = [json.dumps(asdict(sample) | {"completion": _shorten(sample.completion)}) for sample in samples]
    with (run_dir / NAME).open("ab") as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _shorten(text: str) -> str:
    left_out = len(text) - CHARACTERS
    half = CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def read_samples(run_dir: Path) -> list[Sample]:
    """Read the completions in file order, without an incomplete last line of a killed process.

    Raises FileNotFoundError, and ConfigError naming a line that is not a sample.
    """
    path = run_dir / NAME
    return [_decode(line, f"{path}, line {n},") for n, line in enumerate(_whole_lines(path), 1)]


def cut(run_dir: Path, last_step: int) -> None:
    """Delete the samples of steps after `last_step`, and a torn last line, atomically. The file may be missing.

    Raises ConfigError for any other line that is not a sample.
    """
    path = run_dir / NAME
    if path.exists():
        kept = [line for line in _whole_lines(path) if _decode(line, str(path)).step <= last_step]
        replace_file(path, b"".join(kept))


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _decode(line: bytes, where: str) -> Sample:
    try:
        sample = Sample(**parse_json(line))
        texts, rewards = (sample.question_id, sample.question, sample.completion), sample.rewards
        if not (isinstance(sample.step, int) and all(isinstance(text, str) for text in texts)):
            raise TypeError("not a step and texts")
        if not all(isinstance(reward, int | float) for reward in rewards.values()):
            raise TypeError("rewards are not numbers")
        return sample
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is not a sample: {line[:80]!r}. Move the file away to go on without it.") from error
