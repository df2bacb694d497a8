"""vLLM as an engine: in the trainer's process, through public seams only.

Nothing outside of this room imports vllm, but for the baseline that the engine is measured against
(`bench/stock_vllm.py`).
"""
