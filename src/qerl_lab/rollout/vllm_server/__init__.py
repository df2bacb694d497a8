"""`vllm serve` as an engine, on other GPUs or hosts. Imports no vllm: the trainer's side needs none."""
