"""Rollout engine on vLLM in the trainer's process, through public interfaces only.

Only this package imports vllm, except for the baseline that the engine is measured against (`bench/stock_vllm.py`).
"""
