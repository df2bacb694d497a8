"""Compile a CUDA kernel with NVRTC, which ships with PyTorch, and launch it. Needs no compiler on the machine.

Importing this module imports cuda.bindings, NVIDIA's package, which ships with vLLM.
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
def load_kernel(source: Path, name: str, device: int, variant: str, registers: int) -> Any:
    """Compile the CUDA file `source` for the current GPU, and return its kernel `name` for `launch`.

    The kernel may use all shared memory of a multiprocessor. `device` is the number of the current GPU. `variant` is a
    line appended to the source: a template instantiation. Raises RuntimeError unless the compiler gives a thread
    exactly `registers` registers, because a kernel that redistributes registers would hang with any other number.
    """
    major, minor = torch.cuda.get_device_capability(device)
    module = check_status(driver.cuModuleLoadData(compile_source(source, architecture(major, minor), variant)[0]))
    found = check_status(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check_status(driver.cuFuncSetAttribute(found, limit, shared_bytes(device)))
    given = check_status(driver.cuFuncGetAttribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, found))
    if given != registers:
        raise RuntimeError(f"{name} counts on {registers} registers a thread, and this compiler gave it {given}")
    return found


def architecture(major: int, minor: int) -> str:
    """Return NVRTC's name of a compute capability, such as "sm_90a".

    The "a", from 9.0 on, allows instructions that only this architecture has.
    """
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def shared_bytes(device: int) -> int:
    """Return the shared memory in bytes that a thread block may use on GPU number `device`."""
    asked = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return check_status(driver.cuDeviceGetAttribute(asked, device))


def shared_by_mps(device: int) -> bool:
    """Tell whether other processes may compute on GPU number `device` at the same time, through NVIDIA's MPS."""
    asked = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    return bool(check_status(driver.cuDeviceGetAttribute(asked, device)))


def compile_source(source: Path, architecture: str, variant: str = "") -> tuple[bytes, str]:
    """Compile the CUDA file `source` for `architecture`, such as "sm_90a"; return the cubin and NVRTC's log.

    `variant` is CUDA code that is appended to the file, such as the line that instantiates a template. Raises
    RuntimeError with the log if the file does not compile.
    """
    program = check_status(
        nvrtc.nvrtcCreateProgram(source.read_bytes() + variant.encode(), source.name.encode(), 0, [], [])
    )
    options = ("--std=c++17", f"--gpu-architecture={architecture}", f"--include-path={source.parent}")
    words = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(program, len(words), words)
    log = bytes(check_status(nvrtc.nvrtcGetProgramLogSize(program)))
    check_status(nvrtc.nvrtcGetProgramLog(program, log))
    messages = log.decode().rstrip("\0\n")
    if status[0].value:
        raise RuntimeError(f"NVRTC could not compile {source.name} for {architecture}: {messages}")
    code = bytes(check_status(nvrtc.nvrtcGetCUBINSize(program)))
    check_status(nvrtc.nvrtcGetCUBIN(program, code))
    return code, messages


def launch(function: Any, blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
    """Launch a kernel from `load_kernel` on the current stream, which a CUDA graph may be capturing.

    The kernel starts before the previous one has ended ("programmatic dependent launch" of the CUDA programming guide).
    It must call `griddepcontrol.wait` before it reads what the previous one wrote.

    Args:
        blocks: thread blocks, each with `threads` threads and `shared_bytes` bytes of dynamic shared memory.
        arguments: tensors or None, passed as pointers, and ctypes values.
    """
    values = [_kernel_argument(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = blocks, threads, shared_bytes
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    config.attrs, config.numAttrs = [_early_start_attribute()], 1
    check_status(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


def _kernel_argument(argument: Any) -> Any:
    """Return a kernel's argument as a ctypes value: a tensor or None becomes a pointer."""
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else argument


@cache
def _early_start_attribute() -> Any:
    """Return the launch attribute that lets a kernel start before the previous one ends; see `launch`."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def tiles_map(x: Tensor, stride: int, rows: int, blocks: int) -> Any:
    """Build a TMA descriptor (CUtensorMap) with 128-byte swizzle for x, bfloat16 `[M, K]`, as an argument of `launch`.

    Each TMA copy loads `rows` rows and `blocks` blocks of 64 columns. `stride` is the row stride of x in elements.
    """
    sizes = (64, x.shape[0], -(-x.shape[1] // 64))
    return _build_tensor_map(
        x, sizes, (2 * stride, 128), (64, rows, blocks), driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    )


def rows_map(B: Tensor, rows: int, columns: int) -> Any:
    """Build a TMA descriptor (CUtensorMap) without swizzle for B, bfloat16 `[N, rank]`, as an argument of `launch`.

    Each TMA copy loads `rows` x `columns` elements.
    """
    (N, rank), none = B.shape, driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
    return _build_tensor_map(B, (rank, N), (2 * rank,), (columns, rows), none)


def _build_tensor_map(
    matrix: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: Any
) -> Any:
    """Build a CUtensorMap of a bfloat16 matrix, as an argument of `launch`. Copies read zeros beyond the last element.

    `sizes` gives the number of elements of the matrix along each axis, innermost axis first. `box` gives the number of
    elements of one copy, in the same order. `strides` gives the stride in bytes of each axis but the innermost.
    """
    made = check_status(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, len(sizes), matrix.data_ptr(),
            [driver.cuuint64_t(size) for size in sizes], [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box], [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave(0), swizzle, driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    return (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(made.getPtr(), 128))


def check_status(result: tuple[Any, ...]) -> Any:
    """Return the first value of `result`, a return tuple of cuda.bindings after its status; None if it has no value.

    Raises RuntimeError if the status is an error.
    """
    status, *values = result
    if status.value:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
