"""Mirror a run directory to Weights & Biases through its own client: `tracking=wandb`, the extra `qerl-lab[wandb]`.

Without a login (`wandb login`, WANDB_API_KEY) the client writes RUN_DIR/wandb, which `wandb sync` uploads later.
WANDB_MODE and the client's other environment variables work as its documentation says.
"""

import os
from collections.abc import Mapping
from typing import Any

from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.tracking.mlflow import Status, params, tags

EXIT_CODES: dict[Status, int] = {"FINISHED": 0, "FAILED": 1, "KILLED": 130}


class WandbMirror:
    """The W&B run of a run directory, with `key` of mlflow.json as id, so that a resumed run continues it.

    Calls may block and raise the client's exceptions. A step that is trained again after a kill is not sent again,
    because W&B keeps the first values of a step.
    """

    def __init__(self, cfg: RunConfig, directory: RunDirectory) -> None:
        import wandb
        from requests.utils import get_netrc_auth

        self._directory, self._offset = directory, 0
        key = str(directory.mirror()["key"])
        tagged = tags(cfg, directory, key)
        store = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        has_key = "WANDB_API_KEY" in os.environ or get_netrc_auth(store)  # else the client would ask
        self._run: Any = wandb.init(
            project=cfg.tracking.experiment,
            id=key,
            resume="allow",
            name=tagged["mlflow.runName"],
            dir=str(directory.path),
            config=params(cfg) | {"tags": tagged},
            mode=os.environ.get("WANDB_MODE") or ("online" if has_key else "offline"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._first = self._run.step  # first step to send: 0, or the one after the last step in W&B

    def update(self) -> None:
        """Log new lines of metrics.jsonl to W&B, skipping steps already logged there."""
        lines, self._offset = self._directory.metrics_from(self._offset)
        for line in lines:
            if line["step"] >= self._first:
                self._run.log(line["metrics"], step=line["step"])

    def close(self, status: Status, result: Mapping[str, Any], end_time: float) -> None:
        """Store the artifacts and `result` (see `Tracker.finish`); end the W&B run with the exit code of `status`."""
        import wandb

        record = wandb.Artifact(f"record-{self._run.id}", type="record")
        for path in self._directory.artifacts():
            record.add_file(str(path))
        self._run.log_artifact(record)
        self._run.summary.update(dict(result))
        self._run.finish(exit_code=EXIT_CODES[status])
