"""Models filled layer by layer equal models loaded whole, in less memory. Errors name the file and the tensor."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from packed_layers import BY_NAME, LAYER_NAMES, MXFP4, NVFP4, each_format, each_packed, pack_model, tiny_model, tokens
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.formats import format as machinery
from qerl_lab.formats.format import Format, PackedAs
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.model import on_disk, policy
from qerl_lab.model.linear import FUSED, PackedLinear, total_bytes
from qerl_lab.model.loading import empty_model, fill, load_by_transformers, stored_as
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.quantize import __main__ as quantize
from small_checkpoints import edit_config, edit_tensors, equal, load, write_dense, write_packed

CPU = torch.device("cpu")
HEAD = ("lm_head",)


def load_whole(folder: Path, weight_format: Format, stored: torch.dtype, dtype: torch.dtype) -> PreTrainedModel:
    """Load the whole dense model, pack it in the dtype `stored`, and return it as a model of `dtype`."""
    packed, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=each) for each in (stored, dtype))
    pack_model(packed, weight_format)
    for path, module in packed.named_modules():
        if path.endswith(LAYER_NAMES):
            model.set_submodule(path, module.to(dtype))
    return model.requires_grad_(False)


def assert_same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Assert equal bits in all tensors and buffers, also buffers outside of checkpoints, and equal logits."""
    own = {**model.state_dict(), **dict(model.named_buffers())}
    others = {**other.state_dict(), **dict(other.named_buffers())}
    assert list(own) == list(others)
    assert [name for name in own if not equal(own[name], others[name])] == []
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, other(tokens()).logits)


@each_format
@pytest.mark.parametrize(("stored", "dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_a_model_in_shards_equals_the_model_loaded_whole(
    tmp_path: Path, weight_format: Format, stored: torch.dtype, dtype: torch.dtype
) -> None:
    model = tiny_model(tied=stored is torch.float16, dtype=stored)
    folder = write_dense(tmp_path, model, max_shard_size="30KB")
    assert len(WeightFiles(folder).files) > 2
    packed_in = torch.bfloat16 if stored is torch.bfloat16 else torch.float32  # float32 holds every float16 number
    whole = load_whole(folder, weight_format, packed_in, dtype)
    assert_same(load(folder, PackedAs(weight_format, HEAD), dtype), whole)


@each_packed
def test_a_loaded_packed_checkpoint_equals_the_packed_model(tmp_path: Path, weight_format: Format) -> None:
    for tied in (True, False):
        model = tiny_model(tied=tied)
        write_packed(tmp_path / str(tied), model, weight_format)
        loaded = load(tmp_path / str(tied))
        assert_same(loaded, model.requires_grad_(False))
        assert isinstance(loaded.model.layers[1].mlp.up_proj, PackedLinear)
        assert not hasattr(loaded.config, "quantization_config")


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head", "re:.*down_proj"],
        ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
    ],
)
def test_layers_that_llmcompressor_left_dense_stay_dense(tmp_path: Path, ignore: list[str]) -> None:
    model = tiny_model()
    write_packed(tmp_path, model, NVFP4, ignore=["lm_head", "down_proj"])
    config = NVFP4.quantization_config([], torch.bfloat16)
    config["config_groups"]["group_0"]["weights"] |= {"observer": "mse", "actorder": "weight"}
    edit_config(tmp_path, quantization_config=config | {
        "ignore": ignore, "version": "0.19.0", "sparsity_config": {}, "transform_config": {},
    })  # fmt: skip
    loaded = load(tmp_path)
    assert_same(loaded, model.requires_grad_(False))
    assert type(loaded.model.layers[1].mlp.down_proj) is nn.Linear


class InMemory:
    """A source that copies the tensors of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def tensor(self, name: str, device: torch.device | str) -> Tensor:
        return self.tensors[name].clone()

    def where(self, name: str) -> str:
        return "memory"


@each_format
def test_the_dense_part_of_a_fused_layer_is_freed_once_it_is_packed(weight_format: Format) -> None:
    weights = {name: torch.randn(64, 64) for name in FUSED[0]}
    for name, _ in machinery.pack_fused(weight_format, weights):
        assert name not in weights


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "bf16"])
def test_memory_stays_below_the_packed_size_plus_one_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All allocations count, also those in `quantize`. NF4 is left out: bitsandbytes copies to float32 on a CPU."""
    monkeypatch.setattr(machinery, "_SLICE_ELEMENTS", 2**14)
    dense = tiny_model(hidden=256, dtype=torch.bfloat16)
    source, model = InMemory(dense), empty_model(dense.config, torch.bfloat16)
    layer = sum(parameter.nbytes for parameter in dense.model.layers[0].parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fill(model, source, PackedAs(BY_NAME[name], HEAD), is_packed=False, device=CPU)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    packed = total_bytes(model)
    assert held >= 0.9 * packed  # no event is missing
    assert peak <= packed + layer


def test_a_model_with_capped_attention_is_computed_with_its_cap(tmp_path: Path) -> None:
    """sdpa has no cap. transformers before 5.21 would leave it out, later versions refuse the model."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.5, attn_logit_softcapping=0.5,
    )  # fmt: skip
    dense = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16).eval()
    folder, dense, ids = write_dense(tmp_path / "dense", dense), dense.float(), tokens()
    loaded = load(folder, PackedAs(BY_NAME["bf16"], HEAD))
    assert (loaded(ids).logits - dense(ids).logits).abs().max() < 1e-5
    assert (load_by_transformers(folder, torch.float32).eval()(ids).logits - dense(ids).logits).abs().max() < 1e-5
    dense.config.attn_logit_softcapping = None
    for layer in dense.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (loaded(ids).logits - dense(ids).logits).abs().max() > 1e-3


# Errors in a checkpoint.

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("nvfp4", {f"{Q}.weight_scale": None},
         f"not those of Qwen2ForCausalLM, packed in nvfp4 according to config.json: {Q}.weight_scale missing"),
        ("nvfp4", {f"{Q}.weight": torch.zeros(64, 64)}, f"{Q}.weight in no module"),
        ("nvfp4", {f"{Q}.weight_scale": torch.ones(64, 4, dtype=torch.uint8)},
         f"{Q}.weight_scale is torch.uint8 [64, 4], and nvfp4 has torch.float8_e4m3fn [64, 4] there"),
        ("nf4", {f"{Q}.weight.nested_absmax": None}, f"{Q}.weight.nested_absmax missing"),
        ("nvfp4", {"model.norm.weight": torch.ones(32)}, "model.norm.weight is [32], the model has [64]"),
        ("nvfp4", {"model.norm.weight": torch.ones(64, dtype=torch.uint8)}, "model.norm.weight is torch.uint8"),
    ],
)  # fmt: skip
def test_tensors_that_disagree_are_named_with_their_file(
    tmp_path: Path, name: str, change: dict[str, Tensor | None], says: str
) -> None:
    write_packed(tmp_path, tiny_model(), BY_NAME[name])
    edit_tensors(tmp_path, **change)
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        load(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'model.safetensors'}: ")


def test_a_mixture_of_experts_in_the_files_of_transformers_is_refused_in_words(tmp_path: Path, tiny) -> None:
    """transformers splits the experts when it writes a model, and merges them when it loads one."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_experts=2,
        num_experts_per_tok=1, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    write_dense(tmp_path, tiny_model())  # for the tokenizer
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"could not be loaded .*not merge the tensors of experts.*another model\)\.$"
    ):
        policy.load_base(tiny(format__name="bf16", model__path=str(tmp_path)), CPU)


@pytest.mark.parametrize("config", [None, MXFP4.quantization_config(["lm_head", "q_proj"], torch.float32)])
def test_layers_packed_though_dense_by_config_are_refused(tmp_path: Path, config: dict[str, Any] | None) -> None:
    write_packed(tmp_path, tiny_model(), MXFP4)
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=r"_proj\.weight and \d+ more missing, .*weight_packed and"):
        load(tmp_path, PackedAs(NVFP4, HEAD))


def test_a_wrong_or_missing_config_is_refused_with_its_path(tmp_path: Path) -> None:
    write_packed(tmp_path, tiny_model(), NVFP4)
    wrong = NVFP4.quantization_config(HEAD, torch.float32)
    wrong["config_groups"]["group_0"]["weights"]["group_size"] = 32
    edit_config(tmp_path, quantization_config=wrong)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'config.json'}: quantization_config: weights.group")):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path} holds no config.json")):
        stored_as(tmp_path)


@pytest.mark.parametrize(("name", "is_packed"), [
    (f"{Q}.weight", False), ("model.norm.weight", True), (f"{Q}.bias", False), ("lm_head.weight", True),
])  # fmt: skip
def test_a_weight_that_is_not_finite_is_refused_whether_packed_or_dense(
    tmp_path: Path, name: str, is_packed: bool
) -> None:
    model = tiny_model()
    parameter, is_dense = model.get_parameter(name).data, name != f"{Q}.weight"
    wrong = torch.inf if is_dense else torch.nan
    parameter.view(-1)[3] = wrong
    at = [3] if parameter.ndim == 1 else [0, 3]
    write_packed(tmp_path, model, NVFP4) if is_packed else write_dense(tmp_path, model)
    says = f"{name}: 1 values that float32 cannot hold" if is_dense else f"{Q}: 1 values that nvfp4 cannot hold"
    with pytest.raises(ValueError, match=re.escape(f"{says}, the first {wrong} at {at}")):
        load(tmp_path, PackedAs(NVFP4, HEAD))


@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.up_proj"])
def test_parts_of_a_fused_layer_have_one_global_scale(tmp_path: Path, part: str) -> None:
    """vLLM takes the largest for all parts, so it would sample from other weights than the trainer has."""
    model = tiny_model()
    write_packed(tmp_path, model, NVFP4)
    own = model.get_submodule(f"model.layers.1.{part}").packed()["weight_global_scale"]
    edit_tensors(tmp_path, **{f"model.layers.1.{part}.weight_global_scale": own * 2})
    with pytest.raises(ValueError, match=rf"differ in weight_global_scale: .*{re.escape(part)} has {own.item() * 2:g}"):
        load(tmp_path)


def test_a_tied_head_and_rotary_frequencies_may_be_stored(tmp_path: Path) -> None:
    dense = tiny_model(tied=True)
    write_dense(tmp_path, dense)
    rotary = {"model.rotary_emb.inv_freq": torch.ones(8)}  # old checkpoints have them
    edit_tensors(tmp_path, lm_head__weight=dense.lm_head.weight.detach().clone(), **rotary)
    model = load(tmp_path, PackedAs(MXFP4, HEAD))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_tied_head_with_values_of_its_own_is_refused(tmp_path: Path, is_packed: bool) -> None:
    """vLLM would take one of the two and transformers both, so that they would compute two models."""
    model = tiny_model(tied=True)
    own = 2 * model.lm_head.weight.detach()
    (write_packed(tmp_path, model, NVFP4) if is_packed else write_dense(tmp_path, model))
    edit_tensors(tmp_path, lm_head__weight=own)
    with pytest.raises(ValueError, match=r"lm_head\.weight has other values .* Set tie_word_embeddings to false"):
        load(tmp_path, PackedAs(NVFP4, HEAD))


# Messages of a run.


def test_a_run_takes_a_packed_directory(tmp_path: Path, tiny) -> None:
    write_packed(tmp_path, tiny_model(), MXFP4, ignore=["lm_head", "down_proj"])
    cfg = tiny(format__name="mxfp4", format__ignore=["lm_head", "re:.*down_proj"], model__path=str(tmp_path))
    base, tokenizer = policy.load_base(cfg, CPU)
    assert_same(base, load(tmp_path))
    assert tokenizer.pad_token_id is not None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "mxfp4"}, "is packed in nf4, and this run has format.name=mxfp4. Type format=nf4, an experiment"),
        ({"double_quant": True},
         "is packed in nf4 with double_quant=False, and this run has format.double_quant=True. "
         "Type format.double_quant=false."),
        ({"ignore": ["lm_head", "up_proj"]},
         "is packed in nf4 with ignore=['lm_head'], and this run has format.ignore=['lm_head', 'up_proj']: they "
         "differ in 2 layers, the first model.layers.0.mlp.up_proj. Type 'format.ignore=[lm_head]'."),
    ],
)  # fmt: skip
def test_a_run_that_asks_for_another_packing_is_told_what_to_type(
    tmp_path: Path, tiny, changes: dict[str, Any], says: str
) -> None:
    write_packed(tmp_path, tiny_model(), Nf4(double_quant=False))
    wanted = {"name": "nf4", "double_quant": False} | changes
    cfg = tiny(model__path=str(tmp_path), **{f"format__{key}": value for key, value in wanted.items()})
    with pytest.raises(ConfigError, match=re.escape(f"model.path={tmp_path} {says}")):
        policy.load_base(cfg, CPU)


def test_a_run_with_another_rule_than_its_checkpoint_is_refused(tmp_path: Path, tiny) -> None:
    """The quantize command records the rule. A checkpoint without the record is accepted with any rule."""
    out = tmp_path / "packed"
    words = ["model=pocket", "format=mxfp4", "exponent_rule=floor", "device=cpu", f"out={out}"]
    assert quantize.main(words) == 0
    cfg = tiny(model__path=str(out), format__name="mxfp4")
    for check in (policy.load_base, lambda cfg, _: on_disk.check(out, cfg)):  # the second before a run starts
        with pytest.raises(
            ConfigError, match=r"exponent_rule=floor, and this run has format\.exponent_rule=round\. Type"
        ):
            check(cfg, CPU)
    cfg = replace(cfg, format=replace(cfg.format, exponent_rule="floor"))
    on_disk.check(out, cfg)
    policy.load_base(cfg, CPU)
    (out / "quality.json").unlink()
    cfg = tiny(model__path=str(out), format__name="mxfp4", format__exponent_rule="ceil")
    policy.load_base(cfg, CPU)


def test_a_format_without_a_class_is_not_blamed_on_the_model(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in conf/format makes a format an option, even if FORMATS does not have its class yet."""
    others = {name: kind for name, kind in policy.formats.FORMATS.items() if name != "nf4"}
    monkeypatch.setattr(policy.formats, "FORMATS", others)
    with pytest.raises(ConfigError, match=r"format=nf4 has no class in FORMATS of src/qerl_lab/formats/__init__\.py"):
        policy.load_base(tiny(format__name="nf4"), CPU)


def test_a_model_that_cannot_be_loaded_is_a_config_error_that_names_the_file(tmp_path: Path, tiny) -> None:
    cfg = tiny(format__name="mxfp4", model__path=str(tmp_path))
    file = write_packed(tmp_path, tiny_model(), MXFP4) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"model\.path=.*{re.escape(str(file))} cannot be read, or is not whole"):
        policy.load_base(cfg, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ConfigError, match=r"could not be loaded \(ValueError: .*no-such-model"):
        policy.load_base(cfg, CPU)


# A packed output layer has no dense weight for the loss, so it is refused before any weight is read.

READS = "the loss reads the dense weight of lm_head, the output layer"


@pytest.mark.parametrize(
    ("ignore", "typed"),
    [([], "'format.ignore=[lm_head]'"), (["re:.*mlp"], """'format.ignore=["re:.*mlp",lm_head]'""")],
)
def test_a_run_that_would_pack_the_head_is_told_what_to_type(
    tiny: Callable[..., RunConfig], tmp_path: Path, ignore: list[str], typed: str
) -> None:
    write_dense(tmp_path, tiny_model())
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    said = f"format.ignore={ignore} would pack lm_head in nf4, and {READS}; allowed: lists that name it. Type {typed}."
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        policy.load_base(tiny(model__path=str(tmp_path), format__name="nf4", format__ignore=ignore), CPU)


@pytest.mark.parametrize("ignore", [[], ["lm_head"]])
def test_a_directory_with_a_packed_head_is_refused_with_any_ignore_list(
    tiny: Callable[..., RunConfig], tmp_path: Path, ignore: list[str]
) -> None:
    write_packed(tmp_path, tiny_model(), NVFP4, ignore=())
    with pytest.raises(ConfigError, match=rf"has lm_head packed, and {READS}\. Type the path of the dense model"):
        policy.load_base(tiny(model__path=str(tmp_path), format__name="nvfp4", format__ignore=ignore), CPU)


@pytest.mark.parametrize(("ignore", "tied", "name"), [
    (["lm_head"], False, "mxfp4"), (["re:.*head$"], False, "mxfp4"), ([], True, "nvfp4"), ([], False, "bf16"),
])  # fmt: skip
def test_a_head_that_is_named_tied_or_only_rounded_stays_dense(
    tiny: Callable[..., RunConfig], tmp_path: Path, ignore: list[str], tied: bool, name: str
) -> None:
    write_dense(tmp_path, tiny_model(tied=tied))
    base, _ = policy.load_base(tiny(model__path=str(tmp_path), format__name=name, format__ignore=ignore), CPU)
    assert base.lm_head.weight.shape == (32, 64)
