"""Measure speed and memory on an NVIDIA GPU: `python -m qerl_lab.bench train_step|rollout|step`.

An arm is what a command compares: the lab's code in one weight format, or a baseline. Compare only arms of one
command. In `train_step` they alternate in one process; in `rollout` and `step` each has its own. A command prints a
table, writes one JSON file with its environment, and draws one figure.
"""
