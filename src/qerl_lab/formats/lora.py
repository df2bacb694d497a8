"""LoRA on a packed Linear. Importing this module imports peft."""

from typing import Any, NoReturn

from peft.tuners.lora.layer import Linear

INITIALIZATIONS = (True, False, "gaussian", "orthogonal")  # those that do not look at the base weight


class PackedLoraLinear(Linear):
    """PEFT's LoRA layer, except that what would read or write the dense base weight is refused."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA only: with it PEFT raises ValueError for DoRA and the like, whose norms need the dense weight."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        """Raises ValueError: the sum of base and adapter is not a matrix of the format."""
        raise ValueError(
            f"cannot merge LoRA into a {self.get_base_layer().weight_format} weight: keep the adapter apart "
            "(save_pretrained), or merge it into a dense model"
        )
