"""The warm-up: its examples, its updates, and a directory that a run can train on."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import SFTTrainer

from qerl_lab import tasks
from qerl_lab.cli.compose import make_plan
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.formats.nvfp4 import Nvfp4
from qerl_lab.model import policy
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.tools.warmup import IGNORED, WarmupOptions, check, count_updates, tokenize, training_overrides, warm_up
from small_checkpoints import edit_tensors, write_dense, write_packed


def random_model(attention_dropout: float = 0.1) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, bos_token_id=None, tie_word_embeddings=True,
        attention_dropout=attention_dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("dense"), random_model())


@pytest.fixture
def options(model: Path, tmp_path: Path) -> WarmupOptions:
    torch.set_num_threads(1)
    return WarmupOptions(
        model=str(model), task="arithmetic", out=str(tmp_path / "out"), device="cpu", questions=64, batch_size=8,
        micro_batch_size=4, epochs=1.5, learning_rate=1e-2,
    )  # fmt: skip


@pytest.fixture
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(ASSETS)


@pytest.fixture
def task() -> tasks.Task:
    return tasks.load(WarmupOptions(task="arithmetic", questions=20).task_config(), training="worked")


@pytest.mark.parametrize("opened", ["", "<think>"])
def test_only_the_solution_and_its_end_token_are_learned(
    tokenizer: AutoTokenizer, task: tasks.Task, opened: str
) -> None:
    """If the prompt opens the thinking, the solution does not open it again."""
    if opened:
        tokenizer.chat_template += f"{{% if add_generation_prompt %}}{opened}\n{{% endif %}}"
    rows, left_out = tokenize(task, tokenizer, 512)
    for row, question in zip(rows, task.train, strict=True):
        learned = [token for token in row["labels"] if token != IGNORED]
        assert opened + tokenizer.decode(learned) == question.payload["solution"] + tokenizer.eos_token
        chat = tokenizer.apply_chat_template(task.messages(question), add_generation_prompt=True, return_dict=True)
        assert row["input_ids"] == chat["input_ids"] + learned
    assert left_out == 0


def test_long_examples_are_counted_and_all_of_them_are_an_error(tokenizer: AutoTokenizer, task: tasks.Task) -> None:
    lengths = sorted(len(row["input_ids"]) for row in tokenize(task, tokenizer, 512)[0])
    kept, left_out = tokenize(task, tokenizer, lengths[9])
    assert (len(kept), left_out) == (sum(n <= lengths[9] for n in lengths), sum(n > lengths[9] for n in lengths))
    with pytest.raises(ConfigError, match=r"20 are longer than max_tokens=2\. Type a larger max_tokens"):
        tokenize(task, tokenizer, 2)


def test_an_update_of_the_mean_loss_does_not_depend_on_the_micro_batch(options: WarmupOptions, tmp_path: Path) -> None:
    """The mean is over the solution tokens of the update, not over the means of micro-batches."""
    model = write_dense(tmp_path / "without_dropout", random_model(attention_dropout=0.0))
    options = replace(options, model=str(model), epochs=0.25)
    found = {}
    for size in (1, 4, 8):
        warm_up(replace(options, micro_batch_size=size, out=str(tmp_path / str(size))))
        found[size] = json.loads((tmp_path / str(size) / "warmup.json").read_text())["losses"]
    assert found[1] == pytest.approx(found[8], rel=1e-3)
    assert found[4] == pytest.approx(found[8], rel=1e-3)


def test_every_solution_is_seen_once_in_each_pass(options: WarmupOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update of a pass may have fewer solutions."""
    seen, rates, step = list[int](), list[float](), SFTTrainer.training_step

    def counted(trainer: SFTTrainer, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *more: object) -> object:
        seen.append(len(inputs["input_ids"]))
        assert trainer.args.seed == 7, "of the order"
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return step(trainer, model, inputs, *more)

    monkeypatch.setattr(SFTTrainer, "training_step", counted)
    monkeypatch.setattr("qerl_lab.tools.warmup.WARMUP_RATIO", 0.5)
    warm_up(replace(options, questions=9, epochs=2, seed=7))
    assert sum(seen) == 2 * 9
    falling = [1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / 2)) / 2) for n in (1, 2)]
    wanted = [5e-3, 1e-2, *falling]
    assert list(dict.fromkeys(rates)) == pytest.approx(wanted), "up to the peak, then a cosine to a tenth of it"
    assert [count_updates(epochs, 7473, 64) for epochs in (0.1, 0.5, 1, 3)] == [12, 59, 117, 351]


def test_a_loss_that_is_not_finite_ends_the_warm_up(options: WarmupOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = SFTTrainer.compute_loss
    monkeypatch.setattr(SFTTrainer, "compute_loss", lambda *given, **how: torch.nan * compute(*given, **how))
    with pytest.raises(ValueError, match="the loss of update 1 is nan"):
        warm_up(options)
    assert not options.folder.with_name("out.partial").exists()


def test_a_model_that_lacks_a_weight_or_has_one_more_is_refused(options: WarmupOptions, tmp_path: Path) -> None:
    """transformers would fill a missing weight with random numbers, and drop an extra one."""
    folder = write_dense(tmp_path / "more", random_model())
    edit_tensors(folder, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(
        ValueError, match=r"more: model\.layers\.0\.self_attn\.q_norm\.weight in no module of Qwen2ForCausal"
    ):
        warm_up(replace(options, model=str(folder)))
    folder = write_dense(tmp_path / "holed", random_model())
    edit_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(
        ValueError, match=r"holed: model\.layers\.1\.mlp\.up_proj\.weight missing, of the weights of Qwen2"
    ):
        warm_up(replace(options, model=str(folder)))


def test_a_warm_up_lowers_the_loss_and_leaves_a_model_that_a_run_loads(
    options: WarmupOptions, tiny: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    warm_up(options)
    record = json.loads((options.folder / "warmup.json").read_text())
    assert len(record["losses"]) == 12
    assert record["losses"][0] > 6
    assert record["losses"][-1] < 4
    assert {tensor.dtype for tensor in load_file(options.folder / "model.safetensors").values()} == {torch.bfloat16}
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (Path(options.model), options.folder))
        assert after | {"dtype": None} == before | {"dtype": None}, "the trainer's changes are undone"
    assert record["solutions"]["training_questions"] == 64
    assert record["began_from"] == {"path": options.model, "revision": None, "hash": model_hash(Path(options.model))}
    assert {file.name for file in options.folder.iterdir()} == {*record["sha256"], "warmup.json"}
    out = capsys.readouterr().out
    assert f"+experiment=nvfp4_aqn scale=custom model.path={options.folder}" in out
    learned = policy.build(tiny(model__path=str(options.folder)), torch.device("cpu"))
    assert learned.tokenizer.chat_template == AutoTokenizer.from_pretrained(ASSETS).chat_template
    with pytest.raises(ConfigError, match=r"exists\. Type another out"):
        check(options)
    check(replace(options, overwrite=True))


def test_the_trainer_sees_one_gpu_of_several(options: WarmupOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(tasks, "load", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warm_up(options)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/no/such/place"}, "model=/no/such/place is no directory"),
        ({"task_path": "/no/such/place"}, "task_path=/no/such/place is not there"),
        ({"task_module": "/no/file.py"}, r"task_module=/no/file\.py is not there.*: task_module=FILE\.py"),
        ({"model": "no.gguf"}, "model=no.gguf is no file"),
        ({"batch_size": 12, "micro_batch_size": 8}, "micro_batch_size=8 does not divide batch_size=12.*batch_size=4"),
        ({"out": "MODEL/inside"}, "lie within each other"),
        ({"out": "MODEL/.."}, "lie within each other"),
        ({"out": "MODEL", "model": "pocket", "overwrite": True}, "was not made by this command"),
    ],
)
def test_wrong_options_are_refused_before_torch_is_imported(
    options: WarmupOptions, model: Path, changes: dict[str, object], message: str
) -> None:
    given = {key: str(value).replace("MODEL", str(model)) if key == "out" else value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        check(replace(options, **given))  # type: ignore[arg-type]


def test_warnings_of_the_task_are_printed(
    options: WarmupOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "load", lambda *_, **__: SimpleNamespace(warnings=["2 rows are left out"]))
    monkeypatch.setattr("qerl_lab.model.weight_files.local_folder", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warm_up(options)
    assert capsys.readouterr().err == "note: 2 rows are left out\n"


def test_fewer_solutions_than_a_micro_batch_are_one_update(options: WarmupOptions) -> None:
    check(replace(options, batch_size=3, micro_batch_size=8))


def test_a_packed_model_is_refused(options: WarmupOptions, tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", random_model(), Nvfp4(scale_rule="max"))
    with pytest.raises(ConfigError, match="is packed; allowed: the dense model, because all its weights are trained"):
        warm_up(replace(options, model=str(tmp_path / "packed")))


def test_a_weight_that_is_not_finite_is_refused_before_an_update(options: WarmupOptions, tmp_path: Path) -> None:
    model = random_model()
    model.model.norm.weight.data[5] = torch.nan
    folder = write_dense(tmp_path / "damaged", model)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: 1 values that float32 cannot hold, the first nan at"):
        warm_up(replace(options, model=str(folder)))


def test_a_task_without_a_row_is_refused_with_the_keys_of_this_command(options: WarmupOptions, tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").touch()
    with pytest.raises(ConfigError, match=r"gsm8k has no worked solution.*or task_path=DIRECTORY"):
        warm_up(replace(options, task="gsm8k", task_path=str(tmp_path)))
    (file := tmp_path / "one.jsonl").touch()
    with pytest.raises(ConfigError, match=r"Type task_path=DIRECTORY with train\.jsonl and test\.jsonl"):
        warm_up(replace(options, task="gsm8k", task_path=str(file)))


def test_the_printed_command_trains_with_the_taught_instruction(options: WarmupOptions) -> None:
    said = training_overrides(replace(options, instruction="Think, then answer (briefly)."))
    (job,) = make_plan([word for word in said if not word.startswith("model.path=")], False).jobs
    assert job.config.task.instruction == "Think, then answer (briefly)."
    assert "task=gsm8k" in training_overrides(replace(options, task="gsm8k"))
    assert not [word for word in training_overrides(options) if word.startswith("task")]


def test_a_file_of_the_user_may_have_its_own_solutions(options: WarmupOptions, tmp_path: Path) -> None:
    (file := tmp_path / "taught.py").write_text(
        "from qerl_lab.tasks import Question\n"
        "def train(cfg): return [Question(f'{n}', f'Say {n}.', f'{n}', {'solution': f'say {n}'}) for n in range(9)]\n"
        "worked = train\n"
    )
    options = replace(options, task_module=str(file), questions=0)
    task = tasks.load(options.task_config(), training="worked")
    assert [question.payload["solution"] for question in task.train] == [f"say {n}" for n in range(9)]
    assert f"task.module={file}" in training_overrides(options)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("worked = train", r"^task_module=\S+ defines train but not worked: .* Define worked\(cfg\)"),
        (
            ", {'solution': 1}",
            r"^task_module=\S+: worked\(cfg\) returned the question '1'.*with the text of a solution",
        ),
        ("", r"with the text of a solution: sequence item 3"),
    ],
)
def test_a_file_without_solutions_is_refused_by_name(
    options: WarmupOptions, tmp_path: Path, without: str, message: str
) -> None:
    lines = "def train(cfg): return [Question('1', 'What is 1?', '1', {'solution': 1})]\nworked = train\n"
    (file := tmp_path / "taught.py").write_text(f"from qerl_lab.tasks import Question\n{lines.replace(without, '')}")
    with pytest.raises(ConfigError, match=message):
        warm_up(replace(options, task_module=str(file)))
