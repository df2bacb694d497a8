"""Measure speed and memory on an NVIDIA GPU: `python -m qerl_lab.bench train_step|rollout|step`.

An arm is what a command compares: the lab's code in one weight format, or a baseline. Each has a process of its own.
Compare only arms of one command. A command prints a table, writes one JSON file with its environment, and draws one
figure.
"""
