"""How far apart two runs of one network are, and how far apart they may be."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import class_scores, flatten_output

# The accuracy classes, and the dtype of weights and activations in each.
CLASS_DTYPE = {
    "ieee": torch.float32,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# Spacing of the numbers that operands or results are rounded to, relative to their size.
CLASS_EPSILON = {"ieee": 2.0**-23, "fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}

# `auto` takes no algorithm whose bound on a layer's error is a larger multiple of PyTorch's own in the class.
ERROR_MULTIPLE = 4.0


def precision_of(cls: str) -> str | None:
    """The `precision` argument that asks for a class; None for FP16 and BF16, where the dtype says it."""
    if cls not in CLASS_DTYPE:
        raise ValueError(f"class is {cls!r}; expected one of {', '.join(CLASS_DTYPE)}")
    return cls if CLASS_DTYPE[cls] is torch.float32 else None


@contextlib.contextmanager
def pytorch_class(cls: str, *, benchmark: bool = True) -> Iterator[None]:
    """Sets PyTorch's own switches so that its convolutions and matrix products compute in class `cls`.

    TF32 on for `tf32`, off for the others; cuDNN tries its algorithms out if `benchmark`. Restored on exit.
    """
    # The switches per operation: they answer whatever mix of the old and the new API set them; `allow_tf32` raises.
    cudnn: Any = torch.backends.cudnn
    wanted = "tf32" if cls == "tf32" else "ieee"
    # One that says so already is not written: it may only follow a wider one, and would not from then on.
    saved = [(each, each.fp32_precision) for each in (cudnn.conv, torch.backends.cuda.matmul)]
    saved = [(switch, precision) for switch, precision in saved if precision != wanted]
    saved_benchmark = cudnn.benchmark
    try:
        for switch, _ in saved:
            switch.fp32_precision = wanted
        cudnn.benchmark = benchmark
        yield
    finally:
        for switch, precision in saved:
            switch.fp32_precision = precision
        cudnn.benchmark = saved_benchmark


@dataclass(frozen=True)
class Agreement:
    """Of one output with a reference: relative L2 and largest difference (relative to the largest value), and the share
    of decisions whose best class is the same."""

    relative_l2: float
    maximum: float
    top1: float


def agreement(output: Tensor | tuple[Tensor, ...], reference: Tensor | tuple[Tensor, ...]) -> Agreement:
    """Compares two outputs of one network in float64. A NaN or an infinity on either side makes both errors NaN."""
    y, expected = flatten_output(output).double(), flatten_output(reference).double()
    if y.shape != expected.shape:
        raise ValueError(f"output has shape {list(y.shape)}; expected the reference's {list(expected.shape)}")
    if not (y.isfinite().all() and expected.isfinite().all()):
        return Agreement(math.nan, math.nan, 0.0)
    difference = y - expected
    same = class_scores(output).argmax(-1) == class_scores(reference).argmax(-1)
    return Agreement(
        relative_l2=(difference.norm() / expected.norm()).item(),
        maximum=(difference.abs().max() / expected.abs().max()).item(),
        top1=same.double().mean().item(),
    )


def bound(peer_error: float, cls: str, convolutions: int, multiple: float = ERROR_MULTIPLE) -> float:
    """The largest relative L2 difference of logits, swapped against unswapped, that passes.

    A small relative error of one layer reaches the logits as a linear function of it, the same function whichever
    algorithm made it. A swapped layer may err `multiple` times what PyTorch's does, so the swapped logits err at most
    about `multiple` times `peer_error`, the unswapped network's own error against float64, and that is also what the
    two may differ by. (An algorithm that was asked for by name may be expected to err by more than ERROR_MULTIPLE.)

    Floor: where PyTorch happens to err less than its arithmetic's rounding, nobody can match its luck. Two runs whose
    every convolution rounds its result once, each its own way (variance eps^2 / 12), differ by eps sqrt(layers / 6).
    """
    return max(multiple * peer_error, CLASS_EPSILON[cls] * math.sqrt(convolutions / 6))
