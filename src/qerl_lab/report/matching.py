"""Match records: equal questions in other files, copies of one run, and runs at once on one machine. Pure."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from qerl_lab.report.arms import FINISHED, QUESTIONS, Run, fill_in_device
from qerl_lab.report.runs import Record


def match_questions(records: Sequence[Record]) -> list[Record]:
    """Return records with equal task.path for equal questions, and a marked path where questions changed.

    Runs on equal questions get the path seen first. Questions are equal by their SHA-256. An older record lacks the
    SHA-256 of the held-out questions, which is then taken from runs on the same training questions; a run that failed
    early lacks both, which are then taken from runs with its path. Neither is taken if those runs disagree.
    """
    runs, origins = [record.run for record in records], [record.origin for record in records]
    paths, training = [run.value(QUESTIONS) for run in runs], [origin.training_sha256 for origin in origins]
    heldout = _fill_blanks(training, [origin.heldout_sha256 for origin in origins])
    noted = [f"{one}/{other}" if one else "" for one, other in zip(training, heldout, strict=True)]
    asked, first, changes = _fill_blanks(paths, noted), dict[str, str](), defaultdict[str, set[str]](set)
    for n, (run, own) in enumerate(zip(runs, asked, strict=True)):
        if own:
            path = first.setdefault(own, paths[n])
            runs[n] = replace(run, settings={**run.settings, QUESTIONS: path})
            changes[_task_settings_as_text(runs[n])].add(own)
    for n, (run, own) in enumerate(zip(runs, asked, strict=True)):
        if len(changes[_task_settings_as_text(run)]) > 1 and own:
            mark = hashlib.sha256(own.encode()).hexdigest()[:6]
            runs[n] = replace(run, settings={**run.settings, QUESTIONS: f"{run.value(QUESTIONS)} #{mark}"})
    return [replace(record, run=run) for record, run in zip(records, fill_in_device(runs), strict=True)]


def _fill_blanks(keys: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Replace an empty text by the only other text with an equal key, if there is exactly one."""
    known = defaultdict[str, set[str]](set)
    for key, text in zip(keys, texts, strict=True):
        known[key].update({text} - {""})
    only = {key: min(found) for key, found in known.items() if len(found) == 1}
    return [text or only.get(key, "") for key, text in zip(keys, texts, strict=True)]


def _task_settings_as_text(run: Run) -> str:
    return str(sorted(item for item in run.settings.items() if item[0].startswith("task.")))


def run_key(record: Record) -> tuple[object, ...]:
    """Return what identifies a run on any machine: arm, seed and start; without a start its name."""
    return record.run.arm, record.run.seed, record.origin.began or record.run.name


def drop_copies(records: Sequence[Record]) -> list[Record]:
    """Keep one record of each run, the one that got furthest: a run may stop here and finish on another machine."""
    by_progress = sorted(records, key=lambda record: (record.run.status == FINISHED, record.run.ended))
    furthest = {run_key(record): record for record in by_progress}
    return [record for record in records if furthest[run_key(record)] is record]


def count_overlaps(records: Sequence[Record]) -> list[Record]:
    """Set `at_once` of each record: the most runs at once on its machine, by start and end times or by its options.

    A machine is the GPUs or, without one, the host; older records know only its kind. Starts are in whole seconds.
    A resumed run counts from its first start to its end.
    """
    spans = []
    for record in records:
        origin, end = record.origin, record.run.ended
        places = set(origin.place.split()) or {origin.machine if not _allowed_at_once(record) else ""} - {""}
        begin = datetime.fromisoformat(origin.began).timestamp() if origin.began else end
        spans.append((begin, end - 1, places))
    counted = []
    for record, (begin, end, places) in zip(records, spans, strict=True):
        beside = [(first, last) for first, last, at in spans if first < end and begin < last and places & at]
        moments = [max(begin, first) for first, _ in beside]
        most = max((sum(first <= moment < last for first, last in beside) for moment in moments), default=1)
        counted.append(replace(record, at_once=max(most, *_allowed_at_once(record), 1)))
    return counted


def _allowed_at_once(record: Record) -> list[int]:
    """Return how many jobs the record's sweep allows on one GPU or, without a GPU, machine; empty if not given."""
    option = "jobs" if record.run.value("device") == "cpu" else "jobs_per_gpu"
    given = f"{record.origin.command} {record.origin.configured}"
    return [int(number) for number in re.findall(rf"\b{option}=(\d+)", given)]
