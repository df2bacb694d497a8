"""Choose the kernel for products with packed weights, and say which kernels and weight formats work on a GPU."""

from importlib.metadata import version
from importlib.util import find_spec

import torch
from packaging.version import Version
from torch import nn

from qerl_lab import formats
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.formats.fp8 import W8A8, W8A16
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE
from qerl_lab.model.linear import fused_groups, packed_layers
from qerl_lab.rollout.vllm import fp4_tiles

FP4_TILES = fp4_tiles.SOURCE.stem
IN_VLLM = {"vllm": "auto", FP4_TILES: "auto"}  # vLLM's name by ours; fp4_tiles bypasses vLLM's kernels
# First humming-kernels version that on Hopper waits for stores before it reloads the same shared memory, on both blocks
# of a cluster. 0.1.10, which vLLM 0.26 requires, does not (read in its source, not measured).
ORDERED_HUMMING = Version("0.1.13")
MULTIPLIES_FP8 = (8, 9)  # from this compute capability on
COMPILED_FROM = (7, 5)  # T4; tests/golden/test_kernels_compile.py compiles the kernels that unpack, down to it
BFLOAT16_FROM = (8, 0)


def choose_backend(cfg: RunConfig, model: nn.Module) -> str:
    """Choose the kernel for products with packed weights: rollout.vllm.linear_backend, or for `auto` one that fits.

    For `auto` it is `fp4_tiles` if GPU and model support that, because `fp4_tiles` was faster than Marlin at all row
    counts measured, 1 to 256 (docs/speed.md). Otherwise it is "vllm" (vLLM's own choice), with two exceptions: "marlin"
    for a shared base, which needs Marlin's layout, and for W8A16, where vLLM would choose Humming. Prints why an NVFP4
    model does not get `fp4_tiles`, and a warning if the installed Humming has a data race.

    Raises ConfigError for products in FP8 on a GPU that cannot compute them.
    """
    vllm_cfg, weight_format = cfg.rollout.vllm, formats.build(cfg.format)
    if torch.cuda.is_available():
        if weight_format == W8A8:
            _check_multiplies_fp8("format.activations")
        if vllm_cfg.dense_dtype == "fp8":
            _check_multiplies_fp8("rollout.vllm.dense_dtype")
    backend = vllm_cfg.linear_backend
    may_be_humming = backend == "humming" or (backend == "vllm" and weight_format == W8A16)
    if may_be_humming and torch.cuda.is_available() and humming_races():
        print("warning: the installed Humming has races on this GPU (docs/running.md); watch sampler/logprob_gap_max, "
              "or type rollout.vllm.linear_backend=marlin")  # fmt: skip
    if backend != "auto":
        return backend
    otherwise = "marlin" if vllm_cfg.share_base or weight_format == W8A16 else "vllm"
    if cfg.format.name != "nvfp4" or vllm_cfg.lora != "dense" or not torch.cuda.is_available():
        return otherwise
    why = fp4_tiles.refusal()
    if not why and not tiles_fit(model, cfg.lora.rank):
        why = f"takes {fp4_tiles.SUPPORTED}, in bfloat16, with one global scale"
    if why:
        print(f"linear_backend={otherwise}, because fp4_tiles {why}")
        return otherwise
    return FP4_TILES


def _check_multiplies_fp8(key: str) -> None:
    """Raise ConfigError if the GPU cannot multiply in FP8, which `key`=fp8 asks for.

    vLLM would not refuse, but leave activations in 16 bits.
    """
    if torch.cuda.get_device_capability() < MULTIPLIES_FP8:
        raise ConfigError(
            f"{key}=fp8 is not possible on {torch.cuda.get_device_name()}; allowed: GPUs of compute capability 8.9 "
            f"(Ada) and higher. Type {key}=auto."
        )


def tiles_fit(model: nn.Module, lora_rank: int) -> bool:
    """Tell whether the kernel `fp4_tiles` supports all packed layers of `model`, with q/k/v and gate/up fused."""
    layers = packed_layers(model)
    groups = [[layers[name] for name in group] for group in fused_groups(list(layers))]
    return all(
        fp4_tiles.supports([layer.out_features for layer in group], group[0].in_features, lora_rank)
        and {layer.compute_dtype for layer in group} == {torch.bfloat16}
        and len({layer.packed()[GLOBAL_SCALE].item() for layer in group}) == 1
        for group in groups
    )


def humming_races() -> bool:
    """Tell whether the installed Humming kernels have a data race: on Hopper, in versions before `ORDERED_HUMMING`."""
    return torch.cuda.get_device_capability()[0] == 9 and Version(version("humming-kernels")) < ORDERED_HUMMING


def describe_gpu() -> list[str]:
    """Return lines of text that say which weight formats, dtype and kernels work on this GPU.

    They depend on its compute capability. Only GPUs of `fp4_tiles.CAPABILITY` were tried; for other GPUs the lines say
    what compiles.
    """
    capability = torch.cuda.get_device_capability()
    card = f"{torch.cuda.get_device_name()}, compute capability {'.'.join(map(str, capability))}"
    if capability < COMPILED_FROM:
        return [f"{card}: too old, the kernels that unpack 4-bit weights need {'.'.join(map(str, COMPILED_FROM))}"]
    is_tried = capability == fp4_tiles.CAPABILITY
    why = fp4_tiles.refusal() if find_spec("vllm") else "needs vLLM, which is not installed"
    has_bfloat16 = "in hardware" if capability >= BFLOAT16_FROM else "emulated and slow; type model.dtype=float32"
    return [
        card if is_tried else f"{card}: not tried, the lab was measured on H100 and H200",
        f"formats {', '.join(choices_of('format'))}: train here, each product with unpacked weights",
        f"bfloat16: {has_bfloat16}",
        f"kernel fp4_tiles of rollout=vllm: {f'{why}; vLLM chooses another' if why else 'works'}",
    ]
