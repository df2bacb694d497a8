"""Measure how many answers are compared per second of CPU time, workers included.

Not a test: run python tests/helpers/answer_speed.py by hand.
"""

import random
import resource
from collections.abc import Callable

from hostile_answers import GOLDS
from qerl_lab.tasks import sandbox
from qerl_lab.tasks.answers.judge import Verdict, judge
from qerl_lab.tasks.grading import answers_equal


def cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def report(name: str, count: int, work: Callable[[], object]) -> None:
    before = cpu_seconds()
    work()
    sandbox.end_all()
    print(f"{name}: {count / (cpu_seconds() - before):,.0f} a second of CPU")


def main() -> None:
    report("plain numbers", 50_000, lambda: [judge(f"{n:,}.0", f"{n}") for n in range(50_000)])
    rng = random.Random(0)
    pairs = [tuple(rng.sample(GOLDS, 2)) for _ in range(3000)]
    hard = [pair for pair in pairs if judge(*pair) is Verdict.LIBRARY]
    report("distinct pairs of golds", len(pairs), lambda: answers_equal(pairs))
    report(f"{len(hard)} of them, which only math-verify reads", len(hard), lambda: answers_equal(hard))


if __name__ == "__main__":
    main()
