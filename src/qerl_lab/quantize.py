"""From a model to a 4-bit checkpoint: `python -m qerl_lab.quantize model=... format=nvfp4 out=DIR`.

The words are read and checked before torch is imported. Exit codes: 0 done, 1 failed, 2 a configuration error, 130
interrupted; after an interruption or a failure the same command goes on where it stopped.
"""

import os
import sys

from qerl_lab import arguments
from qerl_lab.config import ConfigError
from qerl_lab.launch import CHILD_ENVIRONMENT, FAILURE, INTERRUPTED, OK, USAGE
from qerl_lab.quantize_config import QuantizeConfig, check

ABOUT = "From a model to a checkpoint in 4 bits that this lab, transformers and vLLM load"
COMMAND = "python -m qerl_lab.quantize"
EXAMPLES = (
    (f"{COMMAND} model=pocket format=nvfp4 out=checkpoints/pocket-nvfp4", "the embedded policy, in seconds"),
    (f"{COMMAND} model=Qwen/Qwen2.5-7B-Instruct format=mxfp4 out=checkpoints/7b-mxfp4", "round to nearest"),
    (
        f"{COMMAND} model=DIR format=nvfp4 method=gptq dataset=texts.jsonl out=checkpoints/7b-gptq",
        "calibrated (make quantize-env, then .venv-quantize/bin/python)",
    ),
    ("python -m qerl_lab +experiment=nvfp4_aqn scale=custom model.path=checkpoints/7b-nvfp4", "train on the result"),
)


def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    if not words or set(arguments.HELP) & set(words):
        print(arguments.manual(ABOUT, COMMAND, QuantizeConfig(), EXAMPLES))
        return OK
    try:
        cfg = arguments.read(QuantizeConfig, words)
        check(cfg)
        # llmcompressor draws hundreds of bars, on a terminal over each other, in a log file one line after the other.
        calm = {} if sys.stderr.isatty() else {"TQDM_MININTERVAL": "30"}
        os.environ |= {name: value for name, value in (CHILD_ENVIRONMENT | calm).items() if name not in os.environ}
        from qerl_lab.quantization import run

        run(cfg)
        return OK
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
