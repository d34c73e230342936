"""`winograd_megakernel` on CUDA with instruments: another map or grid, delays, records of its tasks.

For measurements and tests; an ordinary call knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastconv import _C, ops
from fastconv.models.compare import CLASS_DTYPE, precision_of
from fastconv.models.layers import Layer

# TaskRecord in csrc/winograd/task_trace.cuh.
RECORD = ("taken", "begin", "end", "kind", "group", "index", "ticket", "worker", "processor", "block")


@dataclass(frozen=True)
class Options:
    """What a launch is asked for; the defaults are an ordinary call's.

    d_ig, d_go, m: of the map; None: as planned. blocks: of the grid; 0: all that fit. delay: tasks wait now and then,
    for some of these bits as nanoseconds; 0: none does. series: the tasks kind by kind, a launch each. filters: U by
    tasks of the kernel, as the source has it, in place of the packed one; class ieee in NHWC, C and K even.
    """

    d_ig: int | None = None
    d_go: int | None = None
    m: int | None = None
    blocks: int = 0
    delay: int = 0
    series: bool = False
    filters: bool = False


class Megakernel:
    """One convolution, stride 1, its filters packed once.

    x: [N, C, H, W], CUDA, dense in NCHW or NHWC; weight: [K, C, 3, 3]; precision: ieee, fp32 or
    tf32, of float32 tensors; half types are a class of their own.
    Raises UnsupportedError where winograd_megakernel cannot serve it, with the reason.
    """

    def __init__(self, x: Tensor, weight: Tensor, padding: Sequence[int] = (1, 1), precision: str = "fp32") -> None:
        self._x, self._shape, self._padding, self._precision = x, list(weight.shape), list(padding), precision
        self._channels_last = not x.is_contiguous()
        self._weight, self._packed = weight.contiguous(), ops.pack_weight(weight, 1, "winograd_megakernel", precision)
        n, c, h, w = x.shape
        k, _, r, s = weight.shape
        self.output_shape = (n, k, *ops.output_size(x.shape, weight.shape, (1, 1), self._padding, (1, 1)))
        self._problem = _C.ConvProblem(
            n, c, h, w, k, r, s, padding=(self._padding[0], self._padding[1]), dtype=ops.dtype_name(x.dtype),
            precision=precision, layout="nhwc" if self._channels_last else "nchw",
        )  # fmt: skip
        self._device = ops.device_info(x.device)
        self.planned = _C.task_map(self._problem, self._device)

    def task_map(self, options: Options) -> _C.TaskMap:
        """The map that a launch with these options goes through."""
        return _C.instrumented_task_map(
            self._problem, self._device, options.d_ig, options.d_go, options.m, options.filters
        )

    def new_output(self, copies: int | None = None) -> Tensor:
        """Uninitialised [N, K, P, Q] in the layout of x; with `copies`: [copies, N, K, P, Q], each of them dense so."""
        n, k, p, q = self.output_shape
        count = () if copies is None else (copies,)
        if not self._channels_last:
            return self._x.new_empty((*count, n, k, p, q))
        return self._x.new_empty((*count, n, p, q, k)).movedim(-1, -3)

    def __call__(
        self, options: Options = Options(), output: Tensor | None = None, records: Tensor | None = None
    ) -> Tensor:
        """The convolution, on the current stream. records: see new_records()."""
        y = self.new_output() if output is None else output
        d_ig, d_go = (-1 if value is None else value for value in (options.d_ig, options.d_go))
        ops.instrumented_megakernel(
            self._x, self._packed, self._weight if options.filters else None, self._shape, self._padding,
            self._channels_last, self._precision, d_ig, d_go, options.m or 0, options.blocks, options.delay,
            options.series, y, records,
        )  # fmt: skip
        return y

    @property
    def packed_bytes(self) -> int:
        return self._packed.nbytes

    def workspace_bytes(self, options: Options = Options()) -> int:
        """What a launch with these options, which this makes, takes of PyTorch's allocator beside its output."""
        y, device = self.new_output(), self._x.device
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        self(options, y)
        return torch.cuda.max_memory_allocated(device) - held

    def new_records(self, options: Options = Options()) -> Tensor:
        """Room for a launch's records: int64 [tasks, fields of RECORD], zeros; times in ns of the GPU's clock."""
        return torch.zeros((len(self.task_map(options)), len(RECORD)), dtype=torch.int64, device=self._x.device)

    def record(self, options: Options = Options()) -> Tensor:
        """The records of one launch, on the CPU; the device has run it before, so that nothing is loaded in between."""
        records = self.new_records(options)
        for _ in range(2):
            self(options)
        torch.cuda.synchronize(self._x.device)
        self(options, records=records)
        return records.cpu()


def random_data(layer: Layer, n: int, accuracy: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """ReLU'd normal input [N, C, H, W] in NHWC and He weights [K, C, R, S] in NCHW, of the class's type."""
    x = torch.randn(n, layer.c, layer.h, layer.w, device=device).relu_().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(layer.k, layer.c, layer.r, layer.s, device=device) * math.sqrt(2.0 / (9 * layer.c))
    dtype = CLASS_DTYPE[accuracy]
    return x.to(dtype), weight.to(dtype)


def kernel_of(x: Tensor, weight: Tensor, layer: Layer, accuracy: str) -> Megakernel:
    """The megakernel on data of a layer. Raises UnsupportedError with the reason where it cannot run."""
    return Megakernel(x, weight, (layer.padding, layer.padding), precision_of(accuracy) or "fp32")


def random_kernel(layer: Layer, n: int, accuracy: str, device: torch.device) -> Megakernel:
    """The same on random data."""
    return kernel_of(*random_data(layer, n, accuracy, device), layer, accuracy)
