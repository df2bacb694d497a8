"""The micro-batch size that a run chooses from measured memory, on a fake GPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from failing_engines import Runs
from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB
from qerl_lab.model.policy import Policy
from qerl_lab.record import checkpoint
from qerl_lab.rollout.engine import EngineFailed
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.system.exits import OK
from qerl_lab.train import micro_batch
from qerl_lab.train.micro_batch import choose, largest_fitting
from qerl_lab.train.ranks import ALONE
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, select
from ranks_as_threads import threads
from repeated import files_of, lines_of

SETTINGS = {
    "steps": 3, "checkpoint__every": 0, "eval__questions": 4, "eval__samples": 1, "optim__learning_rate": 0.02,
    "optim__micro_batch_size": None,
}  # fmt: skip
LIMIT = 1000  # bytes that a pass may take before memory runs out


@pytest.mark.parametrize(
    ("completions", "budget", "need", "size"),
    [
        (256, 640, lambda n: 10 * n, 64),
        (256, 639, lambda n: 10 * n, 32),
        (256, 640, lambda n: 100 + 10 * n, 32),  # gradients, which all sizes have
        (256, 500, lambda n: 100 + 10 * n, 32),  # twice 16 takes less than twice as much
        (256, 640, lambda n: max(300, 10 * n), 64),  # small passes take as much as the output head does
        (256, 900, lambda n: 10 * n + n * n / 8, 32),  # more than the line says
        (256, 1000, lambda n: 10 * n if n < 64 else 1200, 32),  # out of memory
        (256, 400, lambda n: 10 * n if n <= 16 else 30 * n, 16),  # 32 is tried, then 16 again
        (24, 1000, lambda n: 10 * n, 24),  # all there are
        (24, 190, lambda n: 10 * n, 12),  # 16 and 19 do not divide them
        (7, 60, lambda n: 10 * n, 1),
        (1, 10, lambda n: 10, 1),
        (64, 20, lambda n: 10, 64),
    ],
)
def test_the_largest_divisor_whose_passes_fit(
    completions: int, budget: int, need: Callable[[int], float], size: int
) -> None:
    measured: list[int] = []

    def measure(n: int) -> float:
        measured.append(n)
        return need(n) if need(n) <= LIMIT else torch.inf

    assert largest_fitting(completions, budget, measure) == size
    assert measured[-1] == size, "torch keeps the memory of another size"
    tried = [*dict.fromkeys(measured)]
    assert tried == [n for n in range(1, tried[-1] + 1) if completions % n == 0], "far beyond what fits"


def test_no_pass_is_tried_that_the_line_says_is_too_large() -> None:
    """A pass that is too large would take memory that another run needs."""
    for budget in range(115, 640, 35):
        measured: list[int] = []
        largest_fitting(256, budget, lambda n, tried=measured: tried.append(n) or 100 + 10 * n)
        assert max(measured) <= (budget - 100) / 10


class Gpu:
    """Fake torch.cuda of a GPU with 80 GiB: memory of other programs, of this process, and kept after passes."""

    def __init__(self, others: int) -> None:
        self.total, self.others, self.own = 80 * GIB, others * GIB, 4 * GIB
        self.kept, self.peak = 0, 0
        self.passes: list[tuple[int, int]] = []
        self.is_reset = False

    def empty_cache(self) -> None:
        self.kept = 0

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return self.total - self.others - self.own - self.kept, self.total

    def memory_reserved(self, *_: object) -> int:
        return self.own + self.kept

    def reset_peak_memory_stats(self, *_: object) -> None:
        self.peak, self.is_reset = self.memory_reserved(), True

    def max_memory_reserved(self, *_: object) -> int:
        return self.peak

    def run(self, completions: int, prompt_tokens: int) -> None:
        """Play the passes: a GiB for each completion."""
        self.passes.append((completions, prompt_tokens))
        self.is_reset = False
        if completions * GIB > self.mem_get_info()[0] + self.kept:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        self.kept = max(self.kept, completions * GIB)
        self.peak = self.memory_reserved()


@pytest.fixture
def on_gpu(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Gpu]:
    """Put the policy on a fake `Gpu`, of which other programs hold so many GiB."""

    def put(others: int) -> Gpu:
        gpu = Gpu(others)
        monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
        for name in (name for name in vars(Gpu) if name[0] != "_" and hasattr(torch.cuda, name)):
            monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
        trainer = SimpleNamespace(policy=policy, run_dummy_pass=gpu.run)
        monkeypatch.setattr(micro_batch, "LabTrainer", lambda *_: trainer)
        monkeypatch.setattr(micro_batch, "Cursor", lambda *_: None)
        return gpu

    return put


ENGINE, DATA = SimpleNamespace(memory_bytes=dict), SimpleNamespace(longest_prompt=100)
LARGE = {"rollout__prompts_per_step": 64, "optim__micro_batch_size": None}  # 256 completions, nine tenths of memory:


@pytest.mark.parametrize(
    ("others", "changes", "size"),
    [
        (0, {}, 64),  # 68.4 GiB
        (0, {"algorithm__updates_per_rollout": 8}, 32),  # all of an update
        (40, {}, 32),  # 32.4
        (41, {}, 16),  # 31.5
        (0, {"jobs_per_gpu": 2}, 16),  # of this job's 39, less the 4 that it holds
        (0, {"jobs": 2, "jobs_per_gpu": 4}, 8),  # of its 19
        (60, {"jobs_per_gpu": 2}, 8),  # of the 16 that are free, not of its 39
    ],
)
def test_it_fits_beside_what_others_hold(
    tiny, policy: Policy, on_gpu: Callable[[int], Gpu], others: int, changes: dict, size: int
) -> None:
    gpu = on_gpu(others)
    assert choose(tiny(**LARGE, **changes), policy, ENGINE, DATA, ALONE) == size
    assert gpu.passes[-1] == (size, 100)
    assert gpu.kept == size * GIB
    assert gpu.is_reset, "the metric would count what was measured"


def test_moments_of_adam_get_their_room(tiny, policy: Policy, on_gpu: Callable[[int], Gpu]) -> None:
    on_gpu(0)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    budgets = [
        micro_batch.budget_bytes(tiny(**changes), policy)
        for changes in ({"optim__name": "adamw_8bit", "device": "auto"}, {"optim__name": "adamw"})
    ]
    assert budgets == [int(68.4 * GIB) - 2 * trained, int(68.4 * GIB) - 8 * trained]


@pytest.mark.parametrize(("others", "takes"), [(75, "It takes 1.00 GiB."), (76, "CUDA out of memory. Tried")])
def test_no_room_for_one_completion_is_an_error_that_says_what_to_type(
    tiny, policy: Policy, on_gpu: Callable[[int], Gpu], others: int, takes: str
) -> None:
    """With 1 GiB free the run may take 0.9 GiB. With none free, not even one completion can be measured."""
    on_gpu(others)
    with pytest.raises(ConfigError) as caught:
        choose(tiny(**LARGE), policy, ENGINE, DATA, ALONE)
    said = str(caught.value)
    free = "0.90" if others == 75 else "0.00"
    assert f"one completion of 116 tokens does not fit into the {free} GiB that are free for it. {takes}" in said
    assert f"others {others}.00, free {76 - others}.00" in said
    assert "Type one of: a smaller jobs_per_gpu; rollout.max_completion_tokens lower than 16; model.gradient_" in said
    assert "micro_batch_size" not in said


def test_all_ranks_take_the_smallest_and_end_together(
    tiny, policy: Policy, on_gpu: Callable[[int], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(0)
    cfg = tiny(**LARGE, gpus=2)

    def chosen(*outcomes: int) -> list[object]:
        here = iter(outcomes)

        def fit_here(*_: object) -> int:
            if (size := next(here)) == 0:
                raise torch.OutOfMemoryError("It takes 3.00 GiB.")
            return size

        monkeypatch.setattr(micro_batch, "largest_fitting", fit_here)
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(choose, cfg, policy, ENGINE, DATA, ranks) for ranks in threads(2)]
        return [end.exception() or end.result() for end in ends]

    assert chosen(32, 8) == [8, 8]
    assert [type(end) for end in chosen(32, 0)] == [ConfigError, ConfigError]


@pytest.mark.parametrize(
    ("changes", "runs_out"),
    [
        ({"lora__dropout": 0.3, "algorithm__beta": 0.1}, False), ({"model__gradient_checkpointing": True}, True),
        ({"optim__packing": "on"}, False), ({"lora__rank": 0, "format__name": "bf16"}, True),
    ],
)  # fmt: skip
def test_a_measured_pass_reads_full_completions_and_leaves_nothing(
    tiny, build_policy, tmp_path: Path, changes: dict, runs_out: bool
) -> None:
    cfg = tiny(optim__micro_batch_size=1, **changes)
    policy = build_policy(cfg)
    trainer = LabTrainer(
        cfg, policy, TransformersEngine(policy, 8), Cursor(select(cfg, policy, tasks.load(cfg.task))), tmp_path, Stop()
    )
    policy.model.eval()
    random_state = torch.get_rng_state()
    seen: list[int] = []

    def look(_: object, __: object, keywords: dict) -> None:
        assert policy.model.training
        assert policy.base.is_gradient_checkpointing == cfg.model.gradient_checkpointing
        assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad), "not beside gradients"
        seen.append(keywords["input_ids"].numel())

    def run_out(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    watch = policy.model.register_forward_pre_hook(look, with_kwargs=True)
    fails = next(p for p in policy.model.parameters() if p.requires_grad).register_hook(run_out) if runs_out else watch
    try:
        with pytest.raises(torch.OutOfMemoryError) if runs_out else nullcontext():
            trainer.run_dummy_pass(3, prompt_tokens=20)
    finally:
        watch.remove()
        fails.remove()
    assert seen == [3 * (20 + cfg.rollout.max_completion_tokens)]
    assert all(p.grad is None for p in policy.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not policy.model.training
    assert not policy.base.is_gradient_checkpointing
    assert trainer.micro_batch == {}, "its entropies would keep the activations"


def test_the_longest_prompt_of_the_questions_is_measured_not_the_longest_allowed(tiny, policy: Policy) -> None:
    task = tasks.load(tiny().task)
    lengths = sorted({len(policy.chat.prompt_ids(task.messages(question))) for question in task.train})
    for limit, longest in ((lengths[-1] + 1, lengths[-1]), (lengths[-1] - 1, lengths[-2])):
        assert select(tiny(rollout__max_prompt_tokens=limit), policy, task).longest_prompt == longest


@pytest.fixture(scope="module")
def whole(new_runs) -> Runs:
    """A finished run that chose its micro-batch."""
    runs = new_runs()
    assert runs.run() == OK
    return runs


def test_on_a_cpu_the_size_is_the_default_and_the_run_equals_one_with_it_typed(new_runs, whole: Runs, capfd) -> None:
    typed, other = new_runs(optim__micro_batch_size=8), new_runs(optim__micro_batch_size=2)
    assert typed.run() == other.run() == OK
    assert "4 x 4 completions of at most 16 tokens, micro-batches of 8" in capfd.readouterr().out
    assert whole.directory.environment()["micro_batch_size"] == 8
    saved = checkpoint.newest(whole.directory.checkpoints)
    assert (saved.micro_batch_size, saved.config["optim.micro_batch_size"]) == (8, None), "a card would make an arm"
    assert lines_of(whole.directory.path) == lines_of(typed.directory.path)
    assert files_of(whole.directory.path) == files_of(typed.directory.path)
    assert lines_of(whole.directory.path) != lines_of(other.directory.path), "what the equality is worth"


PARTS = {  # what the passes could change
    "lora__dropout": 0.2, "algorithm__beta": 0.05, "algorithm__entropy_coef": 0.02,
    "model__gradient_checkpointing": True,
    "aqn__schedule": "linear", "aqn__reading": "equation", "aqn__sigma_start": 0.3, "aqn__sigma_end": 0.1,
    "optim__packing": "on", "steps": 2,
}  # fmt: skip


def test_a_run_with_a_measured_size_equals_one_with_the_size_typed(new_runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and passes are real, and the memory that they take is made up."""
    sizes: list[int] = []

    def peak_bytes(trainer: LabTrainer, prompt_tokens: int, completions: int) -> int:
        trainer.run_dummy_pass(completions, prompt_tokens)
        sizes.append(completions)
        return 10 * completions

    monkeypatch.setattr(micro_batch, "choose", micro_batch.choose_by_passes)
    monkeypatch.setattr(micro_batch, "peak_bytes", peak_bytes)
    monkeypatch.setattr(micro_batch, "budget_bytes", lambda *_: 45)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    measured, typed = new_runs(**PARTS), new_runs(**PARTS, optim__micro_batch_size=4)
    assert measured.run() == OK
    assert sizes == [1, 2, 4]
    assert measured.directory.environment()["micro_batch_size"] == 4
    assert typed.run() == OK
    assert len(sizes) == 3, "a number is measured too"
    assert lines_of(measured.directory.path) == lines_of(typed.directory.path)
    assert files_of(measured.directory.path) == files_of(typed.directory.path)


def test_a_resumed_run_keeps_its_size_whatever_is_free_then(
    new_runs, whole: Runs, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    runs = new_runs()
    with pytest.raises(EngineFailed, match="1 of 3 steps are saved"):
        runs.run("die@3")  # the evaluation, step 1, step 2
    monkeypatch.setattr(micro_batch, "MOST_ON_CPU", 2)
    assert runs.run() == OK
    assert "micro-batches of 8" in capfd.readouterr().out.rpartition("continuing after step 1")[0].splitlines()[-1]
    assert [session["micro_batch_size"] for session in runs.directory.environments()] == [8, 8]
    assert lines_of(runs.directory.path) == lines_of(whole.directory.path)
    assert files_of(runs.directory.path) == files_of(whole.directory.path)
