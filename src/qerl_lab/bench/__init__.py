"""Speed and memory on an NVIDIA GPU: `python -m qerl_lab.bench linear|decode|train_step|rollout|step`.

A ratio compares arms of one command. In `linear` and `train_step` the arms take turns in one process; in `rollout` and
`step` each arm has a process of its own. A command prints a table, writes one JSON file with its environment, and draws
one figure.
"""
