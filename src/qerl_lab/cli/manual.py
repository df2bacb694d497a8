"""Texts of the command line: the list of experiments, --help, the tables of a dry run and of a sweep.

An option is described by the first comment line of its YAML file, a key by its help in config/schema.py.
"""

import shlex
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from qerl_lab.cli.compose import Job, Plan, make_plan
from qerl_lab.cli.grammar import format_entry, format_key_entry
from qerl_lab.cli.overrides import COMMANDS, GROUPS
from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import default_option_by_group, group_folder
from qerl_lab.config.message import first_and_last, some_of, with_noun
from qerl_lab.config.spelling import resume_override, shell_override
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system.terminal import by_numbers, columns, format_path, python_command

ABOUT = "qerl-lab: reinforcement learning of language models on 4-bit weights (QeRL, arXiv 2510.11696)"
EXAMPLES = (
    ("python -m qerl_lab +experiment=nvfp4_aqn", "the main job: two CPU cores, two to four minutes"),
    ("python -m qerl_lab +experiment=nvfp4_aqn scale=paper_gsm8k_7b rollout=vllm", "the paper's run on GSM8K"),
    ("python -m qerl_lab +experiment=nvfp4 lora=rank64 optim.learning_rate=3e-5 seed=1", "groups and keys"),
    (
        "python -m qerl_lab +experiment=nvfp4 scale=custom task=gsm8k model.path=DIR",
        "your own model, any Hugging Face causal LM: the schema's learning rate and lengths",
    ),
    ("python -m qerl_lab -m +experiment=nvfp4,bf16 seed=0,1,2", "a sweep: a run for each combination"),
    ("python -m qerl_lab +sweeps=weight_formats seed=0 dry_run=true", "what a sweep from a file would run"),
    ("python -m qerl_lab resume=RUN_DIR", "continue an interrupted run"),
    ("python -m qerl_lab +experiment=nvfp4_aqn --cfg job", "the whole configuration of a run"),
)

FLAGS = (
    "Flags (Hydra's): -m runs a sweep; --cfg job|hydra|all prints the configuration; --info prints how it",
    "was composed; --config-dir DIR adds options of your own to the groups; --hydra-help lists the rest.",
    "--version prints the version.",
    "Exit codes: 0 done, 1 a run failed, 2 a configuration error, 130 interrupted.",
)


def overview() -> str:
    """Return the text that a bare `python -m qerl_lab` prints: a list of the experiments, and what to type."""
    return "\n".join([
        ABOUT, "", "Experiments:", *_format_options("experiment"), "",
        f"Run one: {EXAMPLES[0][0]}",
        "Four formats without and with noise, five seeds each: python -m qerl_lab +sweeps=weight_formats",
        "Every group, option and key, and the other commands: python -m qerl_lab --help",
    ])  # fmt: skip


def help_text() -> str:
    """Return the text of `python -m qerl_lab --help`: examples, commands, groups with options, keys with defaults."""
    lines = [ABOUT, "", "  python -m qerl_lab [FLAGS] GROUP=OPTION ... KEY=VALUE ...", "", "Examples:"]
    for command, meaning in EXAMPLES:
        lines += [f"  {command}", f"      {meaning}"]
    lines += ["", "Other commands (--help lists the options of each):"]
    for name, meaning in COMMANDS.items():
        lines += format_entry(f"python -m qerl_lab.{name}", meaning, 38)
    lines += ["", "Groups and their options (* is the default):"]
    defaults = default_option_by_group()
    for group, about in GROUPS.items():
        lines += ["", f"{group}: {about}", *_format_options(group, defaults.get(group))]
    lines += ["", "Keys and their values in the default run (a scale or an option may set others; see --cfg job)."]
    lines += ["Table, Figure, Sec., App. and Eq. are of the paper:"]
    (usual,) = make_plan([], multirun=False).jobs
    for _, keys in groupby(leaves(usual.config), key=lambda leaf: leaf.section):
        lines.append("")
        for name, field, value in keys:
            lines += format_key_entry(name, field, value, 36)
    return "\n".join([*lines, "", *FLAGS])


def describe_option(path: Path) -> str:
    """Return the description of an option's YAML file: its first comment that is no instruction to Hydra, or ""."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = (line[1:].strip() for line in lines if line.startswith("#"))
    return next((line for line in comments if not line.startswith("@")), "")


def _format_options(group: str, default: str | None = None) -> list[str]:
    """Format all options of a group with their descriptions, as lines. A star marks the option `default`."""
    files = {path.stem: path for path in group_folder(group).glob("*.yaml")}
    width, lines = max(map(len, files)) + 4, list[str]()
    for name in sorted(files, key=by_numbers):
        lines += format_entry(name + ("*" if name == default else ""), describe_option(files[name]), width)
    return lines


def dry_run_table(plan: Plan) -> str:
    """Format the table of a dry run: the jobs of a command, one per line, with the overrides in which they differ."""
    rows = []
    overrides_of_jobs = split_overrides(plan.jobs)[1] if plan.multirun else [[]]
    not_repeated = ("experiment", "seed", "dry_run")  # keys that the text shows elsewhere
    for job, overrides in zip(plan.jobs, overrides_of_jobs, strict=True):
        cfg = job.config
        rows.append({
            "job": job.number, "experiment": cfg.experiment, "scale": cfg.scale, "model": cfg.model.name,
            "format": cfg.format.name, "aqn": cfg.aqn.schedule, "algorithm": cfg.algorithm.name, "rank": cfg.lora.rank,
            "seed": cfg.seed, "steps": cfg.steps, "batch": cfg.completions_per_step,
            "overrides": " ".join(word for word in overrides if word.lstrip("+").partition("=")[0] not in not_repeated),
            "run directory": job.run_dir.relative_to(plan.directory) if plan.multirun else format_path(job.run_dir),
        })  # fmt: skip
    shown = [name for name in rows[0] if name != "overrides" or any(row[name] for row in rows)]
    table = columns([shown, *([str(row[name]) for name in shown] for row in rows)])
    place = f"in {format_path(plan.directory)}" if plan.multirun else "as above"
    done = [job for job in plan.jobs if job.begun and RunDirectory(job.run_dir).status == "done"]
    skip = f" except {len(done)} that are done" if done else ""
    end = f"dry run: would run {with_noun(len(plan.jobs), 'job')} {place}{skip}; nothing was started or written"
    return "\n".join([table, *_format_notes(plan.jobs), end])


def opening_lines(plan: Plan) -> str:
    """Format what a command prints before its jobs start: the directory, what becomes of earlier runs, and notes."""
    lines = [f"{with_noun(len(plan.jobs), 'job')} in" if plan.multirun else "run directory:"]
    lines[0] += f" {format_path(plan.directory)}"
    if any(job.begun for job in plan.jobs):
        done = sum(RunDirectory(job.run_dir).status == "done" for job in plan.jobs)
        to_do = f", {len(plan.jobs) - done} to run" if done < len(plan.jobs) else ""
        lines.append(f"begun before: {done} done{to_do} (hydra.sweep.dir=NEW_DIR begins all again)")
    return "\n".join([*lines, *_format_notes(plan.jobs)])


def _format_notes(jobs: list[Job]) -> list[str]:
    """Format the notes of jobs as lines, each note once, with the numbers of its jobs unless all jobs have it."""
    about: dict[str, list[str]] = {}
    for job in jobs:
        for note in job.notes:
            about.setdefault(note, []).append(str(job.number))
    return [
        f"note: {note}" + ("" if len(numbers) == len(jobs) else f" (job {some_of(numbers)})")
        for note, numbers in about.items()
    ]


def sweep_table(plan: Plan) -> str:
    """Format the table at a sweep's end: each job's status with headline numbers, or the reason of its failure.

    Lines below the table name the commands that report the sweep and that continue unfinished jobs.
    """
    runs = [RunDirectory(job.run_dir) for job in plan.jobs]
    statuses = [run.status for run in runs]
    shared, overrides_of_jobs = split_overrides(plan.jobs)
    rows = [["job", "overrides", "status", "accuracy", "entropy", "tokens/s", "seconds", "run directory"]]
    for job, overrides, run, status in zip(plan.jobs, overrides_of_jobs, runs, statuses, strict=True):
        where = str(job.run_dir.relative_to(plan.directory))
        rows.append([str(job.number), " ".join(overrides), status, *_headline_cells(run.result()), where])
    header, *body = columns(rows).splitlines()
    lines = ["", *([f"all jobs: {' '.join(shared)}"] if shared else []), header]
    for run, status, line in zip(runs, statuses, body, strict=True):
        lines.append(line)
        if status == "failed":
            lines.append(f"     {run.reason}")
    counts = ", ".join(f"{statuses.count(word)} {word}" for word in dict.fromkeys(statuses))
    here, command = format_path(plan.directory), f"{python_command()} -m qerl_lab"
    lines.append(f"{with_noun(len(plan.jobs), 'job')} in {here}: {counts}")
    if "done" in statuses:
        out = shell_override("out", f"results/{plan.directory.name}")
        lines.append(f"next: {command}.report {shlex.quote(here)} {out}")
        # That report tests the paper's claims, unless the folder has a claims.yaml.
        for file in sorted({file for job in plan.jobs if (file := job.config.preregistration)}):
            claims = shell_override("claims", format_path(Path(file)))
            lines.append(f"next: {command}.report verdicts {shlex.quote(here)} {claims}")
    left = [
        job for job, run, status in zip(plan.jobs, runs, statuses, strict=True) if run.is_claimed and status != "done"
    ]
    if left:
        lines.append(f"continue job {left[0].number} with: {command} {resume_override(format_path(left[0].run_dir))}")
        lines.append(f"continue all jobs with the same line, or: {command} {resume_override(here)}")
    return "\n".join(lines)


def _headline_cells(result: Mapping[str, Any]) -> list[str]:
    """Format accuracy, entropy (nats), tokens/s and seconds of a run; - for each that its `result` (DONE) lacks."""
    accuracy, entropy = "-", "-"
    if "accuracy_before" in result and "accuracy_after" in result:
        accuracy = f"{result['accuracy_before']:.3f} -> {result['accuracy_after']:.3f}"
    if "entropy_first" in result and "entropy_last" in result:
        entropy = first_and_last(result["entropy_first"], result["entropy_last"], int(result.get("steps", 0)))
    speed = [f"{result[key]:.0f}" if key in result else "-" for key in ("tokens_per_second", "seconds")]
    return [accuracy, entropy, *speed]


def split_overrides(jobs: list[Job]) -> tuple[list[str], list[list[str]]]:
    """Return the overrides that all jobs share, and for each job the others. With a single job none are shared."""
    shared = [word for word in jobs[0].overrides if all(word in job.overrides for job in jobs)] if len(jobs) > 1 else []
    return shared, [[word for word in job.overrides if word not in shared] for job in jobs]
