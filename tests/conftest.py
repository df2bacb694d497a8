"""Fixtures for all tests: small configurations, the embedded policy, and the rule for tests that need a GPU.

Tests must depend neither on the machine nor on what ran before: the first lines set the environment of every test, and
`process_restored` and `globals_unchanged` watch over what a test leaves in the process.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from qerl_lab.cli import launch
from qerl_lab.config.message import say_hub_is_asked
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.preflight import machine
from qerl_lab.system import exits
from qerl_lab.system.processes import LIBRARY_VARIABLES
from qerl_lab.tracking.mlflow import MLFLOW_ENVIRONMENT

if TYPE_CHECKING:
    from qerl_lab.model.policy import Policy

gc.disable()  # until all is collected, which imports a million objects that stay

# The user's own stores, trackers, clusters and jobs are none of the tests'.
for name in [name for name in os.environ if name.startswith(("MLFLOW", "WANDB", "SLURM", "HYDRA", "QERL_LAB"))]:
    del os.environ[name]
os.environ |= LIBRARY_VARIABLES | MLFLOW_ENVIRONMENT  # as for a run; libraries read these when they are imported
os.environ["OMP_NUM_THREADS"] = "1"  # one core for each process; several run at once

# Before anything imports triton: without a GPU its interpreter runs the kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Children of tests run in other folders, where a relative `PYTHONPATH=src` would name nothing.
if "PYTHONPATH" in os.environ:
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))

# A shell starts background jobs with Ctrl-C ignored, nohup with SIGHUP, and every child would inherit that: tests that
# send these signals would wait for nothing.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("helpers/*.py")))

# The parts of a run, as small as they still mean something.
TINY = {
    "steps": 3, "device": "cpu", "cpu_threads": 1, "rollout__prompts_per_step": 4, "rollout__group_size": 4,
    "rollout__max_prompt_tokens": 256, "rollout__max_completion_tokens": 16, "optim__micro_batch_size": 4,
    "lora__rank": 4, "task__train_questions": 64, "eval__questions": 8, "eval__samples": 2, "tracking__mlflow": False,
    "task__instruction": "Reply as <think>steps</think><answer>n</answer>.",
}  # fmt: skip


# Folders whose files take longest. They are run first, so that no worker waits for the last of another's.
SLOWEST = ("integration", "train", "warmup")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files. xdist would by default begin with those that hold most tests."""
    items.sort(key=lambda item: not set(SLOWEST) & set(item.path.parts))


def pytest_collection_finish() -> None:
    """Leave what was imported to itself: `gc.collect()`, which each training calls, need not look through it again."""
    gc.freeze()
    gc.enable()


def leave_what_stays_to_itself() -> None:
    """Keep `gc.collect()` from looking through what files have imported since, such as MLflow: 0.2 s each training."""
    if len(gc.get_objects()) > 50_000:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings would report leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu` is skipped where there is none, and fails there if one is required."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("QERL_REQUIRE_GPU") == "1":
        pytest.fail("QERL_REQUIRE_GPU=1, and torch sees no GPU")
    pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def process_restored() -> Iterator[None]:
    """Undo what a command changes in its process, which is the tests' own when a test calls it.

    The command line tells its children things through the environment. `warmup` turns on torch's deterministic mode,
    which fills every empty tensor: planning a model of 7B without memory then takes half a minute.
    """
    environment, folder = dict(os.environ), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in exits.SIGNALS}
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    levels = [logger.level for logger in loggers]
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)
    launch._children.clear()
    for answer in (machine.visible_gpus, machine.gpu_memory_bytes, say_hub_is_asked):
        answer.cache_clear()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
    if plt := sys.modules.get("matplotlib.pyplot"):
        plt.close("all")


# A process keeps this on purpose: its idle workers.
KEPT = {"qerl_lab.tasks.sandbox._kept"}


@pytest.fixture(scope="module", autouse=True)
def globals_unchanged() -> Iterator[None]:
    """Fail the file after which a module of the lab holds other objects or other entries than before it."""
    leave_what_stays_to_itself()
    before = module_globals()
    yield
    after = module_globals()
    assert {name for name in before if before[name] != after.get(name, before[name])} <= KEPT


def module_globals() -> dict[str, tuple[int, ...]]:
    """Return the identity of functions and constants in the lab's modules, and of entries of their lists, sets, dicts.

    A user's file (`qerl_lab_task_NAME`) is left out: each import replaces its functions.
    """
    found = {}
    for module, content in list(sys.modules.items()):
        if module.partition(".")[0] == "qerl_lab" and isinstance(content, ModuleType):
            for name, value in vars(content).items():
                if not name.startswith("__"):
                    entries = [*value.values()] if isinstance(value, dict) else value
                    found[f"{module}.{name}"] = id(value), *map(id, entries if isinstance(entries, list | set) else ())
    return found


@pytest.fixture(scope="session")
def tiny() -> Callable[..., RunConfig]:
    """Builds a small configuration; `tiny(lora__rank=2)` changes `lora.rank`."""

    def build(**changes: Any) -> RunConfig:
        values: dict[str, Any] = {}
        for name, value in (TINY | changes).items():
            *groups, key = name.split("__")
            node = values
            for group in groups:
                node = node.setdefault(group, {})
            node[key] = value
        return from_dict(values)

    return build


@pytest.fixture(scope="session")
def build_policy() -> "Callable[[RunConfig], Policy]":
    """Builds a policy whose adapters already do something (a fresh adapter is exactly zero)."""
    import torch

    from made_once import copies
    from qerl_lab.model import policy

    def build(cfg: RunConfig, device: torch.device) -> policy.Policy:
        built = policy.build(cfg, device)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in built.model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
        return built

    build_or_copy = copies(build)
    return lambda cfg: build_or_copy(cfg, policy.device_of(cfg.device))


@pytest.fixture(scope="module")
def policy(tiny: Callable[..., RunConfig], build_policy: "Callable[[RunConfig], Policy]") -> "Policy":
    """The policy of `tiny()`, one for a test file."""
    return build_policy(tiny())


@pytest.fixture(scope="module")
def drawn_once() -> Iterator[pytest.MonkeyPatch]:
    """Draws and tokenizes the questions once, for files that train and assert nothing of that."""
    from made_once import questions

    with questions() as patch:
        yield patch
