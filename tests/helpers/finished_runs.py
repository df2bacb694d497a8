"""Create run directories of finished runs, with a non-zero adapter, without training."""

from pathlib import Path

from qerl_lab.config.schema import RunConfig
from qerl_lab.model import policy
from qerl_lab.record import resolved
from qerl_lab.record.directory import RunDirectory


def make_finished(folder: Path, cfg: RunConfig, built: policy.Policy) -> Path:
    """Write resolved.yaml, the adapter of `built`, and DONE; return the folder."""
    folder.mkdir(parents=True)
    cfg.run_dir = str(folder)
    resolved.write_config(folder, cfg)
    directory = RunDirectory(folder)
    policy.save_adapter(built.model, directory.adapter)
    directory.finish({"seconds": 1.0})
    return folder
