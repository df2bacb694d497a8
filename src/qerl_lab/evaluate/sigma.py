"""Which sigma of AQN is as much noise as a weight format.

Prints KL(quantized || BF16) of each format, and KL(noisy || clean) of each sigma on the BF16 base. Both are in nats per
token, over the same sampled completions. Noise whose KL is a format's is as large as the error of quantization:
`scale=pocket` takes its `aqn.sigma_start` from here.
"""

import torch
from torch import Tensor

from qerl_lab import rollout, tasks
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate import kl
from qerl_lab.formats import FORMATS
from qerl_lab.model import on_disk, policy
from qerl_lab.model.files import local_folder
from qerl_lab.model.loading import stored_as
from qerl_lab.model.policy import Policy
from qerl_lab.pocket.teacher import task_config
from qerl_lab.rollout.engine import Sampling

QUESTIONS, DRAWS = 64, 8


def measure(model: str, sigmas: list[float]) -> None:
    """Print both tables. Raises ConfigError for a model that cannot be loaded, and for one that is packed already."""
    folder = local_folder(model, None, key="model")
    on_disk.check_files(folder, f"model={model}")
    on_disk.check_chat_template(folder, f"model={model}")
    if stored_as(folder) is not None:
        raise ConfigError(f"model={model} is packed; allowed: the dense model, against which the KL is measured.")
    device = policy.device_of("auto")
    base, pairs = sampled_pairs(model, device)
    clean = states(base, CLEAN, pairs)
    print(f"{len(pairs)} completions, {len(clean)} tokens, on {device}")

    def kl_to_clean(other: Policy, noise: Noise) -> kl.Estimate:
        """KL(other with noise || base without), at temperature 1."""
        p = kl.logprobs(other.model.get_base_model(), states(other, noise, pairs))
        q = kl.logprobs(base.model.get_base_model(), clean)
        return kl.measure(p, q, [len(completion) for _, completion in pairs])

    for name in FORMATS:
        found = kl_to_clean(load(model, name, device), CLEAN)
        print(f"format {name:6}  KL to bf16   {found.nats:.5f} +- {found.standard_error:.5f} nats")
    for sigma in sigmas:
        drawn = [kl_to_clean(base, Noise(sigma, seed=0, step=step)).nats for step in range(1, DRAWS + 1)]
        mean, spread = sum(drawn) / DRAWS, f"{min(drawn):.5f} to {max(drawn):.5f} over {DRAWS} draws"
        print(f"sigma {sigma:<7g}  KL to clean  {mean:.5f} nats, {spread}")


def load(path: str, weight_format: str, device: torch.device) -> Policy:
    cfg = RunConfig()
    cfg.model.path, cfg.format.name = path, weight_format
    return policy.build(cfg, device)


def sampled_pairs(path: str, device: torch.device) -> tuple[Policy, kl.Pairs]:
    """The BF16 policy, and (prompt, completion) token ids that it sampled for held-out arithmetic questions."""
    task = tasks.load(task_config())
    base = load(path, "bf16", device)
    prompts = [base.prompt_ids(task.messages(question)) for question in task.heldout[:QUESTIONS]]
    out = rollout.build(RunConfig(), base).generate(prompts, 1, Sampling(max_tokens=64, seed=0))
    return base, [(prompt, group[0]) for prompt, group in zip(out.prompt_ids_P, out.completion_ids_P_G, strict=True)]


def states(sampler: Policy, noise: Noise, pairs: kl.Pairs) -> Tensor:
    """`kl.hidden_states` of the policy with noise."""
    with sampler.as_sampler(noise.onto_norms(sampler.clean_norms, sampler.norms)):
        return kl.hidden_states(sampler.model.get_base_model(), pairs)
