"""Kernels that several processes on one card do not disturb. Humming 0.1.10 is said to be disturbed (LOG.md)."""

import importlib.util

import pytest

from busy_card import SMOLLM2, off, others

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


@pytest.mark.parametrize("backend", ["marlin", "humming"])
def test_products_stay_right_on_a_busy_card(backend: str) -> None:
    from qerl_lab.rollout.vllm.backends import humming_races

    if backend == "humming" and humming_races():
        pytest.skip("the installed humming-kernels has races on this GPU: tests/helpers/busy_card.py looks for them")
    with others(3):
        found = {(layer, rows): off(backend, layer, rows, loops=500) for layer in SMOLLM2 for rows in (512, 4096)}
    assert {key: launches for key, (launches, *_) in found.items() if launches} == {}
