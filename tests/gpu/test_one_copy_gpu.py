"""One copy of the base for vLLM and the trainer: vLLM's own tensors unpack to the same bits, and memory is saved.

tests/gpu/test_vllm_engine.py tests the engine over a shared base like every other engine.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from packed_layers import NVFP4
from qerl_lab import rollout
from qerl_lab.config.schema import RunConfig
from qerl_lab.formats.marlin import CODES, SCALE, Marlin, part
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE
from qerl_lab.formats.tiles import TILES, Tiles, pack
from qerl_lab.model import policy
from qerl_lab.model.linear import packed_layers
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, Sampling
from qerl_lab.rollout.vllm import one_copy
from small_checkpoints import equal, write_random
from vllm_engines import NEEDS_VLLM

pytestmark = [pytest.mark.gpu, NEEDS_VLLM]


def packed_by_vllm(packed: dict[str, Tensor]) -> nn.Module:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_fp4_layer_for_marlin

    layer = nn.Module()
    layer.output_size_per_partition, half = packed["weight_packed"].shape
    layer.input_size_per_partition, layer.params_dtype = 2 * half, torch.bfloat16
    layer.weight = nn.Parameter(packed["weight_packed"].clone(), requires_grad=False)
    layer.weight_scale = nn.Parameter(packed["weight_scale"].clone(), requires_grad=False)
    layer.weight_global_scale = nn.Parameter(1 / packed[GLOBAL_SCALE][0], requires_grad=False)
    prepare_fp4_layer_for_marlin(layer)
    return layer


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (4608, 3584), (3584, 18944), (576, 1536)])
@pytest.mark.parametrize("top", [448.0, 20.0])
def test_tensors_packed_by_vllm_unpack_to_the_same_bits(shape: tuple[int, int], top: float) -> None:
    """All scales are ones that Marlin keeps; `top` is the largest."""
    torch.manual_seed(0)
    packed = NVFP4.quantize(torch.randn(shape, device="cuda"), global_scale=torch.tensor([top], device="cuda"))
    packed["weight_scale"] = (2.0**-6 + (top - 2.0**-6) * torch.rand_like(packed["weight_scale"].float())).to(
        torch.float8_e4m3fn
    )
    packed["weight_scale"][0, 0], packed["weight_scale"][-1, -1] = top, 0.0
    layer = packed_by_vllm(packed)
    form = Marlin(one_copy.boost(packed[GLOBAL_SCALE], layer.weight_global_scale))
    assert form.boost == (1 if top == 448 else 16)
    whole = {CODES: layer.weight.data, SCALE: layer.weight_scale.data, GLOBAL_SCALE: packed[GLOBAL_SCALE]}
    held = part(whole, 0, shape[0])
    assert all(equal(tensor, packed[key]) for key, tensor in form.stored(held).items())
    for dtype in (torch.float32, torch.bfloat16):
        assert equal(form.decoder(held, shape).unpack(dtype), NVFP4.decoder(packed, shape).unpack(dtype))


@pytest.mark.parametrize("name", ["marlin", "tiles"])
def test_unpacking_a_part_of_a_layer_allocates_only_the_result(name: str) -> None:
    """The layer is gate and up of Qwen2.5-7B, of 296 blocks of rows each. A tile has five, so up begins within one."""
    rows, columns = 18944, 3584
    packed = NVFP4.quantize(torch.randn((2 * rows, columns), device="cuda"))
    if name == "marlin":
        layer = packed_by_vllm(packed)
        whole = {CODES: layer.weight.data, SCALE: layer.weight_scale.data, GLOBAL_SCALE: packed[GLOBAL_SCALE]}
    else:
        whole = {TILES: pack(packed["weight_packed"], packed["weight_scale"], 5), GLOBAL_SCALE: packed[GLOBAL_SCALE]}
    expected = NVFP4.decoder(packed, (2 * rows, columns)).unpack(torch.bfloat16)
    for first in (0, rows):
        if name == "marlin":
            form = Marlin(one_copy.boost(packed[GLOBAL_SCALE], layer.weight_global_scale))
            held = part(whole, first, rows)
        else:
            form, held = Tiles(first, rows, columns), whole
        decoder, before = form.decoder(held, (rows, columns)), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        own = decoder.unpack(torch.bfloat16)
        assert torch.cuda.max_memory_allocated() - before == own.nbytes
        assert equal(own, expected[first : first + rows])
        del own
        stored = form.stored(held)
        for key in ("weight_packed", "weight_scale"):
            assert equal(stored[key], packed[key][first : first + rows])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with 98 million weights in packed layers."""
    return write_random(
        tmp_path_factory.mktemp("dense"), hidden_size=1536, intermediate_size=4096, num_attention_heads=12,
        initializer_range=0.03,
    )  # fmt: skip


@pytest.fixture
def configure(folder: Path, tiny: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    def configured(share: bool, lora: str = "dense", backend: str = "marlin") -> RunConfig:
        return tiny(
            device="cuda", model__path=str(folder), format__name="nvfp4", lora__rank=16, rollout__engine="vllm",
            rollout__batch_size=16, rollout__vllm__lora=lora, rollout__vllm__share_base=share,
            rollout__vllm__linear_backend=backend,
            rollout__vllm__kv_cache_gib=0.5, rollout__vllm__enforce_eager=True,
        )  # fmt: skip

    return configured


def asked_for() -> int:
    """Return the bytes of all tensors on the GPU. A block of memory may be up to a megabyte larger than its tensor."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def step(learner: Policy) -> list[Tensor]:
    """Return loss and adapter after one update on a fixed batch; restore the adapter."""
    weights = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
    before = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    ids = torch.arange(3, 1003, device="cuda").view(8, 125)
    with sdpa_kernel(SDPBackend.MATH):  # it sums in a fixed order
        loss = learner.model(input_ids=ids, labels=ids).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after = [loss.detach(), *(weight.detach().clone() for weight in weights)]
    for weight, was in zip(weights, before, strict=True):
        weight.data.copy_(was)
    return after


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(equal(one, other) for one, other in zip(a, b, strict=True))


def sample(engine: Engine) -> int:
    return engine.generate([list(range(5, 25))] * 4, 4, Sampling(16, seed=1)).tokens


@pytest.mark.parametrize(("lora", "backend"), [("dense", "marlin"), ("request", "marlin"), ("dense", "fp4_tiles")])
def test_a_step_over_a_shared_base_has_the_same_bits(
    configure: Callable, build_policy: Callable, lora: str, backend: str
) -> None:
    """The bits stay the same after the engine is closed, and with a second engine."""
    cfg = configure(True, lora, backend)
    learner = build_policy(cfg)
    expected = step(learner)
    assert same(step(learner), expected), "this step does not repeat itself"
    engine = rollout.build(cfg, learner)
    layers = packed_layers(learner.base)
    assert len(layers) == 28
    assert all(layer.engine_layout is not None for layer in layers.values())
    assert sample(engine) > 0
    assert same(step(learner), expected)
    engine.close()
    assert same(step(learner), expected)  # the weights outlive the engine
    engine = rollout.build(cfg, learner)
    assert sample(engine) > 0
    assert same(step(learner), expected)
    engine.close()


@pytest.mark.parametrize("backend", ["marlin", "fp4_tiles"])
def test_the_base_is_in_memory_once(configure: Callable, backend: str) -> None:
    used, owned = [], []
    for share in (False, False, True):  # the first engine of a process also allocates workspaces, which stay
        cfg, before = configure(share, backend=backend), asked_for()
        learner = policy.build(cfg, torch.device("cuda"))
        size = sum(layer.packed_bytes() for layer in packed_layers(learner.base).values())
        engine = rollout.build(cfg, learner)
        used.append(asked_for() - before)
        owned.append(engine.memory_bytes()["vLLM's weights"])
        engine.close()
        del learner, engine
    assert size > 45e6
    assert used[1] - used[2] == pytest.approx(size, abs=2e6)
    assert owned[1] - owned[2] == pytest.approx(size, abs=1e4)
