"""The operator that does nothing, for the benchmarks of the host's time (csrc/ops/empty.cpp)."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastconv import ops

assert ops.library  # the operators are loaded

# (input, weight, bias, a layer's number) -> None
empty_operator: Callable[[Tensor, Tensor, Tensor | None, int], None] = torch.ops.fastconv.empty_operator.default
