"""Rollout engine on a `vllm serve` on other GPUs or hosts. Imports no vllm, so the trainer needs no vLLM installed."""
