"""Arms of `bench rollout` and `bench step`: names, processes, and arms that die."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_jobs import ARCHITECTURE
from qerl_lab.bench import __main__ as command
from qerl_lab.bench import arm_processes, one_arm
from qerl_lab.bench.bench_options import RolloutOptions, StepOptions
from qerl_lab.bench.job import check, read_jobs
from qerl_lab.config.option import ConfigError
from qerl_lab.rollout.vllm.base import named_folder
from qerl_lab.system import exits


def test_an_arm_is_a_name_and_overrides() -> None:
    own = "nvfp4 rollout.vllm.kv_cache_dtype=fp8 aqn.sigma_start=2e-2 optim.packing=on"
    name = "qlora_stock linear_backend=humming enforce_eager=true"
    arm, stock = read_jobs(RolloutOptions(arms=[own, name]), "")
    assert (arm.format, arm.is_baseline) == ("nvfp4", False)
    assert arm.overrides == {"rollout.vllm.kv_cache_dtype": "fp8", "aqn.sigma_start": 0.02, "optim.packing": "on"}
    assert (stock.arm, stock.format, stock.is_baseline) == (name, "nf4", True)
    assert stock.overrides == {"linear_backend": "humming", "enforce_eager": True}


@pytest.mark.parametrize("options", [RolloutOptions(scratch="/"), StepOptions(scratch="/")], ids=["rollout", "step"])
def test_every_default_arm_can_be_measured(options: RolloutOptions | StepOptions) -> None:
    """A format that vLLM has no kernel for is no default arm."""
    assert {"bf16", "nvfp4"} < {*options.arms}
    check(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RolloutOptions(arms=["nvfp5"]), r"'nvfp5' in arms is not allowed; allowed: bf16_stock, .* mean nvfp4\?"),
        (RolloutOptions(arms=["nvfp4 eager"]), "eager in the arm 'nvfp4 eager' is no KEY=VALUE that can be read"),
        (RolloutOptions(arms=["nvfp4 lora.rank=16,32"]), "lora.rank=16,32 in the arm .* is no KEY=VALUE that can be"),
        (RolloutOptions(arms=["nvfp4 gpus=2"], scratch="/"), "gpus=2 in the arm 'nvfp4 gpus=2' is for whole steps"),
        (RolloutOptions(scratch="/nowhere"), "scratch=/nowhere is no directory. Type scratch=DIR"),
        (RolloutOptions(arms=[], scratch="/"), r"arms=\[\] .* Type for example arms=\[bf16_stock\], or leave arms out"),
        (RolloutOptions(batches=[], scratch="/"), r"batches=\[\] leaves nothing to measure"),
        (RolloutOptions(ranks=[], scratch="/"), r"ranks=\[\] leaves nothing to measure"),
        (StepOptions(micro_batch=7, scratch="/"), "the arm 'bf16' .* updates of optim.micro_batch_size=7; 64 must be"),
        (RolloutOptions(arms=["nvfp4 rollout.vllm.kv_cach_dtype=fp8"]), "Did you mean rollout.vllm.kv_cache_dtype?"),
        (RolloutOptions(arms=["nvfp4 rollout.vllm.linear_backend=fp4_tiles"], ranks=[32, 512]),
         "the arm 'nvfp4 rollout.vllm.linear_backend=fp4_tiles' with rank 512: .*fp4_tiles"),
        (StepOptions(arms=["nvfp4 rollout.prompts_per_step=16"], scratch="/"),
         "the arm 'nvfp4 rollout.prompts_per_step=16' has 128 completions in a step .* = 64"),
        (StepOptions(arms=["nvfp4 device=cpu gpus=3"]), r"rollout\.prompts_per_step=8 cannot be split over gpus=3"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: RolloutOptions | StepOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(options)


def test_a_scratch_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=6e9))
    options = RolloutOptions(arms=["nvfp4", "bf16_stock"], scratch="/tmp")
    with pytest.raises(ConfigError, match=r"5\.59 GiB free, and the weights of qwen2\.5-7b in bf16 take 14\.47 GiB"):
        arm_processes.prepare(options)
    options.arms = ["nvfp4", "nvfp4 format.ignore=[lm_head,down_proj]"]
    with pytest.raises(ConfigError, match=r"qwen2\.5-7b in nvfp4 take 8\.15 GiB\. Type scratch=DIR"):
        arm_processes.prepare(options)
    options.arms = ["nvfp4", "mxfp4"]
    arm_processes.prepare(options)  # one checkpoint at a time has room


def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_first_arm() -> None:
    options = RolloutOptions(arms=["bf16", "nf4 format.ignore=[lm_head,'re:.*down_proj']"], scratch="/tmp")
    with pytest.raises(ConfigError, match=r"the arm .nf4 .*knows no re: patterns; .* Type for example format\.ignore="):
        arm_processes.prepare(options)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the common options of small benchmarks. The name qwen2.5-0.5b stands for a tiny model."""
    monkeypatch.setitem(arm_processes.ARCHITECTURES, "qwen2.5-0.5b", ARCHITECTURE)
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    (tmp_path / "scratch").mkdir()
    return {"model": "qwen2.5-0.5b", "scratch": str(tmp_path / "scratch"), "out": str(tmp_path / "out" / "result")}


def plays(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run `script` in place of an arm's process; it can use `job` and `write(row)`."""
    opening = (
        "import json, os, sys, time; from pathlib import Path; job = json.loads(Path(sys.argv[1]).read_text())\n"
        "def write(row): print(json.dumps({'arm': job['arm'], 'rank': job['rank'], **row}), "
        "file=open(sys.argv[2], 'a'), flush=True)\n"
    )
    real = subprocess.Popen

    def start(words: list[str], **how: Any) -> subprocess.Popen[str]:
        if words[0] != sys.executable:  # a command of the record of the environment
            return real(words, **how)
        assert words[:3] == [sys.executable, "-m", "qerl_lab.bench.one_arm"]
        return real([sys.executable, "-c", opening + script, *words[3:]], **how)

    monkeypatch.setattr(subprocess, "Popen", start)


def test_an_arm_sees_only_the_gpus_that_it_takes(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    plays(monkeypatch, "write({'sees': os.environ['CUDA_VISIBLE_DEVICES'], 'is': os.environ.get('LOCAL_RANK')})")
    options = StepOptions(arms=["bf16_trl", "bf16 gpus=2"], groups=2, **small)
    seen = [(row["arm"], row["sees"], row["is"]) for row in arm_processes.run(options)]
    assert sorted(seen, key=str) == [
        ("bf16 gpus=2", "5,2", "0"), ("bf16 gpus=2", "5,2", "1"), ("bf16_trl", "5", None)
    ]  # fmt: skip
    options.arms = ["nvfp4", "nvfp4 gpus=4"]
    options.groups = 8
    with pytest.raises(ConfigError, match=r"gpus=4, and 3 GPUs can be used here\. Type gpus=3"):
        arm_processes.prepare(options)


def test_each_arm_and_rank_has_its_own_process_checkpoint_and_adapter(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plays(
        monkeypatch,
        "from qerl_lab.bench.job import Job\n"
        "scratch, folder = Path(job['scratch']), Path(Job(**job).folder)\n"
        "config = json.loads((folder / 'config.json').read_text())\n"
        "adapter = json.loads((scratch / f\"rank{job['rank']}\" / 'adapter_config.json').read_text())\n"
        "write({'pid': os.getpid(), 'adapter': adapter['r'], 'own': folder.name,"
        " 'method': config.get('quantization_config', {}).get('quant_method'),"
        " 'beside': sorted(p.name for p in scratch.iterdir() if p.name[:4] != 'arm-')})",
    )
    options = RolloutOptions(arms=["bf16_stock", "nvfp4", "qlora_stock", "bf16"], ranks=[2, 4], **small)
    rows = list(arm_processes.run(options))
    assert [(row["arm"], row["rank"], row["method"]) for row in rows] == [
        ("bf16_stock", 2, None), ("bf16_stock", 4, None), ("bf16", 2, None), ("bf16", 4, None),
        ("nvfp4", 2, "compressed-tensors"), ("nvfp4", 4, "compressed-tensors"),
        ("qlora_stock", 2, "bitsandbytes"), ("qlora_stock", 4, "bitsandbytes"),
    ]  # fmt: skip
    assert all(row["adapter"] == row["rank"] for row in rows)
    assert len({row["pid"] for row in rows}) == 8
    kept = [[name, "rank2", "rank4"] for name in ("bf16", "bf16", "nvfp4", "nf4")]
    assert [row["beside"] for row in rows][::2] == kept, "one checkpoint at a time"
    alike = ["fp8", "fp8 lora.dropout=0.1", "fp8 format.dense_cache=off"]
    options = RolloutOptions(arms=["fp8 format.activations=fp8", *alike], ranks=[2], **small)
    rows = list(arm_processes.run(options))
    assert [row["beside"] for row in rows] == [[row["own"], "rank2"] for row in rows]
    assert [row["arm"] for row in rows if row["own"] == "fp8"] == alike
    assert list(Path(small["scratch"]).iterdir()) == []


def test_the_checkpoint_for_completions_of_a_mean_length_has_many_end_tokens(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """End tokens are a tenth of the vocabulary of 300, and the one that is never sampled."""
    plays(
        monkeypatch,
        "config = json.loads(Path(job['scratch'], 'bf16', 'generation_config.json').read_text())\n"
        "write({'ends': len(config['eos_token_id'])})",
    )
    (row,) = arm_processes.run(StepOptions(arms=["bf16"], mean_tokens=10, **small))
    assert row["ends"] == 31


def test_an_arm_ends_as_soon_as_one_of_its_processes_fails(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for the failed process. Its last lines give the reason."""
    plays(monkeypatch, "if os.environ['LOCAL_RANK'] == '0': time.sleep(60)\nprint(*range(100), sep='\\n')\nsys.exit(3)")
    started = time.monotonic()
    (row,) = arm_processes.run(StepOptions(arms=["bf16 device=cpu gpus=2"], groups=2, **small))
    assert time.monotonic() - started < 50
    assert row["died"] == "exit status 3, and no row"
    assert row["log"].splitlines() == [str(n) for n in range(60, 100)]


@pytest.mark.parametrize(
    ("script", "reason", "kept"),
    [
        ("write({'batch': 8}); os.kill(os.getpid(), 9)", "ended by signal 9 (the memory of the host may be full)", 1),
        ("print('what it said'); sys.exit(3)", "exit status 3, and no row", 0),
        ("time.sleep(60)", "took longer than timeout_minutes=0.01", 0),
        ("write({'died': 'OutOfMemoryError: 3 GiB'}); sys.exit(1)", "OutOfMemoryError: 3 GiB", 0),
        ("pass", "exit status 0, and no row", 0),
        ("write({'batch': 8}); print('{\"arm', end='', file=open(sys.argv[2], 'a')); sys.exit(1)", "exit status 1", 1),
    ],
)
def test_a_dead_arm_is_a_row(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, script: str, reason: str, kept: int
) -> None:
    plays(monkeypatch, script)
    minutes = 0.01 if "sleep" in script else 5.0
    *measured, last = arm_processes.run(RolloutOptions(arms=["bf16"], timeout_minutes=minutes, **small))
    assert last["died"] == reason
    assert last["arm"] == "bf16"
    assert len(measured) == kept
    assert ("what it said" in last.get("log", "")) == ("what it said" in script)


def test_ranks_that_die_because_of_another_rank_are_one_dead_arm(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has the reason of the first rank that died."""
    plays(
        monkeypatch,
        "first = os.environ['RANK'] == '1'\n"
        "while not first and 'memory' not in Path(sys.argv[2]).read_text(): time.sleep(0.01)\n"
        "write({'died': 'no memory' if first else 'connection closed by peer'}); first and time.sleep(5); sys.exit(1)",
    )
    (row,) = arm_processes.run(StepOptions(arms=["nvfp4 device=cpu gpus=2"], groups=2, **small))
    assert row["died"] == "no memory"


def run_command(**options: str) -> int:
    return command.main(["rollout", *(f"{key}={value}" for key, value in options.items())])


def test_after_a_dead_arm_the_others_run_and_the_command_exits_with_1(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = (
        "{'baseline': True, 'format': 'bf16', 'batch': 8, 'tokens_per_second': 5.0, 'tokens_per_second_min': 4.0, "
        "'tokens_per_second_max': 6.0, 'decode_ms': 1.0, 'sync_ms': 1.0, 'start_seconds': 1.0, 'weights_gib': None, "
        "'kv_gib': None, 'used_gib': None}"
    )
    plays(monkeypatch, f"sys.exit(1) if 'qlora' in job['arm'] else write({row})")
    assert run_command(arms="[qlora_stock,bf16_stock]", **small) == exits.FAILURE
    out, err = capsys.readouterr()
    assert "error: 1 arm died: qlora_stock." in err
    told = [line.partition(": ") for line in err.splitlines() if line.endswith((" s", "starts"))]
    assert [(what, said[:7]) for what, _, said in told] == [
        ("random weights in nf4", "written"), ("qlora_stock, rank 32", "starts"),
        ("random weights in bf16", "written"), ("bf16_stock, rank 32", "starts"),
    ]  # fmt: skip
    assert "qlora_stock, rank 32, died: exit status 1, and no row" in out
    kept = json.loads(Path(small["out"] + ".json").read_text())
    assert [("died" in row, row["arm"]) for row in kept["rows"]] == [(True, "qlora_stock"), (False, "bf16_stock")]
    assert Path(small["out"] + ".png").stat().st_size > 10_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_keeps_its_rows_and_removes_its_checkpoint(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    end = f"os.kill(os.getppid(), {int(number)}); time.sleep(60)"
    plays(monkeypatch, f"write({{'batch': job['rank']}})\nif job['rank'] == 4: {end}")
    signal.signal(number, lambda *_: pytest.fail("nobody listens to the signal"))
    assert run_command(arms="[bf16]", ranks="[2,4]", **small) == exits.INTERRUPTED
    assert [row["batch"] for row in json.loads(Path(small["out"] + ".json").read_text())["rows"]] == [2, 4]
    assert list(Path(small["scratch"]).iterdir()) == []


def test_folders_of_killed_benchmarks_and_arms_are_removed_unless_in_use(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scratch, memory = Path(small["scratch"]), tmp_path / "memory"
    (scratch / f"{arm_processes.SCRATCH}-7" / "nvfp4").mkdir(parents=True)
    (scratch / "qerl-lab-bench-elsewhere-0").mkdir()  # of another machine; its locks cannot be seen here
    memory.mkdir()
    monkeypatch.setattr(arm_processes, "IN_MEMORY", memory)
    plays(
        monkeypatch,
        f"kept = Path({str(memory)!r}, 'qerl-lab-0123456789ab-0'); kept.mkdir(); (kept / 'weights').touch()\n"
        "write({'batch': 8}); os.kill(os.getpid(), 9)",
    )
    with named_folder(arm_processes.SCRATCH, scratch) as live:
        arm_processes.prepare(RolloutOptions(arms=["bf16"], **small))
        assert sorted(path.name for path in scratch.iterdir()) == sorted([live.name, "qerl-lab-bench-elsewhere-0"])
        _, died = arm_processes.run(RolloutOptions(arms=["bf16"], **small))
        assert live.exists()
    assert died["died"].startswith("ended by signal 9")
    assert list(memory.iterdir()) == []


def test_the_process_of_an_arm_writes_each_row_at_once_and_why_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {
        "benchmark": "rollout", "arm": "bf16", "format": "bf16", "is_baseline": False, "overrides": {}, "rank": 4,
        "architecture": ARCHITECTURE, "scratch": "", "options": {"model": "small"},
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    out, parents = tmp_path / "rows.jsonl", list[int]()

    def rows(_: object):
        yield {"batch": 8}
        assert json.loads(out.read_text())["batch"] == 8
        raise MemoryError("3 GiB\nare missing")

    monkeypatch.setattr("qerl_lab.bench.rollout.rows", rows)
    monkeypatch.setattr(one_arm, "end_with_parent", parents.append)
    with pytest.raises(MemoryError):
        one_arm.main([str(tmp_path / "job.json"), str(out), "7"])
    assert parents == [7]  # a benchmark that is killed leaves no engine on the GPU
    first, last = map(json.loads, out.read_text().splitlines())
    about = {"model": "small", "arm": "bf16", "format": "bf16", "baseline": False, "rank": 4, "gpus": 1}
    assert first == about | {"batch": 8}
    assert last.pop("log").startswith("Traceback")
    assert last == about | {"died": "MemoryError: 3 GiB are missing"}
