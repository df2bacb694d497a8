"""Quantize a model to a checkpoint in 4 or 8 bits: `python -m qerl_lab.quantize model=... format=nvfp4 out=DIR`.

Options are checked before torch is imported.
"""

import os
import sys

from qerl_lab.cli.grammar import Command
from qerl_lab.quantize.quantize_options import QuantizeOptions, check
from qerl_lab.system import exits, terminal


def quantize(options: QuantizeOptions) -> None:
    """Check the options, then quantize the model and print the quality of the checkpoint.

    Raises ConfigError for invalid options or an unusable model, ValueError if a file is damaged or the format cannot
    store a weight.
    """
    check(options)
    if not sys.stderr.isatty():  # llmcompressor draws hundreds of progress bars, each update a new line in a log file
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    with terminal.quiet_imports():
        from qerl_lab.quantize.quantize_model import run

    run(options)


LINE = "python -m qerl_lab.quantize"
COMMAND = Command(
    LINE,
    "Quantize a model to a checkpoint in 4 or 8 bits that this lab, transformers and vLLM load",
    QuantizeOptions,
    quantize,
    examples=(
        (f"{LINE} model=pocket format=nvfp4 out=checkpoints/pocket-nvfp4", "the embedded policy, in seconds"),
        (f"{LINE} model=Qwen/Qwen2.5-7B-Instruct format=mxfp4 out=checkpoints/7b-mxfp4", "any model of the hub"),
        (
            f"{LINE} model=DIR format=nvfp4 method=gptq dataset=texts.jsonl out=checkpoints/7b-gptq",
            "calibrated (make quantize-env, then .venv-quantize/bin/python)",
        ),
        (
            "python -m qerl_lab +experiment=mxfp4_aqn scale=custom model.path=checkpoints/7b-mxfp4 task=gsm8k",
            "train on the result",
        ),
    ),
    required=("model", "out"),
    alone=True,
)
main = exits.command(COMMAND.run)


if __name__ == "__main__":
    exits.run(main)
