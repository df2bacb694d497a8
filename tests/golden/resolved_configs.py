"""Record the composed configurations: the defaults, the changes of each scale, and the changes of each arm.

Rewrite resolved_configs.yaml after an intended change: `python tests/golden/resolved_configs.py`.
"""

from pathlib import Path
from typing import Any

import yaml

from qerl_lab.cli.compose import make_plan
from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.schema import RunConfig

RECORD = Path(__file__).with_name("resolved_configs.yaml")


def compose() -> dict[tuple[str, str], RunConfig]:
    """Compose every arm at the pocket scale and two arms at every scale, by (arm, scale), as the command does."""
    lines = (
        [f"+experiment={','.join(choices_of('experiment'))}", "scale=pocket"],
        ["+experiment=bf16,nvfp4_aqn", f"scale={','.join(choices_of('scale'))}"],
    )
    jobs = [job for line in lines for job in make_plan(line, multirun=True).jobs]
    return {(job.config.experiment, job.config.scale): job.config for job in jobs}


def differences(composed: dict[tuple[str, str], RunConfig]) -> dict[str, Any]:
    scales, arms = sorted({scale for _, scale in composed}), sorted({arm for arm, _ in composed})
    schema = _flat(RunConfig())
    return {
        "schema": schema,
        "scales, bf16 against the schema": {scale: _changes(schema, composed["bf16", scale]) for scale in scales},
        "arms, against bf16 at the pocket scale": {
            arm: _changes(_flat(composed["bf16", "pocket"]), composed[arm, "pocket"]) for arm in arms
        },
    }


def _flat(config: RunConfig) -> dict[str, Any]:
    """Return the keys and values. A model under this folder has its path as typed and no hash, fetched or not."""
    flat = {name: value for name, _, value in leaves(config)}
    return flat | {"model.path": config.model.path.removeprefix(f"{Path.cwd()}/"), "model.hash": None}


def _changes(base: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in _flat(config).items() if value != base[name]}


if __name__ == "__main__":
    RECORD.write_text(yaml.safe_dump(differences(compose()), sort_keys=False, width=120), encoding="utf-8")
