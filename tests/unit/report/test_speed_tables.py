"""Speed and memory beside the paper's: numbers in cells, missing rows, and files that are not results."""

import json
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.report import speed_tables
from qerl_lab.report.speed_tables import SpeedSection

ABOUT = {
    "time": "2026-11-22T16:12:29+0000", "packages": {"torch": "2.11.0", "vllm": "0.26.0"}, "git_sha": "15ec283b4b09",
    "dirty": False, "gpus": [{"name": "NVIDIA H200"}],
}  # fmt: skip
SPEEDS = {"bf16_stock": ("bf16", 1000.0), "nvfp4": ("nvfp4", 1500.0), "qlora_stock": ("nf4", 500.0)}


def rollouts(model: str = "qwen2.5-7b", batch: int = 8, rank: int = 32, **changes: Any) -> dict[str, Any]:
    """Return a result. NVFP4 has 1.5 times BF16's tokens/s and 3 times QLoRA's; weights are 14, 5 and 5 GiB."""
    rows = [
        {"model": model, "arm": arm, "format": name, "baseline": arm.endswith("stock"), "rank": rank, "batch": batch,
         "tokens_per_second": speed, "tokens_per_second_min": 0.9 * speed, "tokens_per_second_max": 1.1 * speed,
         "repeats": 3, "weights_gib": 14.0 if name == "bf16" else 5.0, "peak_gib": 30.0} | changes
        for arm, (name, speed) in SPEEDS.items()
    ]  # fmt: skip
    asked = {"model": model, "prompt": 256, "new": 512, "arms": list(SPEEDS), "ranks": [rank], "batches": [batch]}
    return {"benchmark": "rollout", "environment": ABOUT, "options": asked, "rows": rows}


def steps(completions: int = 8) -> dict[str, Any]:
    """Return a result where a step of NVFP4 is 1.25 times as fast as a step of BF16."""
    rows = [
        {"arm": arm, "format": name, "baseline": arm.endswith("trl"), "rank": 32, "step_seconds": seconds,
         "tokens_per_second": 8000 / seconds, "policy_gib": 10.0, "weights_gib": 5.0, "peak_gib": 40.0}
        for arm, name, seconds in (("bf16_trl", "bf16", 10.0), ("nvfp4", "nvfp4", 8.0))
    ]  # fmt: skip
    asked = {"model": "qwen2.5-14b", "groups": 1, "group_size": completions, "prompt": 256, "new": 1024, "steps": 3,
             "arms": ["bf16_trl", "nvfp4"]}  # fmt: skip
    return {"benchmark": "step", "environment": ABOUT, "options": asked, "rows": rows}


def made(folder: Path, *results: Any) -> SpeedSection:
    for index, result in enumerate(results):
        (folder / f"{index}.json").write_text(result if isinstance(result, str) else json.dumps(result))
    return speed_tables.tabulate_files([folder])


def cells(speed: SpeedSection, table: int, *row: str) -> dict[str, str]:
    head, *rows = speed.tables[table].rows
    assert {len(one) for one in rows} == {len(head)}
    (found,) = (one for one in rows if one[: len(row)] == list(row))
    return dict(zip(head, found, strict=True))


@pytest.mark.parametrize(("results", "table", "row", "expected"), [
    ([rollouts()], 0, ("qwen2.5-7b, 8, 32", "nvfp4"), {
        "tokens/s": "1,500 [1,350, 1,650]", "of BF16": "1.50", "of QLoRA": "3.00",
        "paper: of BF16": f"{2091.8 / 1641.1:.2f}", "paper: of QLoRA": f"{2091.8 / 1362:.2f}",
        "paper: where": "Table 6, Figure 1, rank 16", "commit": "15ec283",
    }),
    # a batch of one is compared with Table 9 and Figure 11, at its rank
    ([rollouts("qwen2.5-14b", 1, 64)], 0, ("qwen2.5-14b, 1, 64", "nvfp4"), {
        "paper: of BF16": f"{86.0 / 61.2:.2f}", "paper: of QLoRA": f"{86.0 / 42.8:.2f}",
        "paper: where": "Table 9, Figure 11, rank 64",
    }),
    ([rollouts(), rollouts("qwen2.5-14b", 1, 128)], 0, ("qwen2.5-14b, 1, 128", "nvfp4"), {"paper: of BF16": "-"}),
    ([rollouts(), rollouts(batch=64)], 0, ("qwen2.5-7b, 64, 32", "nvfp4"), {"paper: of BF16": "-"}),
    ([steps()], 1, ("qwen2.5-14b, 8", "nvfp4"), {
        "seconds": "8.00", "tokens/s": "1,000", "of BF16": "1.25", "paper: Table 3, of BF16": "1.2x",
        "paper: Tables 5 to 8, checkpointing": "1.3x", "paper: without": "OOM",
    }),
    ([rollouts()], 2, ("qwen2.5-7b, nvfp4", "nvfp4"), {
        "weights, GB": f"{5 * 2**30 / 1e9:.1f}", "of BF16": f"{5 / 14:.2f}", "peak, GB": "32.2", "paper: GB": "5.9",
        "paper: of BF16": f"{5.9 / 15.2:.2f}",
    }),
    ([steps()], 2, ("qwen2.5-14b, nvfp4", "nvfp4", "step"), {"weights, GB": f"{10 * 2**30 / 1e9:.1f}"}),  # not vLLM's
])  # fmt: skip
def test_our_numbers_stand_beside_the_papers_for_the_same_model_and_batch(
    tmp_path: Path, results: list[dict[str, Any]], table: int, row: tuple[str, ...], expected: dict[str, str]
) -> None:
    assert cells(made(tmp_path, *results), table, *row).items() >= expected.items()


def test_a_file_that_is_named_and_in_a_named_folder_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(rollouts()))
    assert speed_tables.tabulate_files([tmp_path / "a.json", tmp_path]) == speed_tables.tabulate_files([tmp_path])


def test_numbers_of_the_paper_that_nobody_measured_are_named_in_a_line_without_rows(tmp_path: Path) -> None:
    speed = made(tmp_path, rollouts(), steps())
    assert [len(table.rows) for table in speed.tables] == [1 + 3, 1 + 2, 1 + 5]
    of_rollouts, of_steps, of_memory = (table.left_out for table in speed.tables)
    assert "not measured here (batch at rank): qwen2.5-3b 1 at 16, 1 at 32, 1 at 64, 2 at 16, 8 at 16;" in of_rollouts
    assert "qwen2.5-7b 1 at 16, 1 at 32, 1 at 64, 2 at 16;" in of_rollouts  # batch 8 was measured
    assert "(completions): qwen2.5-3b 2, 8; qwen2.5-7b 2, 4, 8; qwen2.5-14b 2, 4; qwen2.5-32b 2, 8." in of_steps
    assert "(format): qwen2.5-3b BF16, NVFP4; qwen2.5-14b NF4; qwen2.5-32b BF16, NVFP4." in of_memory


def test_empty_columns_are_left_out_and_constant_columns_become_a_sentence(tmp_path: Path) -> None:
    speed = made(tmp_path, rollouts(), steps())
    assert all("In every row: " in table.about and "GPU NVIDIA H200" in table.about for table in speed.tables)
    assert "In every row: repeats 3, lengths prompt 256, new 512, GPU NVIDIA H200." in speed.tables[0].about
    assert not {"GPU", "repeats", "steps", "lengths"} & {head for table in speed.tables for head in table.rows[0]}
    assert "of QLoRA" not in speed.tables[1].rows[0]
    assert speed.tables[1].left_out.startswith("Left out: of QLoRA, empty in every row. ")
    other = {**rollouts(batch=64, repeats=5), "environment": ABOUT | {"gpus": [{"name": "NVIDIA H100"}]}}
    both = made(tmp_path, rollouts(), other)
    assert [(row[0], *row[-3:-1]) for row in both.tables[0].rows[1:] if row[1] == "nvfp4"] == [
        ("qwen2.5-7b, 8, 32", "3", "NVIDIA H200"), ("qwen2.5-7b, 64, 32", "5", "NVIDIA H100"),
    ]  # fmt: skip


def test_steps_of_different_lengths_name_their_lengths(tmp_path: Path) -> None:
    ragged = steps()
    ragged["options"] |= {"mean_tokens": 400.0}
    speed = made(tmp_path, steps(), ragged)
    where = speed.tables[1].rows[0].index("lengths")
    assert {row[where] for row in speed.tables[1].rows[1:]} == {
        "prompt 256, new 1,024", "prompt 256, new 1,024, mean_tokens=400",
    }  # fmt: skip
    assert "lengths prompt 256, new 1,024" in made(tmp_path, steps(), steps()).tables[1].about


def test_a_baseline_with_overrides_is_named_in_its_rows(tmp_path: Path) -> None:
    merged = rollouts(batch=64)
    merged["rows"][0]["arm"] += " enable_lora=false"
    speed = made(tmp_path, rollouts(), merged)
    named = {row[0]: row[speed.tables[0].rows[0].index("lengths")] for row in speed.tables[0].rows[1:]}
    assert named["qwen2.5-7b, 8, 32"] == "prompt 256, new 512"
    assert named["qwen2.5-7b, 64, 32"] == "prompt 256, new 512; BF16 is bf16_stock enable_lora=false"


def test_prompts_of_another_length_stand_beside_no_number_of_the_paper(tmp_path: Path) -> None:
    prefill, step = rollouts(), steps()
    prefill["options"] |= {"prompt": 2048, "new": 2}
    step["options"]["prompt"] = 2048
    speed = made(tmp_path, rollouts(batch=64), rollouts(), prefill, steps(), step)
    row = cells(speed, 0, "qwen2.5-7b, 8, 32", "nvfp4", "1,500 [1,350, 1,650]", "1.50", "3.00", "-")
    assert (row["lengths"], row["paper: of BF16"]) == ("prompt 2048, new 2", "-")
    row = cells(speed, 1, "qwen2.5-14b, 8", "nvfp4", "8.00", "1,000", "1.25", "-")
    assert row["lengths"] == "prompt 2048, new 1,024"


def test_the_committed_training_steps_are_in_the_table_of_memory() -> None:
    speed = speed_tables.tabulate_files([Path(__file__).parents[3] / "results" / "bench"])
    found = cells(speed, 2, "qwen2.5-7b, bf16", "bf16", "train_step")
    assert (found["weights, GB"], found["paper: GB"], found["peak, GB"]) == ("15.3", "15.2", "24.4")
    assert any("linear.json: linear, " in note and "the paper has no such table" in note for note in speed.notes)


def test_training_steps_of_processes_are_in_the_table_of_memory(tmp_path: Path) -> None:
    """Committed results are of an older command, which wrote `steps` of one process."""
    rows = [
        {"arm": arm, "format": name, "baseline": arm == "qlora", "rank": 32, "gpus": 1, "micro_batch_tokens": tokens,
         "tokens_per_second": 10.0, "base_gb": weights, "peak_gb": weights + tokens / 1000}
        for arm, name, weights in (("bf16", "bf16", 15.0), ("nvfp4", "nvfp4", 6.0), ("qlora", "nf4", 5.0))
        for tokens in (8000, 1000)
    ]  # fmt: skip
    asked = {"model": "qwen2.5-7b", "arms": ["bf16", "nvfp4", "qlora"], "sequences": 8, "length": 1000, "rank": 32}
    whole = {"benchmark": "train_step", "environment": ABOUT, "options": asked, "rows": rows}
    dead = {"arm": "qlora", "rank": 32, "died": "OutOfMemoryError: 3 GiB"}
    speed = made(tmp_path, whole)
    found = cells(speed, 2, "qwen2.5-7b, nf4", "qlora")
    assert (found["weights, GB"], found["of BF16"], found["peak, GB"]) == ("5.0", f"{5 / 15:.2f}", "13.0")
    assert speed.notes[0].endswith("commit 15ec283.")
    (note,) = made(tmp_path, whole | {"rows": [*rows[:5], dead]}).notes
    assert note.endswith("; qlora, rank 32, died: OutOfMemoryError: 3 GiB; it has 5 of 6 requested rows.")


def test_weights_are_compared_with_those_of_stock_bf16_without_overrides(tmp_path: Path) -> None:
    result = rollouts()
    other = result["rows"][0] | {"arm": "bf16_stock quantization=fp8", "weights_gib": 7.0}
    speed = made(tmp_path, result | {"rows": [other, *result["rows"]]})
    assert cells(speed, 2, "qwen2.5-7b, nvfp4", "nvfp4")["of BF16"] == f"{5 / 14:.2f}"


@pytest.mark.parametrize(
    "broken",
    ["{", "[]", '{"benchmark": "rollout"}', json.dumps({**rollouts(), "rows": [{"arm": "nvfp4", "rank": 8}]}),
     json.dumps({**rollouts(), "options": {}}), json.dumps({**steps(), "rows": None})],
)  # fmt: skip
def test_an_incomplete_result_file_is_left_out_and_named(tmp_path: Path, broken: str) -> None:
    speed = made(tmp_path, broken, rollouts())
    assert "0.json: left out, no complete result of python -m qerl_lab.bench" in speed.notes[0]
    assert cells(speed, 0, "qwen2.5-7b, 8, 32", "nvfp4")["of BF16"] == "1.50"
    (tmp_path / "1.json").unlink()
    assert [len(table.rows) for table in made(tmp_path, broken).tables] == [1, 1, 1]


def test_no_files_make_an_empty_section_and_missing_results_are_refused(tmp_path: Path) -> None:
    assert speed_tables.tabulate_files([]) == SpeedSection([], [speed_tables.WITHOUT])
    with pytest.raises(ConfigError, match=r"bench=.* holds no result\. Type a result of python -m"):
        speed_tables.tabulate_files([tmp_path])
    with pytest.raises(ConfigError, match=r"bench=.*missing\.json is not there\. Type a result of python -m"):
        speed_tables.tabulate_files([tmp_path / "missing.json"])


def test_a_model_that_the_paper_lacks_has_no_columns_of_the_paper(tmp_path: Path) -> None:
    speed = made(tmp_path, rollouts("qwen2.5-0.5b"))
    found = cells(speed, 0, "qwen2.5-0.5b, 8, 32", "nvfp4")
    assert found["of BF16"] == "1.50"
    assert not [head for table in speed.tables[::2] for head in table.rows[0] if head.startswith("paper: ")]
    assert "Left out: paper: tokens/s, paper: of BF16, paper: of QLoRA, paper: where, empty" in speed.tables[0].left_out
