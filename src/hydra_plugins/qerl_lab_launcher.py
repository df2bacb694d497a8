"""Hydra plug-in `hydra/launcher=lab`: one process per job, GPU sharing, a live table, resumable jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig


@dataclass
class LabLauncherConf:
    """Hydra's configuration of the launcher `lab`: the class to build."""

    _target_: str = "hydra_plugins.qerl_lab_launcher.LabLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="lab", node=LabLauncherConf, provider="qerl_lab")


class LabLauncher(Launcher):
    """Hydra launcher that runs the jobs of a sweep, after `cli.train` has checked them and created their directories.

    The keys `jobs`, `jobs_per_gpu` and `launcher` say how many jobs run at once, and where.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Override Hydra's hook: store Hydra's callbacks and the configuration of the sweep for `launch`."""
        self.callbacks, self.config = hydra_context.callbacks, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Override Hydra's hook: run all jobs of the sweep to their ends, then end the sweep as Hydra would.

        `CheckJobs` makes Hydra launch the first job alone, and exits at the end of the sweep. So Hydra never comes to
        the other jobs, which it would compose before their launch although `CheckJobs` has composed them.
        """
        from qerl_lab.cli import scheduler, train  # late: other Hydra applications import plug-ins

        variables = {str(name): str(value) for name, value in self.config.hydra.job.env_set.items()}
        scheduler.run(train.CheckJobs.plan, train.command_line(), variables)
        self.callbacks.on_multirun_end(config=self.config)
        return []
