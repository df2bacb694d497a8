"""A real server on the GPU, in every format: started by the printed commands, near the trainer, led by its syncs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vllm_servers
from qerl_lab import rollout
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.rollout.engine import Sampling
from vllm_engines import BAND_MAX, BAND_MEAN, NEEDS_VLLM, trainer_gap

pytestmark = [pytest.mark.gpu, NEEDS_VLLM]

NOISE = Noise(0.05, seed=0, step=1)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "fp8", "bf16"])
def test_a_server_samples_from_the_policy(
    name: str, folder: Path, tiny: Callable[..., RunConfig], build_policy, tmp_path: Path
) -> None:
    def config(**changes: object) -> RunConfig:
        words = {
            "device": "auto", "model__path": str(folder), "format__name": name, "lora__rank": 16,
            "rollout__engine": "vllm_server", "rollout__max_completion_tokens": 128, "rollout__batch_size": 64,
            "rollout__vllm__kv_cache_gib": 1.0,
        }  # fmt: skip
        return tiny(**words | {"rollout__vllm_server__url": url} | changes)

    url = f"http://127.0.0.1:{vllm_servers.free_port()}"
    policy = build_policy(config())
    prompts = [[3, 4, 5], list(range(10, 60))]
    with vllm_servers.served(config(), tmp_path / "log"):
        engine = rollout.build(config(), policy)
        for noise in (CLEAN, NOISE, CLEAN):
            engine.sync(noise)
            held, expected = engine.norms(), noise.onto_norms(policy.clean_norms)
            assert all(torch.equal(held[layer], weight) for layer, weight in expected.items())
            out = engine.generate(prompts, 4, Sampling(64, seed=1))
            far = trainer_gap(policy, out, held)
            assert far.mean() < BAND_MEAN
            assert far.max() < BAND_MAX
        other = config(format__name="bf16" if name != "bf16" else "nvfp4")
        with pytest.raises(ConfigError, match=f"has format={name}"):
            rollout.build(other, policy)
        engine.close()
