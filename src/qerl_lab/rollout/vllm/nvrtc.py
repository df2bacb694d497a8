"""Compile a CUDA kernel with NVRTC, which PyTorch brings, and start it. Needs no compiler on the machine.

Importing this module imports cuda.bindings, NVIDIA's own, which vLLM brings.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor


@cache
def function(source: Path, name: str, device: int) -> Any:
    """The kernel `name` of a file, loaded on the device, which is the current one. It may use all shared memory."""
    major, minor = torch.cuda.get_device_capability(device)
    module = checked(driver.cuModuleLoadData(cubin(source, f"sm_{major}{minor}")))
    found = checked(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(found, limit, shared_bytes(device)))
    return found


def shared_bytes(device: int) -> int:
    """Shared memory that a block may have at most, in bytes."""
    asked = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return checked(driver.cuDeviceGetAttribute(asked, device))


def cubin(source: Path, architecture: str) -> bytes:
    """Machine code of a file for "sm_90", say. Needs no GPU. Raises RuntimeError with what NVRTC says of an error."""
    program = checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    options = ("--std=c++17", f"--gpu-architecture={architecture}", f"--include-path={source.parent}")
    words = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(program, len(words), words)
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    if status[0].value:
        raise RuntimeError(f"NVRTC could not compile {source.name} for {architecture}: {log.decode()}")
    code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def launch(function: Any, blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
    """Start a kernel on the current stream, which a CUDA graph may be capturing.

    Args:
        arguments: tensors or None, which become pointers, and ctypes values.
    """
    values = [
        ctypes.c_void_p(None if given is None else given.data_ptr())
        if given is None or isinstance(given, Tensor)
        else given
        for given in arguments
    ]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = blocks, threads, shared_bytes
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of cuda.bindings gave besides its status. Raises RuntimeError for any status but success."""
    status, *values = result
    if status.value:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
