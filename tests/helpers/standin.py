"""A stand-in for a run's process without torch, to test how the command line handles its end.

The run's seed selects its behaviour, in its first session or in all. Runs with other seeds complete at once, or after a
second from seed `SLOW` on. Each writes its environment and the files that it sees to RUN_DIR/seen.json.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

from qerl_lab.cli import launch
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from waiting import wait_for

DONE, FAILS, DIES, SIGNALLED, WAITS, EMPTY, CRASHES_AFTER, REFUSES, STOPS = range(9)
SLOW = 20
CHILD = '''
import json, os, re, signal, sys, time
if os.environ.get("RANK", "0") != "0": sys.exit()  # the first of several processes writes the run's files
run_dir, parent, began = sys.argv[1], os.getppid(), time.time()
path = lambda name: os.path.join(run_dir, name)
def write(name, text):
    with open(path(name), "w") as f: f.write(text)
resolved = open(path("resolved.yaml")).read()
seed, steps = (int(re.search(rf"^{key}: (\\d+)", resolved, re.M)[1]) for key in ("seed", "steps"))
line = lambda step: json.dumps({"step": step, "time": began, "metrics": {"reward/mean": 0.5}}) + "\\n"
def done(numbers):
    write("metrics.jsonl", "".join(map(line, range(1, steps + 1))))
    with open(path("eval.parquet"), "wb") as f: f.write(EVALUATIONS)
    write("DONE", json.dumps(numbers))
signals = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda n, frame: signals.append(n))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
sweep = os.path.dirname(os.path.abspath(run_dir))
claimed = [name for name in sorted(os.listdir(sweep)) if os.path.exists(os.path.join(sweep, name, "resolved.yaml"))]
sessions = 1 + (json.load(open(path("seen.json")))["sessions"] if os.path.exists(path("seen.json")) else 0)
seen = {"environment": dict(os.environ), "files": sorted(os.listdir(run_dir)), "pid": os.getpid(), "claimed": claimed}
seen |= {"sessions": sessions, "began": began}
write("seen.json", json.dumps(seen))
numbers = {"accuracy_before": 0.5, "accuracy_after": 0.75, "entropy_first": 0.3, "entropy_last": 0.2}
numbers |= {"tokens_per_second": 1234.4, "seconds": 95.2}
match seed:
    case 1 if sessions == 1: write("FAILED", "ValueError: the reason\\n\\nTraceback ..."); sys.exit(1)
    case 2: os.kill(os.getpid(), signal.SIGKILL)
    case 3 if sessions == 1:
        while not signals and time.time() < began + 90: time.sleep(0.01)
        time.sleep(0.5)  # finishing the step
        write("signals.json", json.dumps(sorted(set(signals))))
        sys.exit(130)
    case 4 if sessions == 1:
        write("metrics.jsonl", line(25))
        while not signals and os.getppid() == parent: time.sleep(0.02)
        sys.exit(130)
    case 5: pass
    case 6: done({}); os.kill(os.getpid(), signal.SIGKILL)
    case 7:
        os.remove(path("seen.json"))
        write("FAILED", "ConfigError: what is wrong. Type this.\\n\\nTraceback ..."); sys.exit(2)
    case 8 if sessions == 1:
        os.kill(os.getppid(), signal.SIGTERM)
        while not os.path.exists(os.path.join(sweep, "INTERRUPTED")): time.sleep(0.01)  # or the next job may begin
        sys.exit(130)
    case _:
        if seed >= 20: print("the console of", seed, flush=True); write("metrics.jsonl", line(25)); time.sleep(1)
        write("seen.json", json.dumps(seen | {"ended": time.time()}))
        done(numbers)
'''.replace("EVALUATIONS", repr(pd.DataFrame({"phase": []}).to_parquet()))  # fmt: skip


def seen(run_dir: Path) -> dict:
    return json.loads((run_dir / "seen.json").read_text())


def begin(config: RunConfig, name: str) -> int:
    """Claim a directory and run in it, as the command does."""
    run = RunDirectory(Path(name))
    run.claim(config, TypedCommand("the command"))
    return launch.start(run)


def background(child: Path, *words: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start the command in its own process group, as a shell does."""
    code = (
        "import sys; from qerl_lab import preflight; from qerl_lab.cli import launch;"
        "from qerl_lab.system import exits;"
        "from qerl_lab.__main__ import main; preflight.machine.has_gpu = lambda: False;"
        f"launch.child_command = lambda run_dir: [sys.executable, '-S', {str(child)!r}, str(run_dir)];"
        "exits.run(main)"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=stderr)


def started(pattern: str) -> Path:
    """Return the run directory once its child has started and handles signals."""

    def begun() -> Path | None:
        for path in Path.cwd().glob(f"{pattern}/seen.json"):
            with contextlib.suppress(json.JSONDecodeError):
                json.loads(path.read_text())
                return path.parent
        return None

    return wait_for(begun)
