"""Find the sigma of AQN that is as much noise as a weight format.

Prints KL(quantized || BF16) of each format and KL(noisy || clean) of each sigma on the BF16 base, in nats per token,
over the same sampled completions. Noise with the same KL as a format disturbs the policy as much as quantization does:
`scale=pocket` takes its `aqn.sigma_start` from here.
"""

import sys

from qerl_lab.aqn import Noise
from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import AqnConfig
from qerl_lab.config.spelling import spell_list
from qerl_lab.evaluate import kl
from qerl_lab.evaluate.entropy import compare_to_dense, run_config, sample_texts
from qerl_lab.evaluate.evaluate_options import EntropyOptions, SigmaOptions
from qerl_lab.evaluate.format_effects import compare_noisy_to_clean
from qerl_lab.formats import FORMATS
from qerl_lab.model import policy
from qerl_lab.model.loading import require_dense
from qerl_lab.model.weight_files import local_folder

QUESTIONS, DRAWS = 64, 8


def run(options: SigmaOptions) -> None:
    """Print the KL of each format and of each of `options.sigmas`.

    Raises ConfigError if the model cannot be loaded, is packed, or has no norm that can get noise.
    """
    folder = local_folder(options.model, None, key="model")
    require_dense(folder, f"model={options.model}", "against which the KL is measured. Type its path.")
    device = policy.device_of("auto")
    texts_options = EntropyOptions(model=options.model, questions=QUESTIONS, max_completion_tokens=64)
    texts = sample_texts(texts_options, device)
    norms = list(dict.fromkeys(name.rpartition(".")[2] for name in texts.policy.norms))
    if not norms:
        raise ConfigError(
            f"model={options.model} has no norm to which AQN can add noise; allowed: RMSNorm layers that feed a linear "
            "layer. Type another model."
        )
    if {*norms} != {*AqnConfig().norms}:
        print(f"noise on the norms of this model: a run needs aqn.norms={spell_list(norms)}")
    print(f"{with_noun(len(texts.pairs), 'completion')}, {len(texts.states)} tokens, on {device}")
    for name in FORMATS:
        model, _ = policy.load_base(run_config(texts_options, name), device)
        nats, error = kl.mean_and_error(compare_to_dense(model, texts)[1], texts.lengths)
        print(f"format {name:6}  KL to bf16   {nats:.5f} +- {error:.5f} nats")
    notice = f"{with_noun(len(options.sigmas), 'sigma')} of {DRAWS} draws, each about as long as format bf16"
    print(notice, file=sys.stderr, flush=True)
    for sigma in options.sigmas:
        draws = [Noise(sigma, seed=0, step=step, relative=options.relative) for step in range(1, DRAWS + 1)]
        drawn = [compare_noisy_to_clean(texts, draw)[1].mean().item() for draw in draws]
        mean, spread = sum(drawn) / DRAWS, f"{min(drawn):.5f} to {max(drawn):.5f} over {DRAWS} draws"
        print(f"sigma {sigma:<7g}  KL to clean  {mean:.5f} nats, {spread}")
