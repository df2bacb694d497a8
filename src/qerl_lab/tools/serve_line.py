"""Print the command that starts a run's vLLM server: `python -m qerl_lab.tools.serve_line OVERRIDES`."""

from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.grammar import HELP
from qerl_lab.config.option import ConfigError
from qerl_lab.system import exits
from qerl_lab.system.terminal import quiet_imports

USAGE = "python -m qerl_lab.tools.serve_line"
MANUAL = f"""\
{USAGE} OVERRIDES   Print the command that starts the vLLM server of a run.

OVERRIDES are the run's KEY=VALUE, as after python -m qerl_lab, with rollout=vllm_server among them.

    {USAGE} +experiment=nvfp4_aqn scale=smollm2 rollout=vllm_server
"""


@exits.command
def main(arguments: list[str]) -> int:
    """Print the command that starts the vLLM server of the run that the overrides in `arguments` describe.

    Prints the manual without arguments or for --help. Returns the exit code: 0, or 2 if an override is wrong.
    """
    if not arguments or set(HELP) & set(arguments):
        print(MANUAL, end="")
        return exits.OK
    overrides = [word for word in arguments if not word.lstrip("+").startswith("run_dir=")]  # no effect on the server
    jobs = make_plan(overrides, multirun=True).jobs
    if len(jobs) > 1:
        raise ConfigError("the overrides make several runs, and a server serves one. Type one value for each key.")
    cfg = jobs[0].config
    if cfg.rollout.engine != "vllm_server":
        raise ConfigError(f"rollout.engine={cfg.rollout.engine} has no server. Type rollout=vllm_server.")
    with quiet_imports():
        from qerl_lab.rollout.vllm_server import server_command

    print("\n".join(server_command.commands(cfg)))
    return exits.OK


if __name__ == "__main__":
    exits.run(main)
