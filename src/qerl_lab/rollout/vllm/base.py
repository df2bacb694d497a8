"""The directory from which vLLM reads the frozen base: the same weights, bit for bit, that the policy computes with."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from qerl_lab import formats
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig
from qerl_lab.model.dense import base_tensors
from qerl_lab.model.files import WeightFiles, local_folder, read_json
from qerl_lab.model.loading import stored_as
from qerl_lab.model.policy import Policy

IN_MEMORY = Path("/dev/shm")  # a copy there never touches a disk


@contextmanager
def folder_of(policy: Policy, cfg: RunConfig) -> Iterator[Path]:
    """Yield the model's own directory where it holds the policy's very weights, else a copy that is removed after."""
    own = local_folder(cfg.model.path, cfg.model.revision)
    if stored_as(own) is not None or (cfg.format.name == DENSE_FORMAT and is_bfloat16(WeightFiles(own))):
        yield own
        return
    tensors = base_tensors(policy)
    with scratch_folder(sum(tensor.nbytes for tensor in tensors.values())) as folder:
        save_torch_state_dict(tensors, folder)
        policy.tokenizer.save_pretrained(folder)  # vLLM wants one, and is sent token ids
        config = read_json(own / "config.json")
        if cfg.format.name != DENSE_FORMAT:
            dtype = policy.model.dtype
            config["quantization_config"] = formats.build(cfg.format).quantization_config(cfg.format.ignore, dtype)
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


def is_bfloat16(files: WeightFiles) -> bool:
    """Whether the policy, which rounds what it calls bf16, took the weights as they are."""
    return all(files.dtype(name) is torch.bfloat16 for name in files.names)


@contextmanager
def scratch_folder(size: int) -> Iterator[Path]:
    """Yield a folder for `size` bytes, in memory where that has room, and remove it after."""
    roomy = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 1.2 * size
    with tempfile.TemporaryDirectory(prefix="qerl-lab-", dir=IN_MEMORY if roomy else None) as folder:
        yield Path(folder)
