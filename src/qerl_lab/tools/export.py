"""Export a run for other libraries: `python -m qerl_lab.tools.export RUN_DIR out=DIR [merged=true]`."""

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab import terminal
    from qerl_lab.cli.grammar import Command
    from qerl_lab.tools.export_options import ExportOptions, check


def export(options: ExportOptions) -> None:
    """Check the options, then write the export. Raises ConfigError for wrong options, and what `run` raises."""
    check(options)
    with terminal.quiet_imports():
        from qerl_lab.tools.export_files import run

    run(options)


LINE = "python -m qerl_lab.tools.export"
COMMAND = Command(
    LINE,
    "Write what a run learned for PEFT, transformers and vLLM: an adapter, or a merged model, with a model card",
    ExportOptions,
    export,
    examples=(
        (f"{LINE} RUN_DIR out=exports/mine", "the adapter"),
        (f"{LINE} RUN_DIR out=exports/mine base=true", "and the base that it was trained on, dequantized"),
        (f"{LINE} RUN_DIR out=exports/mine-merged merged=true", "one model in bfloat16"),
    ),
    required=("run", "out"),
    bare="run",
    alone=True,
)
main = exits.command(COMMAND.run)


if __name__ == "__main__":
    exits.run(main)
