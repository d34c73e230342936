"""CUTLASS's 3xTF32 implicit GEMM convolution as a rival: FP32-accurate on tensor cores, forward and both gradients.

conv3xtf32.cu instantiates it and is compiled on request (`fastconv bench build-cutlass`), since CUTLASS's headers are
no part of this project; where no library was built the rival is named as missing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

import torch

from benchmarks.layers.sets import PASSES
from fastconv.models.layers import Layer

SOURCE = Path(__file__).with_name("conv3xtf32.cu")
LIBRARY = Path(__file__).with_name("libconv3xtf32.so")
ALIGNMENT = 4  # elements: C and K have to be multiples of it


class CutlassUnavailable(RuntimeError):
    """The library was not built, or serves no such convolution; the message says which."""


def build(headers: Path, architecture: str = "90", out: Path = LIBRARY, nvcc: str | None = None) -> Path:
    """Compiles the library with CUTLASS's `headers`, a folder with include/ and tools/util/include, for one compute
    capability. Raises FileNotFoundError without headers or nvcc, RuntimeError if nvcc fails."""
    if not (headers / "include/cutlass/cutlass.h").is_file():
        raise FileNotFoundError(f"headers is {headers}; expected a folder that has include/cutlass/cutlass.h")
    root = os.environ.get("CUDA_HOME")
    compiler = nvcc or (f"{root}/bin/nvcc" if root else shutil.which("nvcc"))
    if compiler is None or not Path(compiler).exists():
        raise FileNotFoundError(f"nvcc was not found{f' at {compiler}' if compiler else ''}; set CUDA_HOME")
    includes = [f"-I{headers / folder}" for folder in ("include", "tools/util/include")]
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    flags = ["-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", "-shared"]
    done = subprocess.run([compiler, *flags, "-gencode", target, *includes, str(SOURCE), "-o", str(out)])
    if done.returncode != 0:
        raise RuntimeError(f"nvcc ended with code {done.returncode}")
    return out


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library: FASTCONV_CUTLASS, else the one that `build` writes. Raises CutlassUnavailable."""
    path = os.environ.get("FASTCONV_CUTLASS") or str(LIBRARY)
    try:
        found = ctypes.CDLL(path)
    except OSError as error:
        raise CutlassUnavailable(f"{error}: `fastconv bench build-cutlass` compiles it") from None
    found.conv3xtf32_tile_name.argtypes, found.conv3xtf32_tile_name.restype = [c_int], c_char_p
    found.conv3xtf32_create.argtypes = [c_int] * 4 + [POINTER(c_int)]
    found.conv3xtf32_create.restype = c_void_p
    found.conv3xtf32_workspace_bytes.argtypes, found.conv3xtf32_workspace_bytes.restype = [c_void_p], c_size_t
    found.conv3xtf32_prepare.argtypes = [c_void_p] * 6
    found.conv3xtf32_run.argtypes = [c_void_p] * 2
    found.conv3xtf32_destroy.argtypes, found.conv3xtf32_destroy.restype = [c_void_p], None
    return found


class Convolution:
    """One convolution or gradient with one tile: calling it runs it on the current stream and returns the result."""

    def __init__(self, operation: int, tensors: Sequence[torch.Tensor]) -> None:
        self._operation, self._tensors = operation, tensors
        self.workspace_bytes = int(library().conv3xtf32_workspace_bytes(operation))

    def bind(self, workspace: torch.Tensor) -> None:
        """Gives it its workspace, uint8 of at least workspace_bytes, and takes over the pointers."""
        self._workspace = workspace
        pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._check("prepare", *pointers, workspace.data_ptr())

    def __call__(self) -> torch.Tensor:
        self._check("run")
        return self._tensors[2]

    def _check(self, name: str, *arguments: int) -> None:
        stream = torch.cuda.current_stream(self._tensors[0].device).cuda_stream
        status = getattr(library(), f"conv3xtf32_{name}")(self._operation, *arguments, stream)
        if status != 0:
            raise RuntimeError(f"conv3xtf32_{name}: cutlass::Status {status}")

    def __del__(self) -> None:
        library().conv3xtf32_destroy(self._operation)


def forms(
    x: torch.Tensor, weight: torch.Tensor, layer: Layer, direction: str, grad: torch.Tensor | None
) -> dict[str, Convolution]:
    """Every tile, with the sum in one piece and in as many as fill the device once and twice, added both ways.

    x, weight, grad: float32, dense in channels_last order. Raises CutlassUnavailable, saying why.
    """
    if layer.groups != 1:
        raise CutlassUnavailable("the kernels of CUTLASS 3xTF32 serve one group")
    if layer.c % ALIGNMENT or layer.k % ALIGNMENT:
        raise CutlassUnavailable(f"C = {layer.c} and K = {layer.k} are not both multiples of {ALIGNMENT}")
    shape = (x.shape[0], layer.k, layer.p, layer.q)
    options = {"device": x.device, "memory_format": torch.channels_last}
    if grad is None:
        tensors = (x, weight, torch.empty(shape, **options))  # type: ignore[call-overload]
    elif direction == "backward_weight":
        tensors = (grad, x, torch.empty_like(weight))
    else:
        tensors = (grad, weight, torch.empty_like(x))
    geometry = [x.shape[0], layer.h, layer.w, layer.c, layer.k, layer.r, layer.s, layer.p, layer.q]
    geometry += [layer.padding, layer.stride, layer.dilation]
    made: dict[str, Convolution] = {}
    parallel_forms: list[Convolution] = []
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    tile = 0
    while name := library().conv3xtf32_tile_name(tile):
        rows, columns = (int(size) for size in name.decode().split("x")[:2])
        for slices, parallel in _splits(x.shape[0], layer, direction, rows, columns, processors):
            values = (c_int * len(geometry))(*geometry)
            operation = library().conv3xtf32_create(PASSES.index(direction), tile, slices, parallel, values)
            if operation:
                how = "" if slices == 1 else f", {slices} slices {'in parallel' if parallel else 'in turn'}"
                form = made[f"tile {name.decode()}{how}"] = Convolution(operation, tensors)
                if parallel:
                    parallel_forms.append(form)
                else:  # its semaphores have to stay as they are
                    form.bind(torch.empty(form.workspace_bytes + 256, dtype=torch.uint8, device=x.device))
        tile += 1
    if not made:
        raise CutlassUnavailable("no tile of CUTLASS 3xTF32 serves the layer (its tensors have to be below 2 GiB)")
    most = max((form.workspace_bytes for form in parallel_forms), default=0)
    workspace = torch.empty(most + 256, dtype=torch.uint8, device=x.device)
    for form in parallel_forms:
        form.bind(workspace)
    return made


def _splits(n: int, layer: Layer, direction: str, rows: int, columns: int, processors: int) -> list[tuple[int, int]]:
    """(slices of the sum, in parallel) worth trying: where the tiles alone leave processors idle, more slices."""
    pixels, taps = n * layer.p * layer.q, layer.r * layer.s
    sizes = {
        "forward": (pixels, layer.k, layer.c * taps),
        "backward_weight": (layer.k, layer.c * taps, pixels),
        "backward_input": (n * layer.h * layer.w, layer.c, layer.k * taps),
    }
    height, width, depth = sizes[direction]
    tiles = -(-height // rows) * -(-width // columns)
    found = [(1, 0)]
    for waves in (1, 2):
        slices = min(waves * processors // tiles, depth // 64)
        if slices > 1:
            found += [(slices, 0), (slices, 1)]
    return list(dict.fromkeys(found))
