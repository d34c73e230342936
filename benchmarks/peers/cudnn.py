"""Every legacy algorithm of cuDNN, forward and backward, called directly in the library that torch has loaded.

PyTorch's own search tries only what cuDNN's heuristics propose, and misses some of the fastest FP32 algorithms.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path

import torch

from fastconv.models.layers import Layer

# In the order of cudnnConvolution{Fwd,BwdFilter,BwdData}Algo_t, which start at 0 (cudnn_ops.h).
ALGORITHMS = {
    "forward": (
        "implicit_gemm",
        "implicit_precomp_gemm",
        "gemm",
        "direct",
        "fft",
        "fft_tiling",
        "winograd",
        "winograd_nonfused",
    ),
    "backward_weight": ("algo_0", "algo_1", "fft", "algo_3", "winograd", "winograd_nonfused", "fft_tiling"),
    "backward_input": ("algo_0", "algo_1", "fft", "fft_tiling", "winograd", "winograd_nonfused"),
}
_FUNCTIONS = {"forward": "Forward", "backward_weight": "BackwardFilter", "backward_input": "BackwardData"}
# cudnn_graph.h: cudnnDataType_t, cudnnTensorFormat_t, cudnnMathType_t, cudnnConvolutionMode_t.
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}
FORMATS = {"nchw": 0, "nhwc": 1}
DEFAULT_MATH, TENSOR_OP_MATH, FMA_MATH = 0, 1, 3
CROSS_CORRELATION = 1
FLOAT = 0
WORKSPACE_LIMIT = 16 << 30  # bytes

_PROTOTYPES: dict[str, list] = {
    "cudnnCreate": [POINTER(c_void_p)],
    "cudnnDestroy": [c_void_p],
    "cudnnSetStream": [c_void_p, c_void_p],
    "cudnnCreateTensorDescriptor": [POINTER(c_void_p)],
    "cudnnDestroyTensorDescriptor": [c_void_p],
    "cudnnSetTensor4dDescriptor": [c_void_p] + [c_int] * 6,
    "cudnnCreateFilterDescriptor": [POINTER(c_void_p)],
    "cudnnDestroyFilterDescriptor": [c_void_p],
    "cudnnSetFilter4dDescriptor": [c_void_p] + [c_int] * 6,
    "cudnnCreateConvolutionDescriptor": [POINTER(c_void_p)],
    "cudnnDestroyConvolutionDescriptor": [c_void_p],
    "cudnnSetConvolution2dDescriptor": [c_void_p] + [c_int] * 8,
    "cudnnSetConvolutionMathType": [c_void_p, c_int],
    "cudnnSetConvolutionGroupCount": [c_void_p, c_int],
    "cudnnBackendCreateDescriptor": [c_int, POINTER(c_void_p)],
    "cudnnBackendDestroyDescriptor": [c_void_p],
    "cudnnBackendSetAttribute": [c_void_p, c_int, c_int, c_int64, c_void_p],
    "cudnnBackendGetAttribute": [c_void_p, c_int, c_int, c_int64, POINTER(c_int64), c_void_p],
    "cudnnBackendFinalize": [c_void_p],
    "cudnnBackendExecute": [c_void_p] * 3,
}
for _function in _FUNCTIONS.values():
    _PROTOTYPES[f"cudnnGetConvolution{_function}WorkspaceSize"] = [c_void_p] * 5 + [c_int, POINTER(c_size_t)]
    _PROTOTYPES[f"cudnnConvolution{_function}"] = (
        [c_void_p] * 2  # handle, alpha
        + [c_void_p] * 5  # descriptor and data of both operands, convolution
        + [c_int, c_void_p, c_size_t]  # algorithm, workspace
        + [c_void_p] * 3  # beta, descriptor and data of the result
    )


class CudnnError(RuntimeError):
    """A cuDNN call that did not return CUDNN_STATUS_SUCCESS; the message names the call and the status."""


class CudnnUnavailable(RuntimeError):
    """There is no cuDNN library in this installation of torch."""


@functools.cache
def library() -> ctypes.CDLL:
    """The cuDNN of this process, prototypes set. Raises CudnnUnavailable."""
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.version()  # makes torch load it
    paths = ["libcudnn.so.9"]  # by its name: the loaded one answers
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or [] if spec else []:
        paths.append(str(Path(folder) / "lib" / "libcudnn.so.9"))
    for path in paths:
        try:
            found = ctypes.CDLL(path)
        except OSError:
            continue
        for name, arguments in _PROTOTYPES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, c_int
        found.cudnnGetErrorString.argtypes, found.cudnnGetErrorString.restype = [c_int], c_char_p
        found.cudnnGetVersion.argtypes, found.cudnnGetVersion.restype = [], c_size_t
        return found
    raise CudnnUnavailable(f"libcudnn.so.9 was not found as any of {paths}")


def call(name: str, *arguments: object) -> None:
    """Calls `name`; raises CudnnError unless it returns CUDNN_STATUS_SUCCESS (0)."""
    status = getattr(library(), name)(*arguments)
    if status != 0:
        text = library().cudnnGetErrorString(status) or b"?"
        raise CudnnError(f"{name}: {text.decode()} ({status})")


_handles: dict[tuple[int, int], c_void_p] = {}


def handle(device: int) -> c_void_p:
    """This thread's handle for a CUDA device: none is for several threads at once."""
    key = threading.get_ident(), device
    if key not in _handles:
        made = c_void_p()
        with torch.cuda.device(device):
            call("cudnnCreate", byref(made))
        _handles[key] = made
    return _handles[key]


class Descriptor:
    """An opaque cuDNN object: created, freed with this one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.pointer = c_void_p()
        call(f"cudnnCreate{kind}Descriptor", byref(self.pointer))

    def __del__(self) -> None:
        if self.pointer and not sys.is_finalizing():
            getattr(library(), f"cudnnDestroy{self._kind}Descriptor")(self.pointer)


def math_type(dtype: torch.dtype, tf32: bool) -> int:
    """FP32: FMA alone without TF32, else cuDNN's default, which takes TF32 units; FP16 and BF16: tensor cores.

    TENSOR_OP_MATH_ALLOW_CONVERSION would round FP32 data to FP16 and is no peer of any class.
    """
    if dtype == torch.float32:
        return DEFAULT_MATH if tf32 else FMA_MATH
    return TENSOR_OP_MATH


class Problem:
    """One convolution in one layout, or one of its gradients: descriptors, result; the algorithms share one workspace.

    x: [N, C, H, W], weight: [K, C/groups, R, S], grad (unless direction is "forward"): [N, K, P, Q]; CUDA, dense in
    `layout` (nchw or nhwc).
    """

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, layer: Layer, layout: str, tf32: bool,
        direction: str = "forward", grad: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        assert x.is_contiguous(memory_format=order)
        assert weight.is_contiguous(memory_format=order)
        self.direction = direction
        self.y = grad
        if grad is None:
            shape = (x.shape[0], layer.k, layer.p, layer.q)
            self.y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)
        assert self.y is not None
        if direction == "backward_weight":
            weight = torch.empty_like(weight)
        elif direction == "backward_input":
            x = torch.empty_like(x)
        self.x, self.weight = x, weight
        self._handle = handle(x.get_device())
        self._x, self._y = Descriptor("Tensor"), Descriptor("Tensor")
        self._weight, self._convolution = Descriptor("Filter"), Descriptor("Convolution")
        dtype, form = DATA_TYPES[x.dtype], FORMATS[layout]
        call("cudnnSetTensor4dDescriptor", self._x.pointer, form, dtype, *x.shape)
        call("cudnnSetTensor4dDescriptor", self._y.pointer, form, dtype, *self.y.shape)
        call("cudnnSetFilter4dDescriptor", self._weight.pointer, dtype, form, *weight.shape)
        geometry = [layer.padding] * 2 + [layer.stride] * 2 + [layer.dilation] * 2
        call("cudnnSetConvolution2dDescriptor", self._convolution.pointer, *geometry, CROSS_CORRELATION, FLOAT)
        call("cudnnSetConvolutionMathType", self._convolution.pointer, math_type(x.dtype, tf32))
        call("cudnnSetConvolutionGroupCount", self._convolution.pointer, layer.groups)
        image, filters, output = (self._x, self.x), (self._weight, self.weight), (self._y, self.y)
        self._first, self._second, self._result = {
            "forward": (image, filters, output),
            "backward_weight": (image, output, filters),
            "backward_input": (filters, output, image),
        }[direction]

    def workspace_bytes(self, algorithm: int) -> int:
        """Raises CudnnError where the algorithm does not serve the problem."""
        size = c_size_t()
        call(
            f"cudnnGetConvolution{_FUNCTIONS[self.direction]}WorkspaceSize",
            self._handle,
            self._first[0].pointer,
            self._second[0].pointer,
            self._convolution.pointer,
            self._result[0].pointer,
            algorithm,
            byref(size),
        )
        return size.value

    def run(self, algorithm: int, workspace: torch.Tensor) -> torch.Tensor:
        """Runs on the current stream into the result (output or gradient), which it returns."""
        one, zero = c_float(1.0), c_float(0.0)
        call("cudnnSetStream", self._handle, c_void_p(torch.cuda.current_stream(self.x.device).cuda_stream))
        (first, first_data), (second, second_data), (result, result_data) = self._first, self._second, self._result
        call(
            f"cudnnConvolution{_FUNCTIONS[self.direction]}",
            self._handle,
            byref(one),
            first.pointer,
            first_data.data_ptr(),
            second.pointer,
            second_data.data_ptr(),
            self._convolution.pointer,
            algorithm,
            workspace.data_ptr(),
            workspace.numel(),
            byref(zero),
            result.pointer,
            result_data.data_ptr(),
        )
        return result_data


def contenders(
    problems: dict[str, Problem], limit: int = WORKSPACE_LIMIT, only: Sequence[str] | None = None
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, str]]:
    """name -> call for every algorithm (of `only`) in every layout of `problems`, and name -> why not for the others.

    Names: cudnn_<algorithm> in NCHW, cudnn_<algorithm>_nhwc in NHWC. All share one workspace: run them one at a time.
    """
    sizes: dict[str, tuple[Problem, int, int]] = {}
    refused: dict[str, str] = {}
    for layout, problem in problems.items():
        for index, algorithm in enumerate(ALGORITHMS[problem.direction]):
            if only is not None and algorithm not in only:
                continue
            name = f"cudnn_{algorithm}" + ("_nhwc" if layout == "nhwc" else "")
            try:
                size = problem.workspace_bytes(index)
            except CudnnError as error:
                refused[name] = str(error)
                continue
            if size > limit:
                refused[name] = f"workspace of {size / 2**30:.1f} GiB; the limit is {limit / 2**30:.0f} GiB"
                continue
            sizes[name] = problem, index, size
    if not sizes:
        return {}, refused
    device = next(iter(problems.values())).x.device
    workspace = torch.empty(max(size for _, _, size in sizes.values()), dtype=torch.uint8, device=device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        name: functools.partial(problem.run, index, workspace[:size]) for name, (problem, index, size) in sizes.items()
    }
    return calls, refused
