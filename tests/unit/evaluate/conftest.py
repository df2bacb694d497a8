import pytest
import torch

from qerl_lab.evaluate import entropy
from qerl_lab.evaluate.evaluate_options import EntropyOptions


@pytest.fixture(scope="session")
def texts() -> entropy.Texts:
    torch.set_num_threads(1)
    options = EntropyOptions(questions=6, max_completion_tokens=16, batch_size=4)
    return entropy.sample_texts(options, torch.device("cpu"))
