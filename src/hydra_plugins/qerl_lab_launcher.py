"""Hydra plug-in `hydra/launcher=lab`: one process per job, GPU sharing, a live table, resumable jobs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


@dataclass
class LabLauncherConf:
    _target_: str = "hydra_plugins.qerl_lab_launcher.LabLauncher"
    run_dirs: list[str] = field(default_factory=list)  # by job; cli.check fills it in


ConfigStore.instance().store(group="hydra/launcher", name="lab", node=LabLauncherConf, provider="qerl_lab")


class LabLauncher(Launcher):
    """Run jobs whose directories are claimed; the keys `jobs`, `jobs_per_gpu` and `launcher` say where."""

    def __init__(self, run_dirs: Sequence[str]) -> None:
        self.run_dirs = [Path(path) for path in run_dirs]

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs to their ends. Their directories record the results, so none is returned to Hydra."""
        from qerl_lab.cli import check, jobs, scheduler  # late: other Hydra applications import plug-ins

        plan = jobs.read_plan(Path(self.config.hydra.sweep.dir), self.run_dirs)
        variables = {str(name): str(value) for name, value in self.config.hydra.job.env_set.items()}
        scheduler.run(plan, check.command_line(), variables)
        return [JobReturn(overrides=words, status=JobStatus.COMPLETED) for words in job_overrides]
