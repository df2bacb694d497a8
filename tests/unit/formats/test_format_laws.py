"""The laws of a format: every format of the lab keeps them all, and each law detects a format that breaks it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from packed_layers import ALL
from qerl_lab.formats.contract import LAWS, broken_laws
from qerl_lab.formats.format import Decoder, Format
from qerl_lab.formats.mxfp4 import EXPONENT_RULES, Mxfp4
from qerl_lab.formats.nvfp4 import SCALE_RULES, Nvfp4

RULES = [*map(Nvfp4, SCALE_RULES), *map(Mxfp4, EXPONENT_RULES)]


class OtherLayout(Mxfp4):
    def layout(self, shape: tuple[int, int]) -> Any:
        return super().layout(shape) | {"weight_scale": ((shape[0], 1), torch.uint8)}


class Shrinks(Mxfp4):
    def dequantize(self, packed: Any, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return super().dequantize(packed, shape, dtype) / 4


class ForgetsAlpha(Nvfp4):
    def decoder(self, packed: Any, shape: tuple[int, int]) -> Decoder:
        return super().decoder(packed, shape)._replace(alpha=1.0)


class Boasts(Mxfp4):
    @property
    def bits_per_weight(self) -> float:
        return 4.0


class LooksAtEveryRow(Mxfp4):
    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        return super().quantize(weight + weight.abs().max() / 4, name=name)


class Writes(Mxfp4):
    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        weight.clamp_(-0.5, 0.5)
        return super().quantize(weight, name=name)


class SwallowsNan(Mxfp4):
    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        return super().quantize(weight.nan_to_num(0.0, 1.0, -1.0), name=name)


class EqualsOnlyItself(Mxfp4):
    __eq__, __hash__ = object.__eq__, object.__hash__


class ForgetsItself(Mxfp4):
    @classmethod
    def recognize(cls, config: Any) -> None:
        return None


BROKEN = (
    OtherLayout, Shrinks, ForgetsAlpha, Boasts, LooksAtEveryRow, Writes, SwallowsNan, EqualsOnlyItself, ForgetsItself
)  # fmt: skip


@pytest.mark.parametrize("weight_format", dict.fromkeys([*ALL, *RULES]), ids=repr)
def test_the_formats_of_the_lab_keep_every_law(weight_format: Format) -> None:
    assert broken_laws(weight_format) == {}


@pytest.mark.parametrize(("law", "kind"), list(zip(LAWS, BROKEN, strict=True)), ids=lambda each: each.__name__)
def test_each_law_detects_a_format_that_breaks_it(law: Any, kind: Any) -> None:
    found = broken_laws(kind("max" if issubclass(kind, Nvfp4) else "round"))
    assert law.__name__ in found
    assert len(found) < 4, found


def test_an_error_of_a_format_is_reported_as_a_broken_law() -> None:
    class Fails(Mxfp4):
        def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
            raise RuntimeError("no kernel")

    assert broken_laws(Fails("round"))["gives_weights_back"] == "RuntimeError: no kernel"
