"""Rollout engine on a `vllm serve` on other GPUs or hosts. Imports no vllm, which the trainer's side does not need."""
