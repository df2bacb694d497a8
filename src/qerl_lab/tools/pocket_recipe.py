"""Size and training of the pocket policy. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """All numbers that determine the weights of the pocket policy."""

    seed: int = 0
    updates: int = 650
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_updates: int = 40
    vocab_size: int = 512
    hidden_size: int = 160
    intermediate_size: int = 448
    num_layers: int = 3
    num_heads: int = 5
    num_kv_heads: int = 1
    max_positions: int = 2048
