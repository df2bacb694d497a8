"""A search with a stand-in for the main command. Runs get a reward by a formula of their words."""

import json
import math
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

from qerl_lab.config.option import ConfigError  # noqa: E402
from qerl_lab.config.spelling import unquoted  # noqa: E402
from qerl_lab.tools import search as command  # noqa: E402
from qerl_lab.tools.search import SearchOptions, read_space  # noqa: E402

RANGES = ["aqn.sigma_start=0.01..0.3", "optim.learning_rate=1e-4..1e-2"]
BEST = {"aqn.sigma_start": 0.05, "optim.learning_rate": 1e-3}


class Lab:
    """A stand-in that takes the words of a sweep. Trial `stops_at` is interrupted once; a run of trial `fails_at`
    fails before its first step."""

    def __init__(self, stops_at: int | None = None, fails_at: int | None = None) -> None:
        self.stops_at, self.fails_at, self.calls = stops_at, fails_at, []

    def __call__(self, words: list[str]) -> int:
        self.calls.append(words)
        keys = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
        sweep = Path(unquoted(keys["hydra.sweep.dir"]))
        number = int(sweep.name.removeprefix("trial-"))
        if number == self.stops_at:
            self.stops_at = None
            return 130
        for seed in keys["seed"].split(","):
            run = sweep / f"run-{seed}"
            run.mkdir(parents=True)
            (run / "resolved.yaml").touch()
            if number == self.fails_at and seed == keys["seed"].split(",")[0]:
                (run / "FAILED").write_text("OutOfMemoryError: 80 GiB are not enough\nTraceback ...\n")
                continue
            far = sum(math.log10(float(keys[key]) / best) ** 2 for key, best in BEST.items())
            rewards = (1 - far + int(seed) % 10 / 10 + change for change in (-0.5, 0.5))
            lines = [{"step": n, "time": 0.0, "metrics": {"reward/mean": mean}} for n, mean in enumerate(rewards, 1)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (run / "DONE").write_text(json.dumps({"accuracy_after": 0.2 + int(seed) % 10 / 10}))
        return 1 if number == self.fails_at else 0

    @property
    def proposals(self) -> list[list[str]]:
        """Return the words that each trial tried; a continued trial counts once."""
        tried = {words[-1]: [word for word in words if word.split("=")[0] in BEST] for words in self.calls}
        return list(tried.values())


def search(out: Path, lab: Callable[[list[str]], int], *words: str, **changes: object) -> None:
    options = SearchOptions(out=str(out), **{"trials": 4, **changes})  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("qerl_lab.cli.train.main", lab)
        command.search(options, [*(words or ("+experiment=nvfp4_aqn",)), *RANGES])


def table_of(out: Path) -> list[str]:
    return (out / "table.txt").read_text().splitlines()


ON_A_CLUSTER = ("+experiment=nvfp4_aqn", "launcher=slurm", "slurm=--partition=gpu --time=60")


def test_a_trial_is_a_sweep_over_the_seeds_of_the_search(tmp_path: Path) -> None:
    lab = Lab()
    search(tmp_path, lab, *ON_A_CLUSTER)
    assert len(lab.calls) == 4
    first = lab.calls[0]
    assert first[:3] == ["-m", "+experiment=nvfp4_aqn", "launcher=slurm"]
    assert "eval.questions=0" in first
    assert first[-2:] == ["seed=100,101", f"hydra.sweep.dir={tmp_path}/trial-0000"]
    for sigma, rate in ((float(word.split("=")[1]) for word in each) for each in lab.proposals):
        assert 0.01 <= sigma <= 0.3
        assert 1e-4 <= rate <= 1e-2
    digits = {len(word.split("=")[1].replace(".", "").lstrip("0")) for each in lab.proposals for word in each}
    assert max(digits) == 3
    assert len({tuple(each) for each in lab.proposals}) == 4


def test_the_table_has_the_best_trial_first_and_the_command_to_report_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search(tmp_path, Lab(), *ON_A_CLUSTER)
    table = table_of(tmp_path)
    worth = [float(line.split()[1]) for line in table[1:5]]
    assert worth == sorted(worth, reverse=True)
    tried = dict(word.split("=") for word in table[1].split()[2:4])
    far = sum(math.log10(float(tried[key]) / best) ** 2 for key, best in BEST.items())
    assert worth[0] == pytest.approx(1 - far + 0.05, abs=1e-3), "the mean of both seeds, over all steps"
    assert table[-1].startswith("next: ")
    report = shlex.split(table[-1].partition("python -m qerl_lab ")[2])
    assert report[:4] == ["-m", *ON_A_CLUSTER]
    assert report[4:] == [*table[1].split()[2:4], "seed=0,1,2,3,4"]
    assert table[0] in capsys.readouterr().out


def test_a_stopped_and_continued_search_tries_the_same_as_an_unbroken_one(tmp_path: Path) -> None:
    whole, stopped = Lab(), Lab(stops_at=12)
    search(tmp_path / "whole", whole, trials=14)
    with pytest.raises(KeyboardInterrupt, match="continues this trial"):
        search(tmp_path / "stopped", stopped, trials=14)
    assert len(stopped.calls) == 13
    search(tmp_path / "stopped", stopped, trials=14)
    assert stopped.calls[12] == stopped.calls[13]  # the sweep of that trial is continued
    assert stopped.proposals == whole.proposals
    rates = [float(rate.partition("=")[2]) for _, rate in whole.proposals]
    assert 4 <= sum(rate < 1e-3 for rate in rates) <= 10, "each power of ten is tried as often"
    worth = {int(line.split()[0]): float(line.split()[1]) for line in table_of(tmp_path / "whole")[1:15]}
    first, later = (statistics.fmean(worth[n] for n in numbers) for numbers in (range(10), range(10, 14)))
    assert later > first, "after ten trials it looks where they were best"
    search(tmp_path / "stopped", stopped, trials=15)
    assert len(stopped.calls) == 16


def test_a_search_continued_with_other_source_files_prints_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "note: the search began with other source files of qerl_lab"
    for code, trials, is_told in (("before", 2, False), ("before", 3, False), ("now", 3, False), ("now", 4, True)):
        monkeypatch.setattr(command, "code_hash", lambda code=code: code)
        search(tmp_path, Lab(), trials=trials)
        assert (told in capsys.readouterr().out) == (told in (tmp_path / "table.txt").read_text()) == is_told


def test_a_trial_with_a_failed_run_has_no_value_and_the_search_continues(tmp_path: Path) -> None:
    lab = Lab(fails_at=1)
    search(tmp_path, lab, objective="accuracy")
    search(tmp_path, lab, objective="accuracy")  # the same command again
    assert "eval.questions=0" not in lab.calls[0]
    tried = [dict(word.split("=", 1) for word in words if "=" in word)["hydra.sweep.dir"] for words in lab.calls]
    assert tried == [f"{tmp_path}/trial-{number:04}" for number in range(4)]
    table = table_of(tmp_path)
    assert table[1].split()[:2] == ["0", "0.2500"]
    assert table[4].split()[:2] == ["1", "failed"]


@pytest.mark.parametrize(("record", "content"), [
    ("metrics.jsonl", ""),
    ("metrics.jsonl", '{"step": 1, "time": 0.0, "metrics": {"reward/mean": null}}\n'),
    ("DONE", None),
])  # fmt: skip
def test_a_trial_without_a_value_from_its_runs_has_failed(tmp_path: Path, record: str, content: str | None) -> None:
    lab = Lab()

    def spoiled(words: list[str]) -> int:
        code = lab(words)
        file = tmp_path / "trial-0000" / "run-101" / record
        file.unlink() if content is None else file.write_text(content)
        return code if content is not None else 1

    with pytest.raises(ValueError, match="every trial failed"):
        search(tmp_path, spoiled, trials=1)
    assert "next: " not in (tmp_path / "table.txt").read_text()


def test_the_directory_is_quoted_for_hydra(tmp_path: Path) -> None:
    search(tmp_path / "a, b", lab := Lab(), trials=1)
    assert f"hydra.sweep.dir='{tmp_path}/a, b/trial-0000'" in lab.calls[0]


def test_only_words_about_launching_may_change_in_a_search(tmp_path: Path) -> None:
    search(tmp_path, Lab(), "+experiment=nvfp4_aqn", "jobs=2", trials=1)
    search(tmp_path, Lab(), "+experiment=nvfp4_aqn", "jobs=1", "launcher=ray", trials=2)
    with pytest.raises(ConfigError, match="holds a search with other overrides"):
        search(tmp_path, Lab(), "+experiment=bf16_aqn")
    with pytest.raises(ConfigError, match=r"seeds=\[100\]"):
        search(tmp_path, Lab(), seeds=[100])
    with pytest.raises(ConfigError, match="objective=accuracy"):
        search(tmp_path, Lab(), objective="accuracy")


def test_refused_words_may_be_corrected_before_the_first_trial(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nvfp5 is not an option"):
        search(tmp_path, Lab(), "+experiment=nvfp5")
    search(tmp_path, Lab())
    with pytest.raises(ConfigError, match=r"trial 4 were refused\. .* and type another out"):
        search(tmp_path, lambda words: 2, trials=5)


def test_a_search_for_accuracy_needs_questions() -> None:
    words = ["eval.questions=0", "optim.learning_rate=1e-4..1e-2"]
    with pytest.raises(ConfigError, match=r"Type for example eval\.questions=256"):
        read_space(words, SearchOptions(objective="accuracy"))
    read_space(words[1:], SearchOptions(objective="accuracy"))
    asked = ["eval.questions=8", *words[1:]]
    assert read_space(asked, SearchOptions())[0] == ["eval.questions=8"], "typed, though the reward needs none"


@pytest.mark.parametrize(("words", "said"), [
    (["steps=3"], "no override has a range"),
    (["seed=1", *RANGES], r"seed=1: a search sets seed of its runs\. Type seeds="),
    (["run_dir=x", *RANGES], r"a search sets run_dir of its runs\. Type out=DIR"),
    (["hydra.sweep.dir=x", *RANGES], r"a search sets hydra\.sweep\.dir of its runs\. Type out=DIR"),
    (["resume=x", *RANGES], "resume=x continues a run, .* Leave resume out"),
    (["optim.learning_rate=1e-2..1e-4"], "is not allowed; allowed: 0 < LOW < HIGH"),
    (["optim.learning_rate=1e-4...1e-2"], r"has three dots. Type optim.learning_rate=1e-4\.\.1e-2\."),
    (["lora.alpha=0..1"], r"allowed: 0 < LOW < HIGH\. Type lora\.alpha=LOW\.\.HIGH"),
    (["optim.learning_rate=0.1..2"], "optim.learning_rate=2.0 is not allowed; allowed: at most 1"),  # in a later trial
    (["optim.beta2=0.9..0.9999"], r"optim\.beta2=1\.0 is not allowed; allowed: at most 0\.99999"),  # rounded
    (["dry_run=true", "optim.learning_rate=1e-4..1e-2"], "Leave dry_run out"),
    (["optim.name=1..2"], "optim.name takes none"),
    (["optim.rate=1..2"], "optim.rate is not a known key"),
    (["lora.rank=16..64"], "lora.rank takes none"),
    (["+experiment=nvfp4_aqn", *RANGES, "aqn.sigma_start=0.1..0.2"], "aqn.sigma_start is given 2 times"),
    (["optim.learning_rate=1e-4..1e-2", "+experiment=bf16,nvfp4"], "a search takes one arm"),
])  # fmt: skip
def test_a_wrong_search_space_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_space(words, SearchOptions())


def test_a_search_without_seeds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seeds=\[\] is empty"):
        read_space(RANGES, SearchOptions(seeds=[]))


def test_a_search_without_a_writable_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=nvfp4_aqn", *RANGES]
    assert command.main(words) == 2
    assert "out= is missing. Type for example out=searches/pocket." in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert command.main([f"out={tmp_path}/file", *words]) == 2
    assert f"out={tmp_path}/file cannot be written" in capsys.readouterr().err
    assert command.main([f"out={tmp_path}/one", "seeds=[0,1]", *words]) == 2  # reports use these seeds
    assert "0 in seeds=[0,1] is not allowed; allowed: at least 100" in capsys.readouterr().err


def test_words_of_other_keys_are_passed_to_the_main_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    monkeypatch.setattr("qerl_lab.cli.train.main", lab)
    words = ["+experiment=nvfp4_aqn", "task.instruction=a..b", *RANGES]
    assert command.main([f"out={tmp_path}", "trials=1", "seeds=[100]", *words]) == 0
    assert "task.instruction=a..b" in lab.calls[0]
