"""The rungs of two sources' optimisation ladders that are no algorithm of ours: the same direct kernel and the same
tiled matrix product with and without what each rung adds. CUDA, NCHW, square filters, one group.

Names: `ladder_direct`, `ladder_unroll` (unrolled to memory), `ladder_fused` (unrolled inside the product), with what is
added behind: `_restrict` (pointers are `__restrict__`), `_size` (the filter's size is a template constant),
`_constant_memory` (both, and the filters in constant memory), `_8x8` (both, and another tile than 16x16). In class
`fp16` they are `ladder_half_...`: products and sums in half (HFMA2), too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastconv import ops
from fastconv.models.layers import Layer

PREFIX, HALF = "ladder_", "ladder_half_"
WORKSPACE = 256 << 20  # bytes of the unrolled input at a time, or what one image needs
TILE = (16, 16)
CONSTANT_SIZES, SWEPT_SIZE = (3, 5, 7), 7  # filters for which there are kernels
CONSTANT_BYTES = 64 << 10


@dataclass(frozen=True)
class Rung:
    """form: direct, unroll or fused. restrict: pointers are `__restrict__`. size: the filter's size is a template
    constant. constant_memory: where the filters lie. tile: output channels and pixels of a block of the product."""

    form: str
    restrict: bool = False
    size: bool = False
    constant_memory: bool = False
    tile: tuple[int, int] = TILE

    def why_not(self, layer: Layer, element: int) -> str:
        """Why there is no kernel for the layer with elements of so many bytes; "" if there is."""
        if layer.groups != 1 or layer.dilation != 1 or layer.r != layer.s:
            return "the ladders have square filters, one group and no dilation"
        sizes = (SWEPT_SIZE,) if self.tile != TILE else CONSTANT_SIZES
        if self.size and layer.r not in sizes:
            return f"size is {layer.r}; expected one of {', '.join(map(str, sizes))}"
        if self.constant_memory and layer.c * layer.r * layer.s * element > CONSTANT_BYTES:
            return "a filter does not fit in constant memory"
        return ""


def _rungs() -> dict[str, Rung]:
    found = {}
    for form in ("direct", "fused"):
        found[form] = Rung(form)
        found[f"{form}_restrict"] = Rung(form, True)
        found[f"{form}_size"] = Rung(form, False, True)
        found[f"{form}_restrict_size"] = Rung(form, True, True)
        found[f"{form}_constant_memory"] = Rung(form, True, True, True)
    found |= {"unroll": Rung("unroll"), "unroll_restrict": Rung("unroll", True)}
    for rows, columns in ((8, 8), (32, 32), (4, 64), (16, 64)):
        found[f"fused_{rows}x{columns}"] = Rung("fused", True, True, False, (rows, columns))
    order = ("direct", "unroll", "fused")
    return dict(sorted(found.items(), key=lambda item: order.index(item[1].form)))


RUNGS = {PREFIX + name: rung for name, rung in _rungs().items()}
RUNGS |= {HALF + name: rung for name, rung in _rungs().items() if rung.form != "direct"}


def is_rung(name: str) -> bool:
    """Whether a name is that of a rung here, and not of an algorithm."""
    return name.startswith(PREFIX)


def class_of(name: str) -> str:
    """The accuracy class in which a rung's operands are."""
    return "fp16" if name.startswith(HALF) else "ieee"


def of_class(accuracy: str) -> list[str]:
    """The rungs of a class, in their order."""
    return [name for name in RUNGS if class_of(name) == accuracy]


def serving(names: Iterable[str], layer: Layer, accuracy: str, layout: str, device: torch.device) -> list[str]:
    """Which of `names` are rungs that serve the layer in the class and layout on the device."""
    if device.type != "cuda" or layout != "nchw":
        return []
    element = 2 if accuracy == "fp16" else 4
    wanted = [name for name in names if name in RUNGS and class_of(name) == accuracy]
    return [name for name in wanted if not RUNGS[name].why_not(layer, element)]


def workspace_bytes(name: str, x: Tensor, weight: Tensor, layer: Layer) -> int:
    """Of what a rung needs beside its tensors: of `unroll`, the unrolled input of as many images as WORKSPACE holds."""
    return _workspace_bytes(name, x, weight, layer.p * layer.q)


def _workspace_bytes(name: str, x: Tensor, weight: Tensor, pixels: int) -> int:
    if RUNGS[name].form != "unroll":
        return 0
    image = weight[0].numel() * pixels * x.element_size()
    return image * max(1, min(len(x), WORKSPACE // image))


def workspace_of(name: str, x: Tensor, weight: Tensor, output: Tensor) -> Tensor | None:
    """Room for them; None if there are none."""
    size = _workspace_bytes(name, x, weight, output[0, 0].numel())
    return torch.empty(size, dtype=torch.uint8, device=x.device) if size else None


def convolve(name: str, x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """x [N, C, H, W] and weight [K, C, R, R], float32 or float16 as class_of(name) has it, CUDA, contiguous ->
    [N, K, P, Q]. Raises UnsupportedError where the rung has no kernel."""
    pairs = [stride] * 2, [padding] * 2, [1] * 2
    output = x.new_empty(len(x), len(weight), *ops.output_size(x.shape, weight.shape, *pairs))
    _run(name, x, weight, stride, padding, output, workspace_of(name, x, weight, output))
    return output


def contender(name: str, x: Tensor, weight: Tensor, layer: Layer) -> Callable[[], Tensor]:
    """A callable for timing: the workspace is allocated here and now, the output by each call."""
    shape = (len(x), layer.k, layer.p, layer.q)
    workspace = workspace_of(name, x, weight, x.new_empty(1).expand(shape))

    def call() -> Tensor:
        output = x.new_empty(shape)
        _run(name, x, weight, layer.stride, layer.padding, output, workspace)
        return output

    return call


def _run(
    name: str, x: Tensor, weight: Tensor, stride: int, padding: int, output: Tensor, workspace: Tensor | None
) -> None:
    rung = RUNGS[name]
    flags = (rung.form, rung.restrict, rung.size, rung.constant_memory, *rung.tile)
    ops.ladder(x, weight, stride, padding, *flags, output, workspace)


class Convolution(nn.Module):
    """A convolution layer computed by a rung, its bias added behind."""

    def __init__(self, layer: nn.Conv2d, name: str) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._convolve = functools.partial(convolve, name, stride=layer.stride[0], padding=int(layer.padding[0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self._convolve(x, self.weight)
        return y if self.bias is None else y.add_(self.bias.view(1, -1, 1, 1))


def swap_(model: nn.Sequential, name: str) -> int:
    """Replaces the convolutions of a sequence by a rung; how many."""
    layers = {index: module for index, module in enumerate(model) if isinstance(module, nn.Conv2d)}
    for index, module in layers.items():
        model[index] = Convolution(module, name)
    return len(layers)
