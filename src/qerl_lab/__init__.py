"""A lab for quantization-enhanced reinforcement learning of language models."""

__version__ = "0.1.0"
