"""An output layer in 4 bits has no dense weight for the loss: it is refused before any weight is read."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from packed_layers import NVFP4, tiny_model
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import policy
from qerl_lab.quantize import __main__ as quantize
from small_checkpoints import write_dense, write_packed

CPU = torch.device("cpu")
READS = "the loss reads the dense weight of lm_head, the output layer"


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "fp8"])
@pytest.mark.parametrize(
    ("ignore", "typed"),
    [([], "'format.ignore=[lm_head]'"), (["re:.*mlp"], """'format.ignore=["re:.*mlp",lm_head]'""")],
)
def test_a_run_that_would_pack_the_head_is_told_what_to_type(
    tiny: Callable[..., RunConfig], tmp_path: Path, name: str, ignore: list[str], typed: str
) -> None:
    write_dense(tmp_path, tiny_model())
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    said = (
        f"format.ignore={ignore} would pack lm_head in {name}, and {READS}; allowed: lists that name it. Type {typed}."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        policy.load_base(tiny(model__path=str(tmp_path), format__name=name, format__ignore=ignore), CPU)


@pytest.mark.parametrize("ignore", [[], ["lm_head"]])
def test_a_directory_with_a_packed_head_is_refused_whatever_the_run_ignores(
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


def test_the_quantize_command_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dense(tmp_path / "model", tiny_model())
    capsys.readouterr()
    assert quantize.main(["model=model", "out=out", "quality=weights", "ignore=[down_proj]"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ignore=[down_proj] would pack lm_head, the output layer, ")
    assert err.endswith("; allowed: lists that name it. Type ignore=[down_proj,lm_head].\n")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
