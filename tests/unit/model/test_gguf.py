"""A GGUF file as a model: its values, its tokenizer, and refusals before a run starts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import normalizers
from transformers import AutoTokenizer

from gguf_files import ADDED, HEADS, KV_HEADS, write_gguf
from qerl_lab import preflight
from qerl_lab.config.option import ConfigError
from qerl_lab.config.records import QUALITY, UNPACKED
from qerl_lab.config.schema import ModelConfig, RunConfig
from qerl_lab.model import gguf, on_disk, policy
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.weight_files import local_folder
from qerl_lab.quantize.quantize_model import run as quantize
from qerl_lab.quantize.quantize_options import QuantizeOptions
from qerl_lab.quantize.quantize_options import check as check_quantize
from qerl_lab.rollout.vllm.base import model_folder
from qerl_lab.rollout.vllm_server.server_command import commands
from qerl_lab.system.disk import cache_folder

CPU = torch.device("cpu")
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Write and unpack a file; return it with its values."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    values = write_gguf(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(file.parent))
        gguf.unpack(file)
    return file, values


@pytest.fixture
def file(written: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(written[0].parent))
    return written[0]


@pytest.fixture
def new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path for a new file, with an empty cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "m.gguf"


def as_in_transformers(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the values by their names in transformers. llama.cpp interleaves the halves of a rotary head."""
    found = {}
    for name, value in values.items():
        part = name.removesuffix(".weight")
        if part.startswith("blk."):
            _, layer, kind = part.split(".")
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(kind)
            if heads:
                value = value.reshape(heads, value.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(value.shape)
            part = f"layers.{layer}.{NAMES[kind]}"
        else:
            part = {"token_embd": "embed_tokens", "output_norm": "norm"}[part]
        found[f"model.{part}.weight"] = torch.from_numpy(value.copy())
    return found


def test_the_weights_are_the_dequantized_values_of_the_file(
    file: Path, written: tuple[Path, dict[str, np.ndarray]]
) -> None:
    found = load_file(gguf.unpack(file) / "model.safetensors")
    expected = {name: value.to(torch.bfloat16) for name, value in as_in_transformers(written[1]).items()}
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_the_tokenizer_encodes_and_decodes_like_the_one_in_the_file(file: Path) -> None:
    """The file has the embedded policy's tokenizer: end tokens, tokens never split, leading spaces, template."""
    found, own = AutoTokenizer.from_pretrained(gguf.unpack(file)), AutoTokenizer.from_pretrained(ASSETS)
    assert (found.eos_token, found.pad_token) == (own.eos_token, own.pad_token)
    assert found.chat_template == own.chat_template
    for text in ("<|im_start|>user\nAnn has 12 & 345.<|im_end|>", " <think>7</think> <answer> 7", "▁a \n  b ."):
        ids = own(text)["input_ids"]
        assert found(text)["input_ids"] == ids
        assert found.decode(ids) == text
        assert found.decode(ids, skip_special_tokens=True) == own.decode(ids, skip_special_tokens=True)


def test_a_control_token_of_the_file_is_one_token(new_file: Path) -> None:
    """transformers knows three by name for the architecture of Qwen; DeepSeek-R1-Distill-Qwen has others."""
    write_gguf(new_file, architecture="qwen2")
    found = AutoTokenizer.from_pretrained(gguf.unpack(new_file))
    assert found(f"{ADDED}7")["input_ids"] == [len(found) - 1, *found("7")["input_ids"]]
    assert found.decode([len(found) - 1], skip_special_tokens=True) == ""


@pytest.mark.parametrize("architecture", ["gemma2", "phi3"])
def test_a_file_with_a_tokenizer_that_transformers_changes_is_refused(new_file: Path, architecture: str) -> None:
    """Once saved, Gemma's would split each word into letters. Phi's would drop all spaces."""
    write_gguf(new_file, architecture=architecture)
    with pytest.raises(ConfigError, match=r"it builds another tokenizer than the file's, and prompts would be other"):
        gguf.unpack(new_file)
    assert list(cache_folder().iterdir()) == []


def test_a_rotary_base_that_transformers_leaves_out_is_an_error(new_file: Path) -> None:
    write_gguf(new_file, architecture="starcoder2")
    assert gguf.unpack(new_file).is_dir()
    write_gguf(new_file, architecture="starcoder2", rope_base=1e6)
    with pytest.raises(ConfigError, match=r"have the base 1e\+06, and Starcoder2ForCausalLM 10000\)"):
        gguf.unpack(new_file)


def test_a_file_is_unpacked_once_and_again_after_a_change(new_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = new_file
    write_gguf(file)
    half = gguf.unpacked_folder(file).with_name(f"{gguf.unpacked_folder(file).name}.partial")
    half.mkdir(parents=True)  # of a process that was killed
    (half / "model.safetensors").write_text("half")
    assert on_disk.local_path(str(file)) is None
    first = local_folder(str(file), None)
    said = capsys.readouterr().err
    assert "m.gguf: tensors in Q4_1 (15), F32 (5); transformers dequantizes them to bfloat16, kept in" in said
    assert not half.exists()
    about = json.loads((first / UNPACKED).read_text())
    assert len(about["sha256"]) == 64
    assert (on_disk.local_path(str(file)), local_folder(str(file), None)) == (first, first)
    assert "dequantizes" not in capsys.readouterr().err
    write_gguf(file, seed=1)
    os.utime(file, ns=(1, 1))
    assert local_folder(str(file), None) != first


def test_a_file_that_transformers_cannot_read_is_a_user_error(new_file: Path) -> None:
    write_gguf(new_file)
    data = new_file.read_bytes()
    new_file.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0wrong", 1))
    with pytest.raises(ConfigError, match=r"transformers cannot read .*m\.gguf .*\. Type the path of the model as"):
        gguf.unpack(new_file)
    assert list(cache_folder().iterdir()) == []


def type_field(data: bytes, name: str, dimensions: int) -> int:
    """Return where in a GGUF file's bytes the type of a tensor is: 4 bytes, then the 8 bytes of its offset."""
    return data.index(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name) + 4 + 8 * dimensions


@pytest.mark.parametrize(
    ("tensor", "bytes_further", "value", "said"),
    [
        ("token_embd.weight", 0, (2).to_bytes(4, "little"), r"output_norm\.weight begins at byte 29472, and its place"),
        ("token_embd.weight", 0, (99).to_bytes(4, "little"), ".*99.* is not a valid GGMLQuantizationType"),
        ("blk.0.attn_q.weight", 4, bytes(8), r"blk\.0\.attn_q\.weight begins at byte 12384, and its place is"),
        ("blk.0.attn_q.weight", 4, (2**40).to_bytes(8, "little"), "cannot reshape"),
    ],
    ids=["another type", "no type", "place of another", "past the end"],
)
def test_a_file_with_a_damaged_tensor_is_refused(
    file: Path, new_file: Path, tensor: str, bytes_further: int, value: bytes, said: str
) -> None:
    """transformers would read other bytes, or numbers in another format, and finite ones without an error."""
    data = bytearray(file.read_bytes())
    at = type_field(data, tensor, dimensions=2) + bytes_further
    data[at : at + len(value)] = value
    new_file.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"m\.gguf is no GGUF file, or not whole \({said}.*\)\. Download it again"):
        gguf.unpack(new_file)


def test_a_file_with_a_damaged_vocabulary_is_refused(file: Path, new_file: Path) -> None:
    """The tokenizers package raises a bare Exception."""
    new_file.write_bytes(file.read_bytes().replace("\u0120apples".encode(), "\u0120opples".encode(), 1))
    said = r"transformers cannot read .*m\.gguf \(Exception: .* out of vocabulary\)\. Type the path of the model as"
    with pytest.raises(ConfigError, match=said):
        gguf.unpack(new_file)
    assert list(cache_folder().iterdir()) == []


@pytest.mark.parametrize("lost", ["\n", "'", ",", "6", "?"])
def test_a_file_with_a_tokenizer_that_loses_a_character_is_refused(
    file: Path, new_file: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = AutoTokenizer.from_pretrained(gguf.unpack(file))
    found.backend_tokenizer.normalizer = normalizers.Replace(lost, "")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: found)
    write_gguf(new_file)
    with pytest.raises(ConfigError, match="it builds another tokenizer than the file's"):
        gguf.unpack(new_file)


@pytest.mark.parametrize(("two_ends", "ends"), [(False, [2]), (True, [0, 2])])
def test_the_end_of_a_turn_ends_a_completion(new_file: Path, two_ends: bool, ends: list[int]) -> None:
    """transformers reads only the end of a text, after which an answer of Gemma would go on to the token limit."""
    write_gguf(new_file, two_ends=two_ends)
    loaded = policy.build(RunConfig(model=ModelConfig(path=str(new_file))), CPU)
    assert loaded.end_ids() == ends
    assert loaded.chat.notes == []


def test_a_part_of_a_split_file_is_refused(new_file: Path) -> None:
    """transformers would fill the weights that are in the other parts with random numbers."""
    write_gguf(new_file, layers=1)
    said = r"m\.gguf: model\.layers\.1\.input_layernorm\.weight and 8 more missing, of the weights of LlamaForCausalLM"
    with pytest.raises(ConfigError, match=said):
        gguf.unpack(new_file)
    assert list(cache_folder().iterdir()) == []


def test_a_weight_that_transformers_would_leave_out_is_an_error(new_file: Path) -> None:
    write_gguf(new_file, bias=True)
    with pytest.raises(
        ConfigError, match=r"it has 89,152 weights, and LlamaForCausalLM 89,088: some would be left out"
    ):
        gguf.unpack(new_file)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [("llama3", "rope_freqs.weight"), ("linear", "llama.rope.scaling.type")],
)
def test_scaled_rotary_positions_are_refused_because_transformers_drops_them(
    new_file: Path, scaling: str, said: str
) -> None:
    write_gguf(new_file, rope_scaling=scaling)
    with pytest.raises(
        ConfigError, match=rf"m\.gguf scales its rotary positions \({said}\), which transformers leaves"
    ):
        gguf.unpack(new_file)
    write_gguf(new_file, rope_scaling="none")
    assert gguf.unpack(new_file).is_dir()


@pytest.mark.parametrize("size", [0, 10, 2000, -10])
def test_a_cut_file_is_refused_before_a_run_starts(
    file: Path, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:size])
    monkeypatch.setattr(preflight.machine, "GPU_NODES", ())
    with pytest.raises(ConfigError, match="is no GGUF file, or not whole"):
        preflight.check(RunConfig(model=ModelConfig(path=str(cut))), tmp_path / "run")


def test_a_file_is_checked_without_torch(file: Path, tmp_path: Path) -> None:
    """Before it is unpacked its parameters are counted, for memory and disk. Afterwards its directory is checked."""
    code = f"""
import sys
from pathlib import Path
from qerl_lab import preflight
from qerl_lab.config.schema import RunConfig
cfg = RunConfig()
cfg.model.path, cfg.lora.target_modules = {str(file)!r}, ["nothing"]
print(preflight._count_parameters(cfg.model.path, None))
try:
    preflight.check(cfg, Path({str(tmp_path)!r}))
except ValueError as error:
    print(error)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "89088"
    assert "'nothing' is no Linear layer" in done.stdout


def test_vllm_reads_the_unpacked_directory(file: Path, tiny: Callable[..., RunConfig]) -> None:
    cfg = tiny(model__path=str(file), format__name="bf16")
    with model_folder(policy.build(cfg, CPU), cfg) as folder:
        assert folder == gguf.unpack(file)
    assert str(gguf.unpack(file)) in commands(cfg)[-1]
    cfg.format.name = "nvfp4"
    assert f"model={file}" in commands(cfg)[0]
    assert "packed/tiny-nvfp4" in commands(cfg)[1]


def test_the_quantize_command_takes_a_file_and_records_its_tensor_types(file: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(model=str(file), out=str(tmp_path / "out"), device="cpu")
    check_quantize(options)
    quantize(options)
    about = json.loads((tmp_path / "out" / QUALITY).read_text())["began_from"][UNPACKED]
    assert about["tensors"] == {"Q4_1": 15, "F32": 5}
    policy.load_base(RunConfig(model=ModelConfig(path=str(tmp_path / "out"))), CPU)
