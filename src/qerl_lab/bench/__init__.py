"""Speed and memory on an NVIDIA GPU: `python -m qerl_lab.bench linear`, `python -m qerl_lab.bench train_step`.

Every ratio compares arms that ran in turn in one process. A run prints a table, writes one JSON file with its
environment and draws one figure.
"""
