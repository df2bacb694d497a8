"""Hydra plug-in `hydra/launcher=lab`: one process per job, GPU sharing, a live table, resumable jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


@dataclass
class LabLauncherConf:
    """Hydra's configuration of the launcher `lab`: the class to build."""

    _target_: str = "hydra_plugins.qerl_lab_launcher.LabLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="lab", node=LabLauncherConf, provider="qerl_lab")


class LabLauncher(Launcher):
    """Hydra launcher that runs the jobs of a sweep, after `cli.train` has checked them and created their directories.

    The keys `jobs`, `jobs_per_gpu` and `launcher` say how many jobs run at once, and where.
    """

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Override Hydra's hook: keep `config`, the composed configuration of the sweep, for `launch`."""
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Override Hydra's hook: run all jobs of the sweep to their ends.

        Hydra gets the status COMPLETED for every job, also for a failed one: run directories record how the jobs ended.
        """
        from qerl_lab.cli import scheduler, train  # late: other Hydra applications import plug-ins

        variables = {str(name): str(value) for name, value in self.config.hydra.job.env_set.items()}
        scheduler.run(train.CheckJobs.plan, train.command_line(), variables)
        return [JobReturn(overrides=words, status=JobStatus.COMPLETED) for words in job_overrides]
