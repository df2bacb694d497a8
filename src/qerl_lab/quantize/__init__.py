"""Quantize a model to a 4-bit checkpoint."""
