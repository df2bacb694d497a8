"""A launcher of Hydra whose jobs run in other processes, which get everything pickled, as joblib's do."""

import multiprocessing
from collections.abc import Sequence
from typing import Any

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class ForkedLauncher(Launcher):
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.given = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            job = cloudpickle.dumps((number, list(overrides), *self.given, Singleton.get_state()))
            process = multiprocessing.get_context("fork").Process(target=work, args=(job,))
            process.start()
            process.join()
        return []


def work(job: bytes) -> None:
    number, overrides, context, task, config, state = cloudpickle.loads(job)
    setup_globals()
    Singleton.set_state(state)
    cfg = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(cfg):
        cfg.hydra.job.id = cfg.hydra.job.num = number
    HydraConfig.instance().set_config(cfg)
    run_job(
        hydra_context=context, task_function=task, config=cfg, job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )  # fmt: skip


ConfigStore.instance().store(
    group="hydra/launcher", name="forked", node={"_target_": f"{__name__}.ForkedLauncher"}, provider="test"
)
