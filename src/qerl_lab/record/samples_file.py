"""RUN_DIR/samples.jsonl: a few completions of every step with their rewards, one per line."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from qerl_lab.record.line_file import LineFile

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


def encode_samples(samples: Iterable[Sample]) -> bytes:
    """Encode completions as lines of samples.jsonl; cut out the middle of long ones."""
    lines = [json.dumps(asdict(sample) | {"completion": _cut_out_middle(sample.completion)}) for sample in samples]
    return "".join(f"{line}\n" for line in lines).encode()


def _cut_out_middle(text: str) -> str:
    left_out = len(text) - CHARACTERS
    half = CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def _decode_sample(values: Any) -> Sample:
    sample = Sample(**values)
    float(sum(sample.rewards.values()))  # raises for anything but numbers
    return sample


SAMPLES_FILE = LineFile(NAME, "a sample", _decode_sample)
