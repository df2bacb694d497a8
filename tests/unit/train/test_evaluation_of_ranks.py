"""Held-out questions over several ranks: each rank's share, the common record, and a common end."""

import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from qerl_lab import tasks
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate.accuracy import evaluation_seed
from qerl_lab.model.policy import Policy
from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.engine import Completion, EngineFailed, OnDone, Rollout, Sampling
from qerl_lab.system import terminal
from qerl_lab.tracking.tracker import Tracker
from qerl_lab.train.ranks import ALONE, Ranks
from qerl_lab.train.run import Session, evaluate_heldout
from qerl_lab.train.stop import Diverged, Interrupted, Stop
from qerl_lab.train.training_data import select
from ranks_as_threads import threads

QUESTIONS, SAMPLES = 5, 2


@dataclass
class Scripted:
    """Answer the n-th prompt of an evaluation, over all ranks, with n + 1 tokens."""

    entropy: float
    fails: bool = False
    logprob: float = -1.0
    asked: list[tuple[list[list[int]], Sampling]] = field(default_factory=list)
    synced: list[Noise] = field(default_factory=list)

    def sync(self, noise: Noise) -> None:
        self.synced.append(noise)

    def generate(self, prompts: list[list[int]], group_size: int, how: Sampling, on_done: OnDone) -> Rollout:
        self.asked.append((prompts, how))
        if self.fails:
            raise EngineFailed("the worker died")
        for _ in prompts:
            on_done(group_size)
        lengths = [how.first + p + 1 for p in range(len(prompts))]
        answers = [Completion([65] * n, [self.logprob] * n, "stop", self.entropy * n) for n in lengths]
        return Rollout(prompts, [[answer] * group_size for answer in answers], seconds=1.0)


@pytest.fixture
def sessions(tiny, policy: Policy, tmp_path: Path) -> Callable[..., list[Session]]:
    """Make a session for each rank of a run. All read one record, as processes do."""

    def make(*all_ranks: Ranks, **changes: object) -> list[Session]:
        cfg: RunConfig = tiny(run_dir=str(tmp_path), **changes)
        data = select(cfg, policy, tasks.load(cfg.task))
        record, engines = RunDirectory(tmp_path), [Scripted(1.0 + ranks.rank) for ranks in all_ranks]
        return [
            Session(cfg, cfg, record, Stop(), ranks, None, tmp_path, policy, data, engine, [])
            for ranks, engine in zip(all_ranks, engines, strict=True)
        ]

    return make


def ask(sessions: list[Session]) -> list[Future[None]]:
    """Let all ranks ask at once; return their futures."""
    first = sessions[0]
    with Tracker(first.cfg, first.directory) as tracker, ThreadPoolExecutor(len(sessions)) as pool:
        for session in sessions:
            session.tracker = tracker if session.ranks.is_first else None
        ends = [pool.submit(evaluate_heldout, session, "before", 0, QUESTIONS, SAMPLES) for session in sessions]
    return ends


@pytest.mark.parametrize(("count", "sizes"), [(6, [2, 2, 2]), (7, [3, 2, 2]), (8, [3, 3, 2]), (2, [1, 1, 0])])
def test_shares_are_as_even_as_can_be_and_all_there_is(count: int, sizes: list[int]) -> None:
    shares = [Ranks(rank, 3).share(count) for rank in range(3)]
    assert [len(share) for share in shares] == sizes
    assert [number for share in shares for number in share] == list(range(count))


def test_each_rank_asks_its_share_and_the_record_has_all(sessions) -> None:
    two = sessions(*threads(2))
    assert [end.result() for end in ask(two)] == [None, None]
    task, how = two[0].data.task, [session.engine.asked[0][1] for session in two]
    asked = [prompts for session in two for prompts, _ in session.engine.asked]
    expected = [two[0].policy.chat.prompt_ids(task.messages(question)) for question in task.heldout[:QUESTIONS]]
    assert asked == [expected[:3], expected[3:]]
    assert [session.engine.synced for session in two] == [[CLEAN], [CLEAN]]
    assert [sampling.first for sampling in how] == [0, 3], "no two questions share a draw"
    assert {sampling.seed for sampling in how} == {evaluation_seed(two[0].cfg.seed)}
    rows = two[0].directory.evaluations()["before"]
    assert rows["id"].tolist() == [question.id for question in task.heldout[:QUESTIONS]]
    assert rows["tokens"].tolist() == [1, 2, 3, 4, 5], "each row has the answers to its own question"
    [line] = two[0].directory.metrics()
    assert line["metrics"]["eval/completion_tokens"] == 3
    assert line["metrics"]["eval/entropy_nats"] == pytest.approx((6 * 1.0 + 9 * 2.0) / 15), "a mean over all tokens"


def test_progress_is_extrapolated_to_all_ranks_and_ends_at_the_total(sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = defaultdict[terminal.ProgressBar, list[int]](list)

    def advance(bar: terminal.ProgressBar, count: int) -> None:
        bar.now += count
        shown[bar].append(bar.now)

    monkeypatch.setattr(terminal.ProgressBar, "advance", advance)
    [end.result() for end in ask(sessions(*threads(2)))]
    assert sorted(shown.values()) == [[4, 8], [4, 8, 10]]


def test_the_record_is_that_of_one_rank(sessions, tmp_path: Path) -> None:
    """The engines here draw the same on every rank. Three of the eight ranks have no question, and wait."""
    records = []
    for all_ranks in ([ALONE], threads(2), threads(8)):
        folder = tmp_path / str(len(all_ranks))
        folder.mkdir()
        of_all = [
            replace(session, directory=RunDirectory(folder), engine=Scripted(1.0)) for session in sessions(*all_ranks)
        ]
        [end.result() for end in ask(of_all)]
        [line] = of_all[0].directory.metrics()
        records.append((of_all[0].directory.evaluations()["before"].to_dict(), line["metrics"]))
    assert records[0] == records[1] == records[2]


def test_nothing_is_asked_twice_unless_the_answers_are_gone(sessions) -> None:
    """Rank 0, which writes the record, decides whether a phase is recorded already.

    A user may move a damaged eval.parquet away. The metrics of its answers are then recorded already.
    """
    for _ in range(2):
        two = sessions(*threads(2))
        [end.result() for end in ask(two)]
    assert [session.engine.asked for session in two] == [[], []]
    directory = two[0].directory
    (directory.path / "eval.parquet").unlink()
    [end.result() for end in ask(two)]
    assert list(directory.evaluations()) == ["before"]
    assert len(directory.metrics()) == 1


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("engine fails", EngineFailed, "the worker died$"),
        ("nan", Diverged, "the sampler's logits are NaN in the evaluation before training. Type model.dtype=float32"),
        ("signal", Interrupted, "$"),
    ],
)
def test_a_failure_or_signal_on_one_rank_ends_all(
    sessions, at: int, what: str, error: type[Exception], said: str
) -> None:
    two = sessions(*threads(2))
    two[at].engine.fails, two[at].stop.signalled = what == "engine fails", what == "signal"
    two[at].engine.logprob = math.nan if what == "nan" else -1.0
    for end in ask(two):
        with pytest.raises(error, match=f"^rank {at}: {said}"):
            end.result()
    assert two[0].directory.evaluations() == {}
    assert two[0].directory.metrics() == []
