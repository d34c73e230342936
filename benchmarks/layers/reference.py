"""What an output of a layer is compared with: float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fastconv import testing
from fastconv.models.layers import Layer


class Reference:
    """The layer in float64 for the first and the last image of the batch, and the error of an output against it."""

    _images: Sequence[int] | slice

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, layer: Layer, *addends: torch.Tensor) -> None:
        """addends: bias [K], and residual [N, K, P, Q] or none, of ReLU(conv + bias + residual)."""
        images = self._images = sorted({0, x.shape[0] - 1})
        geometry = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2
        # Without cuDNN: unrolled and multiplied, no search for an algorithm.
        self._y = torch.ops.aten._convolution.default(
            x[images].double().contiguous(), weight.double().contiguous(), None, *geometry, False, [0, 0],
            layer.groups, False, False, False, False,
        )  # fmt: skip
        if addends:
            bias, *residual = addends
            self._y += bias.double().view(1, -1, 1, 1)
            for each in residual:
                self._y += each[images].double()
            self._y.relu_()

    @staticmethod
    def of_gradient(
        x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, layer: Layer, direction: str
    ) -> Reference:
        """The same for a gradient: of the filter (the whole of it, a sum over all images), or of the input."""
        self = Reference.__new__(Reference)
        geometry = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2, False, [0, 0], layer.groups
        mask = [direction == "backward_input", direction == "backward_weight", False]
        images = sorted({0, x.shape[0] - 1}) if mask[0] else list(range(x.shape[0]))
        self._images = images if mask[0] else slice(None)
        parts = []
        with torch.backends.cudnn.flags(enabled=False):
            for i in images:  # one by one: float64 takes room
                operands = (t.double().contiguous() for t in (grad[i : i + 1], x[i : i + 1], weight))
                gradients = torch.ops.aten.convolution_backward.default(*operands, None, *geometry, mask)
                parts.append(gradients[mask.index(True)])
        self._y = torch.cat(parts) if mask[0] else torch.stack(parts).sum(0)
        return self

    def error(self, y: torch.Tensor) -> dict[str, float]:
        """`fastconv.testing.errors` as l2, max and bias."""
        found = testing.errors(y[self._images], self._y)
        # JSON has no NaN; an infinite error is as wrong.
        values = [value if math.isfinite(value) else 1e30 for value in (found.relative_l2, found.maximum, found.bias)]
        return dict(zip(("l2", "max", "bias"), values, strict=True))
