"""How far apart two samplers are: by quantization, and by AQN noise of a given sigma.

    python -m qerl_lab.calibrate [--model PATH] [--sigmas 0.05,0.1,0.2]

Prints, in nats per completion token over the same sampled completions, KL(quantized || BF16) of each format and
KL(noisy || clean) of each sigma on the BF16 base. Noise whose KL is of the order of a format's is noise of the size
that quantization itself makes: `scale=pocket` takes its `aqn.sigma_start` from here.
"""

import argparse

import torch
from torch import Tensor

from qerl_lab import formats, policy, progress, tasks
from qerl_lab.aqn import Noise
from qerl_lab.config import ConfigError, RunConfig
from qerl_lab.formats.files import local_folder
from qerl_lab.formats.loading import stored_as
from qerl_lab.pretrain import task_config
from qerl_lab.rollout import Sampling
from qerl_lab.rollout.transformers import TransformersEngine

QUESTIONS, DRAWS = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qerl_lab.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pocket", help="as model.path")
    parser.add_argument("--sigmas", default="0.02,0.05,0.1,0.15,0.2,0.3", help="comma-separated")
    args = parser.parse_args()
    progress.quiet_third_parties()
    try:
        measure(args.model, list(map(float, args.sigmas.split(","))))
    except ConfigError as error:
        parser.error(str(error))


def measure(model: str, sigmas: list[float]) -> None:
    """Print both tables. Raises ConfigError for a model that cannot be loaded, and for one that is packed already."""
    if stored_as(local_folder(model, None, key="--model")) is not None:
        raise ConfigError(f"--model={model} is packed; allowed: the dense model, against which the KL is measured.")
    device = policy.device_of("auto")
    engine, pairs = sampled_pairs(model, device)
    clean = engine.logprobs(pairs, 1.0)
    print(f"{len(pairs)} completions, {clean.shape[0]} tokens, on {device}")
    for name in formats.names():
        quantized = TransformersEngine(load(model, name, device), batch_size=256).logprobs(pairs, 1.0)
        print(f"format {name:6}  KL to bf16   {kl(quantized, clean):.5f} nats")
    for sigma in sigmas:
        drawn = [noisy_kl(engine, pairs, clean, Noise(sigma, seed=0, step=step)) for step in range(1, DRAWS + 1)]
        mean, spread = sum(drawn) / DRAWS, f"{min(drawn):.5f} to {max(drawn):.5f} over {DRAWS} draws"
        print(f"sigma {sigma:<7g}  KL to clean  {mean:.5f} nats, {spread}")


def load(path: str, weight_format: str, device: torch.device) -> policy.Policy:
    cfg = RunConfig()
    cfg.model.path, cfg.format.name = path, weight_format
    return policy.build(cfg, device)


def sampled_pairs(path: str, device: torch.device) -> tuple[TransformersEngine, list[tuple[list[int], list[int]]]]:
    """The BF16 sampler, and (prompt, completion) token ids that it sampled for held-out arithmetic questions."""
    task = tasks.load(task_config())
    base = load(path, "bf16", device)
    engine = TransformersEngine(base, batch_size=256)
    prompts = [base.prompt_ids(task.messages(question)) for question in task.heldout[:QUESTIONS]]
    out = engine.generate(prompts, 1, Sampling(max_tokens=64, seed=0))
    return engine, [(prompt, group[0]) for prompt, group in zip(out.prompt_ids_P, out.completion_ids_P_G, strict=True)]


def noisy_kl(
    engine: TransformersEngine, pairs: list[tuple[list[int], list[int]]], clean: Tensor, noise: Noise
) -> float:
    engine.sync(engine.policy, noise)
    return kl(engine.logprobs(pairs, 1.0), clean)


def kl(p: Tensor, q: Tensor) -> float:
    """Mean over tokens of KL(p || q) in nats, from log-probabilities [tokens, vocabulary]."""
    return (p.exp() * (p - q)).sum(-1).mean().item()


if __name__ == "__main__":
    main()
