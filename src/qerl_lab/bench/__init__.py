"""Speed and memory on an NVIDIA GPU: `python -m qerl_lab.bench linear|decode|train_step|rollout|step`.

Every ratio compares arms of one command: of `linear` and `train_step` they take turns in one process, of `rollout` and
`step` each has a process of its own. A run prints a table, writes one JSON file with its environment and draws one
figure.
"""
