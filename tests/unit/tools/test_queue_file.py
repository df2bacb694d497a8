"""The runs of a queue.yaml, the runs that its ledger leaves, and the plan."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from qerl_lab.cli.compose import Plan, make_plan
from qerl_lab.config.arm import settings_of_arm, values_of
from qerl_lab.config.option import ConfigError
from qerl_lab.tools import queue_file
from qerl_lab.tools.queue import COMMANDS, PlanOptions, plan
from qerl_lab.tools.queue_file import COLUMNS, DONE, FAILED, Planned, Queue

FILE = Path(__file__).parents[3] / "results" / "qwen1_5b" / "queue.yaml"
TWO_PARTS = """
words: [scale=pocket, optim.learning_rate=1e-3]
parts:
  - {name: pilot, lines: ["+experiment=bf16 optim.learning_rate=1e-4"], seeds: [100], preregistered: false}
  - {name: formats, lines: ["+experiment=bf16,nvfp4"], seeds: [0, 1]}
  - {name: rates, lines: ["+experiment=bf16 optim.learning_rate=1e-3,1e-2"], seeds: [0, 1]}
"""
UNMEASURED = "`seconds` of the queue's file, nothing is measured"


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    (tmp_path / "queue.yaml").write_text(TWO_PARTS)
    return queue_file.read(tmp_path / "queue.yaml")


def with_rows(queue: Queue, *attempts: tuple[int, str, str, str]) -> Queue:
    """Write attempts to the ledger (number of the run, state, seconds, evaluations); return the queue with them.

    They began a day apart.
    """
    rows = [
        dict.fromkeys(COLUMNS, "")
        | {"run": queue.runs[number].key, "state": state, "seconds": seconds, "evaluations": evaluations}
        | {"start": f"2026-01-{day:02}T12:00:00+0000"}
        for day, (number, state, seconds, evaluations) in enumerate(attempts, 1)
    ]
    queue_file.write_ledger(queue.folder, rows)
    return replace(queue, rows=queue_file.read_ledger(queue.folder))


def test_runs_are_ordered_by_part_and_seed_and_listed_once(queue: Queue) -> None:
    rates = [
        (one.part.name, one.config.experiment, one.config.seed, one.config.optim.learning_rate) for one in queue.runs
    ]
    assert rates == [
        ("pilot", "bf16", 100, 1e-4),
        ("formats", "bf16", 0, 1e-3), ("formats", "nvfp4", 0, 1e-3),
        ("formats", "bf16", 1, 1e-3), ("formats", "nvfp4", 1, 1e-3),
        ("rates", "bf16", 0, 1e-2), ("rates", "bf16", 1, 1e-2),
    ]  # fmt: skip
    assert all(f"seed={one.config.seed}" in one.overrides for one in queue.runs)


SHARED = """
words: [scale=pocket]
parts:
  - {name: formats, lines: ["+experiment=bf16"], seeds: [0, 1], after: ["accuracy samples=2", "accuracy"]}
  - {name: schedules, lines: ["+experiment=bf16"], seeds: [1, 2], after: [accuracy, accuracy seed=3], into: ../other}
"""


def test_a_run_that_two_parts_list_is_made_once_and_evaluated_for_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "queue.yaml").write_text(SHARED)
    queue = queue_file.read(tmp_path / "queue.yaml")
    assert [(one.config.seed, one.part.name, one.after) for one in queue.runs] == [
        (0, "formats", ["accuracy samples=2", "accuracy"]),
        (1, "formats", ["accuracy samples=2", "accuracy", "accuracy seed=3"]),
        (2, "schedules", ["accuracy", "accuracy seed=3"]),
    ]
    row = {"run": queue.runs[1].key, "part": "formats"}
    assert [part.into for part in queue.parts_of(row)] == ["", "../other"]
    plan(PlanOptions(str(tmp_path / "queue.yaml"), minutes=60, parts=["schedules"]))
    printed = capsys.readouterr().out
    assert "schedules  2     0     2     10.0       0.3" in printed
    assert [line[-1] for line in printed.splitlines() if line.startswith("python")] == ["1", "2"]


def test_a_line_that_several_parts_list_is_composed_once_for_all_their_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = list[str]()

    def compose(overrides: Sequence[str], multirun: bool) -> Plan:
        grids.append(" ".join(overrides))
        return make_plan(overrides, multirun)

    monkeypatch.setattr(queue_file, "make_plan", compose)
    (tmp_path / "queue.yaml").write_text(SHARED.replace("scale=pocket", "scale=pocket, steps=17"))
    runs = queue_file.read(tmp_path / "queue.yaml").runs
    assert grids == ["scale=pocket steps=17 +experiment=bf16 seed=0"]
    assert [(one.config.seed, one.overrides[-1]) for one in runs] == [(seed, f"seed={seed}") for seed in range(3)]


def test_a_run_of_a_pilot_and_of_a_preregistered_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queue.yaml").write_text(SHARED.replace("into: ../other", "preregistered: false"))
    said = "parts formats and schedules both list bf16-seed1-.*, and only one of them is preregistered"
    with pytest.raises(ConfigError, match=said):
        queue_file.read(tmp_path / "queue.yaml")


def test_runs_of_another_preregistration_are_named_except_the_pilot(queue: Queue) -> None:
    rows = [{"run": one.key, "part": one.part.name, "preregistration": "0" * 12} for one in queue.runs[:2]]
    rows.append(rows[1] | {"run": "bf16-seed0-old"})  # the queue does not list it
    assert replace(queue, rows=rows).of_another_preregistration() == [queue.runs[1].key]
    (queue.folder / queue_file.PREREGISTRATION).write_text("now")
    rows[1]["preregistration"] = queue.preregistration_hash()
    assert replace(queue, rows=rows[:2]).of_another_preregistration() == []


def test_the_plan_says_in_one_line_how_to_repeat_runs_of_another_preregistration(
    queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {
        "start": "2026-01-01T12:00:00+0000",
        "part": "formats",
        "state": DONE,
        "seconds": "9",
        "evaluations": "0 of 0",
        "preregistration": "0" * 12,
    }
    keys = [one.key for one in queue.runs[1:3]]
    rows = [dict.fromkeys(COLUMNS, "") | other | {"run": key} for key in keys]
    queue_file.write_ledger(queue.folder, rows)
    plan(PlanOptions(queue=str(queue.folder / "queue.yaml")))
    said = [line for line in capsys.readouterr().out.splitlines() if "PREREGISTRATION.md" in line]
    assert said == [
        "2 runs made under another PREREGISTRATION.md; to make one again, take its row out of ledger.csv: "
        f"{', '.join(keys)}"
    ]


def test_a_run_that_failed_twice_is_not_planned_again_and_named(
    queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run 1 failed once, and run 3 is done at its third attempt."""
    attempts = [(1, FAILED), (2, FAILED), (2, FAILED), (3, FAILED), (3, FAILED), (3, DONE)]
    made = with_rows(queue, *((number, state, "9", "0 of 0") for number, state in attempts))
    assert [one.key for one in made.left()] == [queue.runs[number].key for number in (0, 1, 4, 5, 6)]
    plan(PlanOptions(queue=str(queue.folder / "queue.yaml")))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    assert said == [f"failed 2 times, not planned again: {queue.runs[2].key}"]


def test_a_key_does_not_depend_on_the_paths_of_model_and_questions(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = queue.runs[0].config
    moved = replace(config, model=replace(config.model, hash="0123456789ab"), task=replace(config.task, path="/data"))
    assert queue_file.key_of(moved) == queue.runs[0].key
    monkeypatch.setattr(queue_file, "settings_of_arm", lambda values: settings_of_arm(values) | {"added.later": 1})
    monkeypatch.setattr(queue_file, "values_of", lambda config: values_of(config) | {"added.later": 1})
    assert queue_file.key_of(config) == queue.runs[0].key  # in a version with one more key, at its default
    other = replace(config, model=replace(config.model, path="checkpoints/awq"))
    assert queue_file.key_of(other) != queue.runs[0].key
    absolute = replace(config, model=replace(config.model, path=str(Path.cwd() / "checkpoints" / "awq")))
    assert queue_file.key_of(absolute) == queue_file.key_of(other)


def test_preregistered_runs_wait_for_a_complete_preregistration(queue: Queue) -> None:
    file = queue.folder / queue_file.PREREGISTRATION
    pilot, counting = queue.runs[:1], queue.runs[1:]
    queue.refuse_unregistered(pilot)
    for text in (None, "PILOT: the rate"):
        if text:
            file.write_text(text)
        with pytest.raises(ConfigError, match="formats"):
            queue.refuse_unregistered(counting)
    file.write_text("the rate is 1e-4")
    queue.refuse_unregistered(counting)


@pytest.mark.slow
def test_the_queue_of_qwen_composes() -> None:
    runs: list[Planned] = list(queue_file.read(FILE).runs)
    assert {one.config.rollout.engine for one in runs} == {"vllm"}
    assert {one.config.seed for one in runs if one.part.preregistered} == {0, 1, 2, 3, 4}
    assert min(one.config.seed for one in runs if not one.part.preregistered) >= 100
    assert all(
        (one.config.preregistration == str(FILE.parent / "claims.yaml")) == one.part.preregistered for one in runs
    )


def test_an_estimate_is_of_the_nearest_runs_with_as_many_evaluations(queue: Queue) -> None:
    """Runs 1 to 6 are bf16 and nvfp4 at 1e-3, two seeds, then bf16 at 1e-2. All rows but one have an evaluation."""
    queue = replace(queue, runs=[replace(one, parts=[replace(one.part, after=("accuracy",))]) for one in queue.runs])
    rows = [(1, DONE, "10", "1 of 1"), (2, DONE, "20", "1 of 1"), (5, DONE, "40", "1 of 1"), (0, DONE, "90", "0 of 0")]
    for known, expected in (
        (rows, {3: 10, 4: 20, 6: 40}),  # from the other seed
        (rows[:2], {6: 10}),  # from bf16 at another rate
        (rows[1:2], {6: 20}),
        (rows[3:], {3: 90}),
        ([rows[0], rows[2]], {4: 10}),  # from its part
        ([rows[0], (3, DONE, "20", "1 of 1"), rows[2]], {0: 20}),  # the median, not the mean
        ([rows[0], (3, DONE, "1", "0 of 1"), (5, DONE, "99", "2 of 2")], {4: 10}),  # fewer, or more evaluations
    ):
        made = with_rows(queue, *known)
        assert {number: made.estimate(made.runs[number], 1).seconds for number in expected} == expected


@pytest.mark.parametrize(
    ("minute", "host", "shared"), [(6, "a", False), (1, "a", True), (0, "a", True), (0, "b", False)]
)
def test_runs_that_shared_a_card_count_for_runs_that_will_share_one(
    minute: int, host: str, shared: bool, queue: Queue
) -> None:
    """Three attempts of one arm: 8 minutes, a failure of 5 that began `minute` later, and 4 minutes on another day."""
    attempts = (
        (1, DONE, "01T12:00", "480", "a"),
        (2, FAILED, f"01T12:0{minute}", "300", host),
        (3, DONE, "02T12:00", "240", "a"),
    )
    rows = [
        dict.fromkeys(COLUMNS, "")
        | {"run": queue.runs[number].key, "state": state, "start": f"2026-01-{start}:00+0000", "seconds": seconds}
        | {"host": host, "card": "none", "evaluations": "0 of 0"}
        for number, state, start, seconds, host in attempts
    ]
    found = replace(queue, rows=rows)
    assert found.estimate(queue.runs[3], 1).seconds == (240 if shared else 360)
    assert found.estimate(queue.runs[3], 2).seconds == (480 if shared else 360)


def test_an_estimate_names_the_runs_that_it_is_from(queue: Queue) -> None:
    rows = [(1, DONE, "10", "0 of 0"), (2, DONE, "20", "0 of 0"), (3, DONE, "20", "0 of 0")]
    for known, number, source in (
        (rows, 1, "2 runs of its arm"), (rows, 5, "2 runs of bf16"), (rows[1:2], 1, "1 run of part formats"),
        (rows[1:2], 6, "1 run of the queue"),
    ):  # fmt: skip
        made = with_rows(queue, *known)
        assert made.estimate(made.runs[number], 1).source == f"median of {source}"


def test_an_estimate_is_from_this_queue_or_else_from_the_bench(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other words give other runs, and rows of another scale do not count for them."""
    assert queue.estimate(queue.runs[1], 1).seconds == 600
    monkeypatch.chdir(FILE.parents[2])
    made = with_rows(queue, (0, DONE, "9", "0 of 0"))
    assert made.estimate(made.runs[1], 1).seconds == 9
    other = queue_file.read(queue.folder / "queue.yaml", ["scale=paper_gsm8k_7b", "rollout=vllm"])
    assert len(other.rows) == 1
    estimate = other.estimate(other.runs[1], 1)
    assert estimate.seconds > 3600
    assert estimate.source == "from the tokens/s in results/bench, each completion at its longest"


def test_a_dead_arm_of_the_bench_gives_no_estimate(queue: Queue, tmp_path: Path) -> None:
    config = queue.runs[0].config
    arm = {"model": config.model.name, "baseline": False, "gpus": 1}
    died = arm | {"died": "OutOfMemoryError: CUDA out of memory"}
    file = tmp_path / "step_pocket.json"
    file.write_text(json.dumps({"rows": [died]}))
    assert queue_file.estimate_from_bench(config, tmp_path) is None
    rows = [died, *(arm | {"tokens_per_second": speed} for speed in (16.0, 64.0, 32.0))]
    rows += [arm | {"tokens_per_second": 256.0} | other for other in ({"gpus": 2}, {"baseline": True}, {"model": "x"})]
    file.write_text(json.dumps({"rows": rows}))
    tokens = config.steps * config.completions_per_step * config.rollout.max_completion_tokens
    assert queue_file.estimate_from_bench(config, tmp_path) == tokens / 64


@pytest.mark.parametrize(("minutes", "at_once", "lines", "said"), [
    (25, 1, 2, f" needs 10.0 minutes ({UNMEASURED}), and 5.0 of minutes=25 are left"),
    (5, 1, 0, f" needs 10.0 minutes ({UNMEASURED}), and 5.0 of minutes=5 are left"),
    (25, 2, 5, f" needs 5.0 minutes ({UNMEASURED}, divided by 2 runs at once), and 0.0 of"), (70, 1, 7, ""),
])  # fmt: skip
def test_a_plan_says_why_the_next_run_does_not_fit(
    minutes: float, at_once: int, lines: int, said: str, queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured, so a run counts 600 s."""
    plan(PlanOptions(str(queue.folder / "queue.yaml"), minutes, jobs=at_once))
    printed = capsys.readouterr().out
    assert f"7 runs left, {7 / 6 / at_once:.1f} hours" in printed
    assert printed.count("python -m qerl_lab ") == lines
    assert len(re.findall(rf"(?m)^# \S+-seed\d+-\S+, {10 / at_once:.1f} minutes \(.*\):\npython ", printed)) == lines
    assert ("the next run does not fit: " in printed) == bool(said)
    assert said in printed
    line = f"python -m qerl_lab.tools.queue run {queue.folder}/queue.yaml pack=DIR"
    assert (f"\nto make them on a machine and pack their records in DIR: {line}" in printed) == (lines > 0)


def test_a_plan_ends_with_the_whole_command_that_makes_its_runs(
    queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(queue.folder / "queue.yaml")
    plan(PlanOptions(file))
    assert capsys.readouterr().out.endswith(f" run {file} pack=DIR\n")
    plan(PlanOptions(file, 40, 2, parts=["formats", "rates"], words="steps=3 task.instruction='a b'"))
    typed = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(" run ")[2])
    options = COMMANDS["run"].read(typed)
    assert (options.minutes, options.jobs, options.gpus, options.pack) == (40, 2, 1, "DIR")
    assert (options.parts, options.words) == (["formats", "rates"], "steps=3 task.instruction='a b'")


def test_a_plan_names_the_runs_that_lack_evaluations(queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    with_rows(queue, (1, DONE, "60", "0 of 2"), (2, DONE, "60", "2 of 2"), (3, FAILED, "60", "0 of 2"))
    file = str(queue.folder / "queue.yaml")
    plan(PlanOptions(file))
    said = f"1 run is done and lacks evaluations, which `run` makes only on .*: {queue.runs[1].key}\n"
    assert re.search(said, capsys.readouterr().out)
    plan(PlanOptions(file, parts=["pilot"]))
    assert "evaluations" not in capsys.readouterr().out


def test_the_minutes_of_a_part_are_the_mean_over_its_remaining_runs(
    queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left are one run of bf16 in formats, one at 1e-2 in rates, and none in pilot."""
    seconds = {0: "180", 1: "1200", 2: "600", 4: "600", 5: "120"}
    with_rows(queue, *((number, DONE, taken, "0 of 0") for number, taken in seconds.items()))
    for jobs, gpus, hours in ((1, 1, "0.3"), (2, 1, "0.2"), (1, 2, "0.2")):
        plan(PlanOptions(str(queue.folder / "queue.yaml"), jobs=jobs, gpus=gpus))
        cells = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[:4]}
        assert cells["formats"] == ["4", "3", "1", "20.0", hours]
        assert cells["rates"][2:] == ["1", "2.0", "0.0"]
        assert cells["pilot"] == ["1", "1", "0", "3.0", "0.0"]


def test_planned_commands_have_the_jobs_per_gpu_that_run_would_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = TWO_PARTS.replace("1e-3,1e-2", "1e-2 jobs_per_gpu=3")  # the number in a line wins
    (tmp_path / "queue.yaml").write_text(shares)
    for jobs, expected in ((1, [None] * 5 + ["3"] * 2), (2, ["2"] * 5 + ["3"] * 2)):
        plan(PlanOptions(str(tmp_path / "queue.yaml"), 70, jobs))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python -m qerl_lab ")]
        typed = [dict(word.split("=") for word in line.split()[3:]) for line in lines]
        assert [words.get("jobs_per_gpu") for words in typed] == expected


@pytest.mark.parametrize(
    ("part", "hint"), [("frmats", " Did you mean formats?"), ("x", " Type for example parts=pilot.")]
)
def test_a_part_that_the_queue_lacks_is_refused_before_a_line_is_composed(
    part: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_file, "_compose", None)
    (tmp_path / "queue.yaml").write_text(TWO_PARTS)
    said = f"parts={part} is not a part of the queue; allowed: pilot, formats, rates.{hint}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan(PlanOptions(str(tmp_path / "queue.yaml"), parts=["pilot", part]))


def test_an_evaluation_may_use_variables_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan`, on another machine, reads a line in which they are not set."""
    line = "accuracy benchmarks=gsm8k:$QERL_QUESTIONS samples=2"
    (tmp_path / "queue.yaml").write_text(TWO_PARTS.replace("preregistered: false", f"after: ['{line}']"))
    assert queue_file.read(tmp_path / "queue.yaml").runs[0].after == [line]
    monkeypatch.setenv("QERL_QUESTIONS", "")
    with pytest.raises(ConfigError, match=re.escape("gsm8k: in benchmarks=[gsm8k:] is not allowed")):
        queue_file.read(tmp_path / "queue.yaml")


@pytest.mark.parametrize(("text", "said"), [
    ("", "the file is empty; write parts: ..."), ("parts: {}", "the file: parts={} is no list"),
    ("words: []", "the file lacks parts"),
    ("parts: [{name: a, lines: [x], seed: 0}]", "part a has seed, which is none of"),
    ("parts: [{name: a, lines: ['format=int3']}]", "part a, line `format=int3`: format=int3 is not"),
    ("{words: [1], parts: []}", "words=[1] is no list of texts; write for example words: "),
    ("{seconds: soon, parts: []}", "the file: seconds soon is no number above 0"),
    ("{seconds: .inf, parts: []}", "the file: seconds inf is no number above 0"),
    ("{seconds: true, parts: []}", "the file: seconds=true is no number"),
    ("parts: [1]", "part 1 is no mapping; write name: ..., lines: ..."),
    ("parts: [{name: a, lines: x}]", "part a: lines=x is no list of texts"),
    ("parts: [{name: a, lines: [x], seeds: 3}]", "part a: seeds=3 is no list of whole numbers"),
    ("parts: []", "parts is empty; allowed: at least one entry"),
    ("parts: [{name: a, lines: [x], seeds: []}]", "part a: seeds is empty; allowed: at least one entry"),
    ("parts: [{name: a, lines: ['steps=1'], seeds: [0, -1]}]", "line `steps=1`: -1 in seeds=[0,-1] is not allowed"),
    *(
        (f"parts: [{{name: a, lines: [x], after: ['{line}']}}]", f"part a, after `{line}`{said}")
        for line, said in (
            ("", " evaluates no run; allowed: accuracy KEY=VALUE ..."),
            ("acuracy samples=2", " evaluates no run; allowed: accuracy KEY=VALUE ..."),
            ("entropy", " evaluates no run; allowed: accuracy KEY=VALUE ..."),
            ("accuracy sample=2", ": sample is not a known key. Did you mean samples?"),
            ("accuracy samples=0", ": samples=0 is not allowed"), ("accuracy run=x", ": run is given 2 times"),
            ("accuracy format=bf16", ": format=bf16 is of a model"),
            ("accuracy benchmarks=gms8k", ": gms8k in benchmarks=[gms8k] is no task"),
        )
    ),
    ("parts: [{name: a, lines: ['dry_run=true']}]", "part a, line `dry_run=true`: dry_run=true makes no run. Leave"),
    ("parts: [{name: a, lines: ['resume=x']}]", "line `resume=x`: resume=x continues a run"),
    ("parts: [{name: a, lines: [x], preregistered: 1}]", "part a: preregistered=1 is no true or false"),
    ("parts: [{name: a, lines: [x]}, {name: a, lines: [y]}]", "two parts have the name a; give each its own"),
    ("parts: [{name: a, lines: [x], after: ['accuracy \"x']}]", "No closing quotation. Close the quotes."),
    ("parts: [{name: a, lines: ['run_dir=\"x']}]", "No closing quotation. Close the quotes."),
])  # fmt: skip
def test_a_field_of_a_wrong_kind_is_refused_with_what_to_write(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "queue.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        queue_file.read(tmp_path / "queue.yaml")


def test_a_missing_queue_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"queue\.yaml is no queue \(.*No such file.*\)\. Type the path of"):
        queue_file.read(tmp_path / "queue.yaml")


ONE_PART = """
parts:
  - {name: formats, lines: ["+experiment=bf16 scale=pocket steps=3"], after: null}
  - {name: pilot, lines: ["+experiment=bf16 scale=pocket"], seeds: [100], preregistered: false}
"""


def test_a_part_without_seeds_and_claims_gets_the_defaults(tmp_path: Path) -> None:
    """The defaults are five seeds, and for all but pilots the claims beside the queue. Typed words win over a line."""
    (tmp_path / "queue.yaml").write_text(ONE_PART)
    (tmp_path / "claims.yaml").write_text("claims: []")
    runs = queue_file.read(tmp_path / "queue.yaml", ["steps=4"]).runs
    assert [(one.config.seed, one.config.steps, one.after) for one in runs[:-1]] == [(seed, 4, []) for seed in range(5)]
    found = [one.config.preregistration for one in runs]
    assert found == [str(tmp_path / "claims.yaml")] * 5 + [None]


def test_a_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Words may have line ends, as in a long instruction. Digits stay text, because a commit may begin with 0."""
    row = dict.fromkeys(COLUMNS, "a") | {"words": "'task.instruction=Think.\nThen answer, \"briefly\".\u2028End.'"}
    row |= {"seed": "0", "seconds": "480", "commit": "01234567", "adapter_sha256": "1e5", "host": "NA"}
    queue_file.write_ledger(tmp_path, [row, row])
    assert queue_file.read_ledger(tmp_path) == [row, row]


def test_words_with_a_seed_are_refused(queue: Queue) -> None:
    for word in ("seed=7", "+seed=7"):
        with pytest.raises(ConfigError, match=re.escape(f"words={word} sets a seed")):
            queue_file.read(queue.folder / "queue.yaml", [word])
