"""The rivals of one layer in one class.

torch_<layout>        PyTorch with cudnn.benchmark=True: the best of up to 10 plans, what its users have today
torch_<layout>_all    the same with cudnn.benchmark_limit=0: its search over all plans
cudnn_<algorithm>...  every legacy algorithm of cuDNN (NCHW; _nhwc behind in NHWC)
cudnn_graph_<layout>  the fastest of every plan of cuDNN's graph API
cutlass_3xtf32        CUTLASS's implicit GEMM, FP32-accurate on tensor cores: no rival of `ieee`
cublas_<layout>       a matrix product for 1x1, unrolling and a matrix product elsewhere
triton_<products>     an implicit GEMM in Triton, if asked for: ieee (FP32 arithmetic), tf32x3 (no rival of `ieee`),
                      tf32, or half

In a survey of very many layers nobody searches: torch_default_<layout> is PyTorch with cudnn.benchmark=False, and
stands for its other forms, for cuDNN's graphs and for CUTLASS, which are left out.

Of ReLU(conv + bias + residual): torch_<layout> runs them one after the other, torch_<layout>_fused asks PyTorch's
operators of the fusion, cudnn_graph_<layout> plans the fusion, cublas_<layout> has bias and ReLU in the product's end
where it can; the others have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.peers import cublas, cudnn, cudnn_graph, cutlass, triton_gemm
from benchmarks.peers.fastest import fastest
from fastconv.models.layers import Layer

Call = Callable[[], torch.Tensor]

NOT_IEEE = ("cutlass_3xtf32", "triton_tf32x3")  # FP32-accurate, but not by FP32 arithmetic


def is_peer(name: str) -> bool:
    """Whether a contender is a rival: those of ours are called class/layout/algorithm."""
    return "/" not in name


SEARCH_S = 2.0  # seconds that PyTorch's search of up to 10 plans may take for the one over all plans to follow
REFUSED = "not a rival"  # how the note of a peer begins whose error is beyond the class


def is_of_cudnn(name: str) -> bool:
    """Whether a peer is one algorithm or plan of cuDNN's, asked for by PyTorch or directly."""
    return name.startswith(("torch_", "cudnn_")) and not name.endswith("_all")  # whose plans are in cudnn_graph


def best_of_cudnn(row: Mapping[str, Any]) -> float | None:
    """Microseconds of the fastest of cuDNN's peers in a row of a layer suite; None if none ran."""
    refused = [name for name, note in row["notes"].items() if note.startswith(REFUSED)]
    rivals = [us for name, us in row["peers"].items() if us and is_of_cudnn(name) and name not in refused]
    return min(rivals, default=None)


@dataclass
class Operands:
    """What the rivals of one group read: layout ("nchw", "nhwc") -> the same values dense in that layout."""

    inputs: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    layer: Layer
    tf32: bool  # matters for float32 alone
    direction: str = "forward"
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # of the gradients
    addends: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # bias, residual; of the fused passes
    search: bool = True  # rivals may look for their fastest form
    triton: bool = False  # Triton's kernel is a rival of the forward pass; its tiles are compiled
    workspace_limit: int = cudnn.WORKSPACE_LIMIT  # bytes, of one of cuDNN's algorithms
    plans: Mapping[str, Sequence[str]] = field(default_factory=dict)  # rival -> how earlier searches found its plan


@dataclass
class Searched:
    """A rival that looks for its fastest form when it is first called; `search` returns the form, in words how it was
    found, and why others were refused."""

    search: Callable[[], tuple[Call, str, list[str]]]
    description: str = ""
    failures: list[str] = field(default_factory=list)
    _form: Call | None = None

    def __call__(self) -> torch.Tensor:
        if self._form is None:
            self._form, self.description, self.failures = self.search()
        return self._form()


def pair(value: int | Sequence[int]) -> list[int]:
    """Of height and width."""
    return [value] * 2 if isinstance(value, int) else list(value)


def torch_convolution(
    x: torch.Tensor, weight: torch.Tensor, layer: Any, tf32: bool, direction: str = "forward",
    grad: torch.Tensor | None = None, search: bool = True,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's convolution, or its gradient of `direction`, with cudnn.benchmark=True over as many plans as
    cudnn.benchmark_limit says (`over_all_plans`), or without a search: what cuDNN's heuristics propose.
    The global switches are restored. layer: anything with stride, padding, dilation (numbers, or pairs of height
    and width) and groups."""
    geometry = (*map(pair, (layer.stride, layer.padding, layer.dilation)), False, [0, 0], layer.groups)
    backends = torch.backends.cudnn
    with backends.flags(enabled=True, benchmark=search, benchmark_limit=None, deterministic=False, allow_tf32=tf32):
        if grad is None:
            switches = search, False, True, tf32  # benchmark, deterministic, enabled
            return torch.ops.aten._convolution.default(x, weight, None, *geometry, *switches)
        mask = [direction == "backward_input", direction == "backward_weight", False]
        gradients = torch.ops.aten.convolution_backward.default(grad, x, weight, None, *geometry, mask)
    return gradients[mask.index(True)]


@functools.cache
def _other_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="benchmark_limit_0")


def over_all_plans(call: Callable[[], Any], device: torch.device) -> Any:
    """Runs `call` on the current stream with cudnn.benchmark_limit=0, in a thread of its own: PyTorch keeps what its
    search found for each thread, and does not search again under another limit."""
    stream, backends = torch.cuda.current_stream(device), torch.backends.cudnn

    def there() -> Any:
        with torch.inference_mode(), torch.cuda.stream(stream):
            return call()

    before = backends.benchmark_limit
    backends.benchmark_limit = 0
    try:
        return _other_thread().submit(there).result()
    finally:
        backends.benchmark_limit = before


def peers(
    operands: Operands,
    refuse: Callable[[torch.Tensor], str] = lambda y: "",
    announce: Callable[[str], None] = lambda name: None,
    banned: Mapping[str, str] = {},
) -> tuple[dict[str, Call], dict[str, str]]:
    """name -> call for every rival (without `search`: that does not), name -> why not for those that cannot run.

    Each rival reads its own layout: nobody's time holds a conversion. refuse: why a result is not of the class, or "";
    asked where a rival is the fastest of several forms. announce, banned: as in cudnn_graph.search.
    """
    layer, tf32, direction, search = operands.layer, operands.tf32, operands.direction, operands.search
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    device = next(iter(operands.inputs.values())).device
    if operands.addends:
        return _fused_peers(operands, refuse, announce, banned), refused
    data = {name: (x, operands.weights[name], operands.grads.get(name)) for name, x in operands.inputs.items()}
    for layout, (x, weight, grad) in data.items():
        call = functools.partial(torch_convolution, x, weight, layer, tf32, direction, grad, search=search)
        calls[f"torch_{layout}" if search else f"torch_default_{layout}"] = call
        if search and device.type == "cuda":
            calls[f"torch_{layout}_all"] = functools.partial(over_all_plans, call, device)
    if device.type != "cuda":
        return calls, refused
    problems = {}
    for layout, (x, weight, grad) in data.items():
        try:
            problems[layout] = cudnn.Problem(x, weight, layer, layout, tf32, direction, grad)
        except (cudnn.CudnnError, cudnn.CudnnUnavailable) as error:
            refused[f"cudnn_{layout}"] = str(error)
    direct, unsupported = cudnn.contenders(problems, operands.workspace_limit)
    calls |= direct
    refused |= unsupported
    for layout, (x, weight, grad) in data.items():
        arguments = x, weight, layer, layout, direction, grad
        if search:
            earlier = operands.plans.get(f"cudnn_graph_{layout}", ())
            plan = functools.partial(_cudnn_plan, arguments, tf32, refuse, announce, banned, earlier)
            calls[f"cudnn_graph_{layout}"] = Searched(plan)
        call = functools.partial(cublas.convolution, x, weight, layer, tf32, direction, grad)
        calls[f"cublas_{layout}"] = call
    if search and next(iter(data.values()))[0].dtype == torch.float32 and not tf32:
        x, weight, grad = data["nhwc"]
        calls["cutlass_3xtf32"] = Searched(functools.partial(_cutlass_tile, x, weight, layer, direction, grad, refuse))
    if operands.triton and direction == "forward":
        x, weight, _ = data["nhwc"]
        for products in ("half",) if x.dtype.itemsize == 2 else ("tf32",) if tf32 else ("ieee", "tf32x3"):
            tile = functools.partial(_triton_tile, x, weight, layer, products, refuse)
            calls[f"triton_{products}"] = Searched(tile)
    return calls, refused


def torch_unfused(conv: Call, bias: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """ReLU(conv + bias + residual), in as few of PyTorch's passes over memory as in-place operators allow."""
    y = conv()
    y += bias.view(1, -1, 1, 1)
    if residual is not None:
        y += residual
    return y.relu_()


def torch_fused(
    x: torch.Tensor, weight: torch.Tensor, layer: Layer, tf32: bool, bias: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same by PyTorch's operators that ask cuDNN for the fusion."""
    geometry = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2, layer.groups
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
        if residual is None:
            return torch.ops.aten.cudnn_convolution_relu.default(x, weight, bias, *geometry)
        return torch.ops.aten.cudnn_convolution_add_relu.default(x, weight, residual, 1.0, bias, *geometry)


def cublas_fused(
    x: torch.Tensor, weight: torch.Tensor, layer: Layer, tf32: bool, bias: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same by cuBLAS: bias and ReLU in the product's end where that is all of a 1x1 layer in channels_last."""
    if residual is None and cublas.is_product(layer) and not x.is_contiguous():
        return cublas.pointwise_relu(x, weight, tf32, bias)
    return torch_unfused(functools.partial(cublas.convolution, x, weight, layer, tf32), bias, residual)


def _fused_peers(
    operands: Operands, refuse: Callable[[torch.Tensor], str], announce: Callable[[str], None],
    banned: Mapping[str, str],
) -> dict[str, Call]:  # fmt: skip
    calls: dict[str, Call] = {}
    layer, tf32 = operands.layer, operands.tf32
    for layout, x in operands.inputs.items():
        weight, addends = operands.weights[layout], operands.addends[layout]
        convolution = functools.partial(torch_convolution, x, weight, layer, tf32)
        calls[f"torch_{layout}"] = functools.partial(torch_unfused, convolution, *addends)
        if x.is_cuda:
            calls[f"torch_{layout}_fused"] = functools.partial(torch_fused, x, weight, layer, tf32, *addends)
            arguments = x, weight, layer, layout, "forward", None, *addends
            earlier = operands.plans.get(f"cudnn_graph_{layout}", ())
            plan = functools.partial(_cudnn_plan, arguments, tf32, refuse, announce, banned, earlier)
            calls[f"cudnn_graph_{layout}"] = Searched(plan)
            calls[f"cublas_{layout}"] = functools.partial(cublas_fused, x, weight, layer, tf32, *addends)
    return calls


def _cudnn_plan(
    arguments: tuple[Any, ...], tf32: bool, refuse: Callable[[torch.Tensor], str], announce: Callable[[str], None],
    banned: Mapping[str, str], earlier: Sequence[str],
) -> tuple[Call, str, list[str]]:  # fmt: skip
    graph = cudnn_graph.Graph(*arguments)
    return cudnn_graph.search(graph, tf32, refuse, announce=announce, banned=banned, earlier=earlier)


def _cutlass_tile(
    x: torch.Tensor, weight: torch.Tensor, layer: Layer, direction: str, grad: torch.Tensor | None,
    refuse: Callable[[torch.Tensor], str],
) -> tuple[Call, str, list[str]]:  # fmt: skip
    forms = cutlass.forms(x, weight, layer, direction, grad)
    found = fastest(forms, x.device, refuse)
    return forms[found.name], f"{found.name}; of {len(found.times)} that ran", found.failures


def _triton_tile(
    x: torch.Tensor, weight: torch.Tensor, layer: Layer, products: str, refuse: Callable[[torch.Tensor], str]
) -> tuple[Call, str, list[str]]:
    forms = triton_gemm.forms(x, weight, layer, "ieee" if products == "half" else products)
    found = fastest(forms, x.device, refuse)
    return forms[found.name], f"{found.name}; of {len(found.times)} that ran", found.failures
