"""Match records: equal questions in other files, copies of one run, and runs at once on one machine. Pure."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from qerl_lab.report.arms import COPIED, FINISHED, QUESTIONS, Run, fill_in_device, is_copy
from qerl_lab.report.runs import Record


def by_questions(records: Sequence[Record]) -> list[Record]:
    """Give runs on equal questions one task.path, the first seen, and mark a path where its questions changed.

    Questions are equal by their SHA-256. An older record lacks that of the held-out questions, which is then taken from
    runs on the same training questions, or both, which are then taken from runs with its path; if they agree.
    """
    heldout, at, first = defaultdict(set), defaultdict(set), dict[tuple[str, str], str]()
    for origin in (record.origin for record in records):
        heldout[origin.training_sha256].update({origin.heldout_sha256} - {""})
    questions = []
    for record in records:
        digest, path = record.origin.training_sha256, record.run.value(QUESTIONS)
        only = min(heldout[digest]) if len(heldout[digest]) == 1 else ""
        questions.append((digest, record.origin.heldout_sha256 or only) if digest else None)
        if questions[-1]:
            first.setdefault(questions[-1], path)
            at[path].add(questions[-1])
    runs, of_task = [], defaultdict(set)
    for run, own in zip((record.run for record in records), questions, strict=True):
        same = {own} if own else at[run.value(QUESTIONS)]
        if len(same) == 1 and QUESTIONS in run.settings:
            run = replace(run, settings={**run.settings, QUESTIONS: first[min(same)]})
        of_task[_task_settings(run)].update([own] if own else [])
        runs.append(run)
    found = []
    for record, run, own in zip(records, fill_in_device(runs), questions, strict=True):
        if own and len(of_task[_task_settings(run)]) > 1:
            mark = hashlib.sha256("/".join(own).encode()).hexdigest()[:6]
            run = replace(run, settings={**run.settings, QUESTIONS: f"{run.value(QUESTIONS)} #{mark}"})
        found.append(replace(record, run=run))
    return found


def _task_settings(run: Run) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in run.settings.items() if item[0].startswith("task.")))


def identity(record: Record) -> tuple[object, ...]:
    """Return what all records of one run share. Only records with a start time can be recognized as copies."""
    return record.run.arm, record.run.seed, record.origin.began


def mark_copies(records: Sequence[Record]) -> list[Record]:
    """Keep the record that got furthest of each run, and mark the others as copies.

    A run that was stopped here and finished elsewhere therefore counts once, as finished.
    """
    records = list({(record.run.name, identity(record)): record for record in records}.values())
    furthest: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda one: (one.run.status != FINISHED, is_copy(one.run), -one.run.ended)):
        furthest.setdefault(identity(record), record)
    marked = []
    for record in records:
        best = furthest[identity(record)]
        if record.origin.began and record is not best:
            status = f"{COPIED} ({best.run.name} is the same run)"
            record = Record(replace(record.run, status=status), origin=record.origin)
        marked.append(record)
    return marked


def count_overlaps(records: Sequence[Record]) -> list[Record]:
    """Set `at_once` of each record: the most runs at once on its machine, by start and end times or by its options.

    A machine is the GPUs or, without one, the host; older records know only its kind. Starts are in whole seconds.
    A resumed run counts from its first start to its end.
    """
    spans = []
    for record in records:
        origin, end = record.origin, record.run.ended
        places = set(origin.place.split()) or {origin.machine if not record.allowed_at_once else ""} - {""}
        begin = datetime.fromisoformat(origin.began).timestamp() if origin.began else end
        spans.append((begin, end - 1, places if not is_copy(record.run) else set()))
    counted = []
    for record, (begin, end, places) in zip(records, spans, strict=True):
        beside = [other for other in spans if other[0] < end and begin < other[1] and places & other[2]]
        moments = [max(begin, other[0]) for other in beside]
        most = max((sum(other[0] <= moment < other[1] for other in beside) for moment in moments), default=1)
        counted.append(replace(record, at_once=max(most, *record.allowed_at_once, 1)))
    return counted
