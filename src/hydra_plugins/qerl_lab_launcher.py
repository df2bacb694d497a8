"""Hydra's plug-in `hydra/launcher=lab`: a process a job, shares of a GPU, a live table, and jobs that go on."""

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
    run_dirs: list[str] = field(default_factory=list)  # by job; qerl_lab.cli.check fills it in


ConfigStore.instance().store(group="hydra/launcher", name="lab", node=LabLauncherConf, provider="qerl_lab")


class LabLauncher(Launcher):
    """Runs jobs whose directories are claimed; `jobs`, `jobs_per_gpu` and `launcher` of the configuration say where."""

    def __init__(self, run_dirs: Sequence[str]) -> None:
        self.run_dirs = [Path(path) for path in run_dirs]

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs to their ends; their directories say how they ended."""
        from qerl_lab.cli import check, jobs, scheduler  # not when another Hydra application looks for plug-ins

        plan = jobs.read(Path(self.config.hydra.sweep.dir), self.run_dirs)
        variables = {str(name): str(value) for name, value in self.config.hydra.job.env_set.items()}
        scheduler.run(plan, check.command_line(), variables)
        return [JobReturn(overrides=words, status=JobStatus.COMPLETED) for words in job_overrides]
