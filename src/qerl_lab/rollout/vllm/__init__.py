"""vLLM as an engine: in the trainer's process, through public seams only. Nothing outside of this room imports vllm."""
