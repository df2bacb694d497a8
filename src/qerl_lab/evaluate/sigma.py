"""Find the sigma of AQN that is as much noise as a weight format.

Prints KL(quantized || BF16) of each format, KL(noisy || clean) of each sigma on the BF16 base, and the sigma for each
requested KL. All are in nats per token, over the same sampled completions. Noise with the same KL as a format disturbs
the policy as much as quantization does: `scale=pocket` takes its `aqn.sigma_start` from here.
"""

import torch

from qerl_lab import rollout, tasks
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.aqn.solver import solve
from qerl_lab.config.schema import AqnConfig, RunConfig
from qerl_lab.evaluate import kl, noise_kl
from qerl_lab.formats import FORMATS
from qerl_lab.model import policy
from qerl_lab.model.files import local_folder
from qerl_lab.model.loading import refuse_packed
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Sampling

QUESTIONS, DRAWS = 64, 8


def measure(model: str, sigmas: list[float], kls: list[float], relative: bool) -> None:
    """Print the tables. Raises ConfigError for a model that is packed or cannot be loaded.

    Args:
        kls: in nats per token; `aqn.found.solve` finds the sigma of each, as in a run with aqn.unit=kl.
        relative: sigma is relative to each norm's size, as in `aqn.Noise`.
    """
    folder = local_folder(model, None, key="model")
    refuse_packed(folder, f"model={model}", "against which the KL is measured. Type its path.")
    device = policy.device_of("auto")
    base, pairs = sampled_pairs(model, device)
    texts = noise_kl.texts(base, pairs, 1.0, len(pairs))
    print(f"{len(pairs)} completions, {texts.tokens} tokens, on {device}")
    for name in FORMATS:
        other = load(model, name, device)
        p = kl.logprobs(other.model.get_base_model(), noise_kl.states(other, CLEAN, pairs))
        q = kl.logprobs(base.model.get_base_model(), texts.clean_N[0])
        found = kl.measure(p, q, [len(completion) for _, completion in pairs])
        print(f"format {name:6}  KL to bf16   {found.nats:.5f} +- {found.standard_error:.5f} nats")

    def of_draws(sigma: float) -> list[float]:
        draws = [Noise(sigma, seed=0, step=step, relative=relative) for step in range(1, DRAWS + 1)]
        return [texts.nats([draw]) / texts.tokens for draw in draws]

    for sigma in sigmas:
        drawn = of_draws(sigma)
        mean, spread = sum(drawn) / DRAWS, f"{min(drawn):.5f} to {max(drawn):.5f} over {DRAWS} draws"
        print(f"sigma {sigma:<7g}  KL to clean  {mean:.5f} nats, {spread}")
    for target in kls:
        solved = solve(AqnConfig(), lambda sigma: sum(of_draws(sigma)) / DRAWS, target, AqnConfig().sigma_start)
        print(f"KL {target:<10g}  sigma        {solved.sigma:.3g}, of {solved.kl:.3g} nats, {solved.probes} tried")


def load(path: str, weight_format: str, device: torch.device) -> Policy:
    """Load a model in a weight format."""
    cfg = RunConfig()
    cfg.model.path, cfg.format.name = path, weight_format
    return policy.build(cfg, device)


def sampled_pairs(path: str, device: torch.device) -> tuple[Policy, kl.Pairs]:
    """Return the BF16 policy and the (prompt, completion) token ids it sampled for held-out arithmetic questions."""
    task = tasks.load(tasks.configured("arithmetic"))
    base = load(path, "bf16", device)
    prompts = [base.prompt_ids(task.messages(question)) for question in task.heldout[:QUESTIONS]]
    out = rollout.build(RunConfig(), base).generate(prompts, 1, Sampling(max_tokens=64, seed=0))
    return base, [(prompt, group[0]) for prompt, group in zip(out.prompt_ids_P, out.completion_ids_P_G, strict=True)]
