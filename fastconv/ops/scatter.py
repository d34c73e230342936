"""Operators that write a range of channels, as graphs have them: like aten::slice_scatter each one returns the tensor
that it is given with the range written, and changes nothing. Inductor's code writes in place
(`fastconv.integrations`): who makes such nodes writes no channel of a tensor twice, so that every later value of the
tensor holds all earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastconv import ops

_COMPOSITE = "CompositeExplicitAutograd"


def _channel_scatter(x: Tensor, buffer: Tensor, begin: int) -> Tensor:
    return torch.ops.aten.slice_scatter.default(buffer, x, 1, begin, begin + x.shape[1])


def _conv2d_packed_scatter(
    input: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, buffer: Tensor, begin: int, geometry: Sequence[int], channels_last: bool, algorithm: str,
    precision: str, activation: str, negative_slope: float, input_activation: str, residual_after: bool,
    shuffle: str = "none",
) -> Tensor:  # fmt: skip
    """input_activation(input * scale + shift) [N, C, H, W] convolved, or input with a residual [N, K, P, Q] added,
    into the channels of `buffer` [N, B, P, Q] from `begin` on; or shuffled."""
    result = buffer.clone()
    ops.conv2d_packed_into_op(
        result.narrow(1, begin, written_channels(geometry, shuffle)), input, packed, bias, residual, scale, shift,
        geometry, channels_last, algorithm, precision, activation, negative_slope, input_activation, residual_after,
        shuffle,
    )  # fmt: skip
    return result


def written_channels(geometry: Sequence[int], shuffle: str = "none") -> int:
    """Of the range that a convolution with these sizes writes."""
    return geometry[0] if shuffle == "none" else geometry[0] // 4


ops.library.impl("channel_scatter", _channel_scatter, _COMPOSITE)
ops.library.impl("conv2d_packed_scatter", _conv2d_packed_scatter, _COMPOSITE)


@torch.library.register_fake(ops.channel_scatter_op, lib=ops.library)
def _(x, buffer, begin):  # type: ignore[no-untyped-def]
    return torch.empty_like(buffer)


@torch.library.register_fake(ops.conv2d_packed_scatter_op, lib=ops.library)
def _(input, packed, bias, residual, scale, shift, buffer, *others):  # type: ignore[no-untyped-def]
    return torch.empty_like(buffer)
