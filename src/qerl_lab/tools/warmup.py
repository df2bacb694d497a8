"""Train a model on the format of the answers: `python -m qerl_lab.tools.warmup model=... task=gsm8k out=DIR`.

The words are checked before torch is imported. After an interruption or a failure the same command resumes from its
last checkpoint, with bit-identical results.
"""

from qerl_lab import exits

with exits.starting(__name__):
    import os

    from qerl_lab import terminal
    from qerl_lab.cli.grammar import Command
    from qerl_lab.tools.warmup_options import WarmupOptions, check


def warm_up(options: WarmupOptions) -> None:
    """Check the options, then train and write the model. Raises ConfigError, and what `run` raises."""
    check(options)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = shown.partition(",")[0]  # TRL refuses several GPUs in one process
    try:
        with terminal.quiet_imports():
            from qerl_lab.tools.warmup_training import run

        run(options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on from its last checkpoint") from None


LINE = "python -m qerl_lab.tools.warmup"
COMMAND = Command(
    LINE,
    "Teach a model the format of the answers by supervised training, all weights, on a task's worked solutions",
    WarmupOptions,
    warm_up,
    examples=(
        (
            f"{LINE} model=models/SmolLM2-135M-Instruct.Q4_1.gguf task=gsm8k out=models/smollm2-gsm8k",
            "minutes, on a GPU",
        ),
        (f"{LINE} model=pocket task=arithmetic epochs=0.1 out=models/pocket", "a try without a GPU or a hub"),
        (
            "python -m qerl_lab +experiment=nvfp4 scale=smollm2 model.path=models/smollm2-gsm8k",
            "train on the result",
        ),
    ),
    required=("model", "out"),
    alone=True,
)
main = exits.command(COMMAND.run)


if __name__ == "__main__":
    exits.run(main)
