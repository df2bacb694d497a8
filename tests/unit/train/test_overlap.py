"""Sampling the next step on a server while a step trains: what is sampled with what, and a run that is cut short.

The server samples from a policy of its own, with the adapter and the noise that it was sent.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from failing_engines import StopWhen
from fake_vllm import Answer, FakeVllm, refusal, running
from qerl_lab.aqn import level
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import load_adapter
from qerl_lab.record import checkpoint
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import PHASES
from qerl_lab.rollout.engine import EngineFailed
from qerl_lab.system.exits import INTERRUPTED, OK
from qerl_lab.train import ahead, trainer
from qerl_lab.train import run as run_module
from qerl_lab.train.ahead import may_be_sampled_ahead
from qerl_lab.train.step import Batch
from qerl_lab.train.stop import Stop
from repeated import files_of, lines_of
from run_directories import write_config

SETTINGS = {
    "steps": 8, "checkpoint__every": 4, "format__name": "bf16", "rollout__engine": "vllm_server",
    "rollout__vllm_server__overlap": True, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 8,
    "optim__learning_rate": 0.02,
    "lora__dropout": 0.2, "eval__questions": 4, "eval__samples": 1, "eval__every": 3, "eval__subset_questions": 2,
    "aqn__schedule": "linear", "aqn__reading": "equation", "aqn__sigma_start": 0.3, "aqn__sigma_end": 0.1,
    "aqn__stages": 4, "algorithm__dynamic_sampling": True, "algorithm__max_resamples": 2, "seed": 1,
}  # fmt: skip
STALE = [0, 1, 1, 0, 0, 1, 0, 1]  # by step: on-policy are the first and those after an evaluation or checkpoint
SAMPLED, SYNCED = "/v1/completions", "qerl_noise"


@dataclass
class SamplingVllm(FakeVllm):
    """A server that samples from its `policy`, which it must not share with the trainer.

    Attributes:
        held: the adapter that each step was sampled with, of the last session.
        fails: refuse to sample ("/v1/completions") or to take the noise ("qerl_noise") of a step, once.
        before_sampling: called with the step before each completion.
    """

    step: int = 0
    held: dict[int, Tensor] = field(default_factory=dict)
    fails: tuple[str, int] | None = None
    before_sampling: Callable[[int], object] = lambda step: None

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if self.fails == (body.get("method", path), body.get("kwargs", {}).get("step", self.step)):
            self.fails = None
            return refusal(500, "the worker died")
        said = super().answer(path, body)
        if path == "/v1/load_lora_adapter":
            load_adapter(self.policy.model, Path(body["lora_path"]))
        return said

    def rpc(self, method: str, given: dict[str, Any]) -> Any:
        if method == "qerl_adapter":
            load_adapter(self.policy.model, Path(given["folder"]))
        if method == SYNCED:
            self.step = given["step"]
            self.held[self.step] = lora_weight(self.policy.model)
        return super().rpc(method, given)

    def complete(self, body: dict[str, Any]) -> Answer:
        if body["model"] not in self.adapters:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        self.before_sampling(self.step)
        with self.lock, self.policy.as_sampler(self.norms):
            rows, logprobs = self.sample(body)
        choices = []
        for index, (ids, told) in enumerate(zip(rows.tolist(), logprobs.tolist(), strict=True)):
            ends = [at for at, token in enumerate(ids) if token in body["stop_token_ids"]]
            count = ends[0] + 1 if ends else len(ids)
            logprobs_told = None if body["logprobs"] is None else {"token_logprobs": told[:count]}
            choices.append({
                "index": index, "token_ids": ids[:count], "finish_reason": "stop" if ends else "length",
                "logprobs": logprobs_told,
            })  # fmt: skip
        return 200, {"choices": choices}

    def sample(self, body: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return token ids and log-probs [n, max_tokens], with tokens after the end token too."""
        ids, logprobs, cache = torch.tensor([body["prompt"]] * body["n"]), [], DynamicCache()
        generators = [torch.Generator().manual_seed(body["seed"] + index) for index in range(body["n"])]
        for _ in range(body["max_tokens"]):
            unread = ids[:, cache.get_seq_length() :]
            logits = self.policy.model(input_ids=unread, past_key_values=cache, use_cache=True).logits
            scores = (logits[:, -1] / body["temperature"]).log_softmax(-1)
            rows = zip(scores.exp(), generators, strict=True)
            drawn = torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
            ids = torch.cat([ids, drawn], 1)
            logprobs.append(scores.gather(1, drawn))
        return ids[:, len(body["prompt"]) :], torch.cat(logprobs, 1)


def lora_weight(model: torch.nn.Module) -> Tensor:
    return next(weight.detach().clone() for name, weight in model.named_parameters() if "lora_B" in name)


class Killed(BaseException):
    """Stands for `kill -9`: the run ends and saves nothing."""


@dataclass
class Runs:
    """Runs of one configuration in its directory; each call continues what the last one left.

    `trained` has the adapter after each step.
    """

    cfg: RunConfig
    fake: SamplingVllm
    trained: dict[int, Tensor] = field(default_factory=dict)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.cfg.run_dir))

    def run(self, stop: Stop | None = None, kill_after: int = 0) -> int:
        """Run to the end; or until step `kill_after` is trained and recorded, before its checkpoint."""
        write_config(self.directory.path, self.cfg)
        check = trainer.LabTrainer._check_finite

        def keep(own: trainer.LabTrainer, metrics: dict[str, float]) -> None:
            check(own, metrics)
            self.trained[own.steps_done] = lora_weight(own.policy.model)
            if own.steps_done == kill_after:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.LabTrainer, "_check_finite", keep)
            return run_module.run(self.cfg, self.directory, stop or Stop())

    def of_steps(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in lines_of(self.directory.path) if name in metrics]

    @property
    def saved(self) -> tuple[int, int]:
        """Return step and position in the data of the newest checkpoint."""
        newest = checkpoint.newest(self.directory.checkpoints)
        return (newest.step, newest.prompts_seen) if newest else (0, 0)


@contextmanager
def server(tiny, build_policy, folders: pytest.TempPathFactory) -> Iterator[Callable[..., Runs]]:
    """Serve in the block. Yields a function that makes runs of SETTINGS with changes, each in a new directory."""
    with running(SamplingVllm(build_policy(tiny(**SETTINGS)))) as fake:
        own = {"rollout__vllm_server__url": fake.url}
        yield lambda **changes: Runs(tiny(**SETTINGS | own | changes, run_dir=str(folders.mktemp("run"))), fake)


@pytest.fixture
def new_runs(tiny, build_policy, tmp_path_factory) -> Iterator[Callable[..., Runs]]:
    with server(tiny, build_policy, tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="module")
def whole(tiny, build_policy, tmp_path_factory) -> Runs:
    """A finished run that nothing interrupted."""
    with server(tiny, build_policy, tmp_path_factory) as make:
        runs = make()
        assert runs.run() == OK
    return runs


def test_a_step_is_sampled_with_its_noise_from_the_adapter_before_the_last_updates(whole) -> None:
    assert whole.of_steps("rollout/staleness") == STALE
    before = {0: torch.zeros_like(whole.trained[1]), **whole.trained}
    for step, stale in enumerate(STALE, 1):
        assert torch.equal(whole.fake.held[step], before[step - 1 - stale]), step
        assert not torch.equal(before[step], before[step - 1]), "nothing was learned"
    sigmas = whole.of_steps("noise/sigma")
    assert sigmas == [level(whole.cfg.aqn, step, 8) for step in range(1, 9)]
    assert whole.of_steps("noise/std_observed") == pytest.approx(sigmas, rel=0.1)


def test_the_kernels_gap_is_of_completions_of_the_trainers_adapter(whole) -> None:
    steps = [metrics for _, metrics in lines_of(whole.directory.path) if "rollout/staleness" in metrics]
    for metrics, stale in zip(steps, STALE, strict=True):
        assert ("sampler/kernel_gap_max" in metrics) == (not stale)
        assert metrics.get("sampler/kernel_gap_max", 0.0) < 1e-4
    assert sum(whole.of_steps("rollout/resamples")) > 1, "nothing was refilled"


def test_a_thread_changes_no_number(whole, new_runs, monkeypatch: pytest.MonkeyPatch) -> None:
    class AtOnce(ThreadPoolExecutor):
        def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
            done = super().submit(call, *arguments)
            done.exception()
            return done

    monkeypatch.setattr(ahead, "ThreadPoolExecutor", AtOnce)
    runs = new_runs()
    assert runs.run() == OK
    assert lines_of(runs.directory.path) == lines_of(whole.directory.path)
    assert files_of(runs.directory.path) == files_of(whole.directory.path)


def test_a_run_that_is_killed_is_the_uninterrupted_one(whole, new_runs) -> None:
    runs = new_runs()
    with pytest.raises(Killed):
        runs.run(kill_after=7)  # after a checkpoint, with a step under way
    assert runs.run() == OK
    assert lines_of(runs.directory.path) == lines_of(whole.directory.path)
    assert files_of(runs.directory.path) == files_of(whole.directory.path)


QUICK = {"steps": 4, "eval__questions": 0, "eval__every": 0, "checkpoint__every": 0}


def test_the_next_step_is_sampled_while_this_one_trains(new_runs) -> None:
    """Without noise only the older adapter causes a gap. The thread's time does not count for the step."""
    runs = new_runs(**QUICK | {"aqn__schedule": "off", "steps": 2, "rollout__max_completion_tokens": 24})
    trained = threading.Event()

    def wait(step: int) -> None:
        assert step < 2 or trained.wait(60), "step 1 waits for the completions of step 2"

    runs.fake.before_sampling = wait
    with pytest.MonkeyPatch.context() as patch:
        log = trainer.LabTrainer.log
        patch.setattr(trainer.LabTrainer, "log", lambda *words: (log(*words), trained.set()))
        assert runs.run() == OK
    (first, second) = [line["metrics"] for line in runs.directory.metrics()]
    assert (first["rollout/staleness"], second["rollout/staleness"]) == (0, 1)
    assert first["sampler/kl_k3_nats"] < 1e-9 < 1e-5 < second["sampler/kl_k3_nats"]
    assert first["sampler/kernel_gap_mean"] == first["sampler/logprob_gap_mean"]
    assert "sampler/kernel_gap_mean" not in second
    assert second["seconds/reward"] == 0 < first["seconds/reward"]
    assert second["seconds/rollout"] > 0, "the wait for the batch has no phase"
    for metrics in (first, second):
        assert sum(metrics[f"seconds/{phase}"] for phase in PHASES) == pytest.approx(metrics["step/seconds"])
        assert metrics["step/tokens_per_second"] * metrics["step/seconds"] == pytest.approx(
            8 * metrics["rollout/completion_tokens"]
        )


@pytest.mark.parametrize(
    ("fails", "saved"), [((SAMPLED, 3), 2), ((SYNCED, 3), 1)], ids=["in the thread", "before the thread"]
)
def test_an_engine_that_fails_ahead_loses_no_trained_step(new_runs, fails: tuple[str, int], saved: int) -> None:
    """A failure in the thread ends the run when its batch is needed. The resumed run samples that step on-policy."""
    runs = new_runs(**QUICK)
    runs.fake.fails = fails
    with pytest.raises(EngineFailed, match=rf"the worker died.* {saved} of 4 steps are saved\. Type .* to go on\."):
        runs.run()
    drawn = sum(runs.of_steps("rollout/prompts_drawn"))
    assert runs.saved == (saved, drawn)
    assert runs.run() == OK
    assert runs.of_steps("rollout/staleness") == [0, *(float(step != saved) for step in (1, 2, 3))]
    assert runs.saved == (4, sum(runs.of_steps("rollout/prompts_drawn")))


def test_a_stop_while_a_step_is_sampled_ahead_saves_the_trained_one(new_runs, monkeypatch) -> None:
    """The engine closes only when the thread is done with it."""
    runs, collect, collected = new_runs(**QUICK), ahead.collect, list[int]()

    def collect_slowly(cfg: RunConfig, step: int, *others: Any) -> Batch:
        try:
            return collect(cfg, step, *others)
        finally:  # the stop aborts step 3
            time.sleep(0.5)
            collected.append(step)

    monkeypatch.setattr(ahead, "collect", collect_slowly)
    assert runs.run(StopWhen(holds=lambda: runs.fake.step == 3)) == INTERRUPTED
    assert collected == [2, 3]
    assert runs.saved == (2, sum(runs.of_steps("rollout/prompts_drawn")))
    runs.fake.step = 0
    assert runs.run() == OK
    assert runs.of_steps("rollout/staleness") == [0, 1, 0, 1]


def test_a_stop_does_not_wait_for_a_step_that_nobody_wants(new_runs) -> None:
    """The server samples step 3 until it is told to abort."""
    runs = new_runs(**QUICK)
    runs.fake.before_sampling = lambda step: step < 3 or runs.fake.aborted.wait(60)
    began = time.monotonic()
    assert runs.run(StopWhen(holds=lambda: runs.fake.step == 3)) == INTERRUPTED
    assert time.monotonic() - began < 45
    assert runs.saved == (2, sum(runs.of_steps("rollout/prompts_drawn")))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sample-ahead")]


def test_a_stop_begins_no_further_step(new_runs) -> None:
    runs = new_runs(**QUICK)
    assert runs.run(StopWhen(holds=lambda: runs.fake.step == 1)) == INTERRUPTED
    assert runs.saved[0] == 1
    assert runs.fake.step == 1


def test_where_sigma_is_solved_the_sampler_has_the_newest_adapter(new_runs) -> None:
    runs = new_runs(
        **QUICK, aqn__unit="kl", aqn__kl_start=0.02, aqn__kl_end=0.004, aqn__sigma_start=0.1, aqn__stages=2,
        aqn__solver__prompts=4, aqn__solver__draws=2,
    )  # fmt: skip
    assert runs.run() == OK
    assert runs.of_steps("rollout/staleness") == [0, 1, 0, 1]
    first, again, third, last = runs.of_steps("noise/sigma")
    assert first == again > third == last
    assert runs.of_steps("noise/std_observed") == pytest.approx([first, again, third, last], rel=0.1)


@pytest.mark.parametrize(
    ("changes", "ahead_of"),
    [
        ({"checkpoint__every": 0, "eval__every": 0}, [2, 3, 4, 5, 6]),
        ({"checkpoint__every": 2, "eval__every": 0}, [2, 4, 6]),
        ({"checkpoint__every": 4, "eval__every": 3}, [2, 3, 6]),
        ({"checkpoint__every": 4, "eval__every": 0, "extended": [3]}, [2, 3, 6]),
        ({"checkpoint__every": 0, "eval__every": 0, "rollout__vllm_server__overlap": False}, []),
        ({"rollout__engine": "transformers"}, []),
    ],
)
def test_steps_after_a_checkpoint_an_evaluation_or_an_extension_are_not_sampled_ahead(
    tiny, changes: dict[str, Any], ahead_of: list[int]
) -> None:
    cfg = tiny(**SETTINGS | {"steps": 6} | changes)
    assert [step for step in range(1, 8) if may_be_sampled_ahead(cfg, step)] == ahead_of
