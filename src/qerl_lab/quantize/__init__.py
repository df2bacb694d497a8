"""Quantize a model to a checkpoint in 4 or 8 bits."""
