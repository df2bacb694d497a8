"""Print the command that starts a run's vLLM server: `python -m qerl_lab.tools.serve_line WORDS OF THE RUN`."""

from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.grammar import HELP
from qerl_lab.config.option import ConfigError
from qerl_lab.system import exits
from qerl_lab.system.terminal import quiet_third_parties

USAGE = "python -m qerl_lab.tools.serve_line"
MANUAL = f"""\
{USAGE} WORDS   Print the command that starts the vLLM server of a run.

WORDS are the words of the run, as after python -m qerl_lab, with rollout=vllm_server among them.

    {USAGE} +experiment=nvfp4_aqn scale=smollm2 rollout=vllm_server
"""


@exits.command
def main(words: list[str]) -> int:
    """Print the command that starts the vLLM server of the run that `words` (`key=value`) describe.

    Prints the manual without words or for --help. Returns the exit code: 0, or 2 if the words are wrong.
    """
    if not words or set(HELP) & set(words):
        print(MANUAL, end="")
        return exits.OK
    words = [word for word in words if not word.lstrip("+").startswith("run_dir=")]  # of no effect on the server
    jobs = make_plan(words, multirun=True).jobs
    if len(jobs) > 1:
        raise ConfigError("the words make several runs, and a server serves one run. Type one value for each key.")
    cfg = jobs[0].config
    if cfg.rollout.engine != "vllm_server":
        raise ConfigError(f"rollout.engine={cfg.rollout.engine} has no server. Type rollout=vllm_server.")
    quiet_third_parties()
    from qerl_lab.rollout.vllm_server import server_command

    print("\n".join(server_command.commands(cfg)))
    return exits.OK


if __name__ == "__main__":
    exits.run(main)
