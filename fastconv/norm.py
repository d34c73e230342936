"""What stands before convolutions: a batch norm, which their kernels compute as they read their input, and what is left
of constants that are in their filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastconv.rewrites.choosing import factors
from fastconv.rewrites.folding import at_once


class InputNorm(nn.BatchNorm2d):
    """A torch.nn.BatchNorm2d in evaluation mode, with what `fastconv::conv2d_packed_into` takes of it: scale and shift,
    kept as packed weights of frozen layers are. `fastconv.fuse` makes such norms by their class alone."""

    _kept: tuple[Tensor, Tensor] | None = None
    _dropped: tuple[tuple[Tensor, Tensor], ...] = ()  # captured CUDA graphs may read them, and other streams

    def factors(self) -> tuple[Tensor, Tensor]:
        """scale and shift: float32 [C], on the norm's device."""
        if self._kept is not None:
            return self._kept
        made = self._computed()
        if made[0].is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return made  # which hold nothing before the first replay, and are the graph's
            torch.cuda.current_stream(made[0].device).synchronize()  # other streams read it without waiting
        self._kept = made
        return made

    def _computed(self) -> tuple[Tensor, Tensor]:
        # Ordinary tensors even inside inference_mode: they are written again outside of it.
        with torch.inference_mode(False), torch.no_grad():
            scale, shift = factors(at_once, self.weight, self.bias, self.running_mean, self.running_var, self.eps)
            return scale, shift

    def refresh(self) -> None:
        """Computes them again, in the same memory."""
        if self._kept is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            for kept, made in zip(self._kept, self._computed(), strict=True):
                kept.copy_(made)
        if self._kept[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._kept[0].device).synchronize()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self._kept is not None:
            self._dropped = (*self._dropped, self._kept)
            self._kept = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_dropped")}


class Operand(nn.Module):
    """An input with the dtype and shape that arithmetic with these constants gave it, which are in the filters behind:
    of an ordinary one that is the input itself. `fastconv.fuse`, which knows no inputs, puts it there."""

    like: Tensor

    def __init__(self, constants: Sequence[Any], weight: Tensor) -> None:
        super().__init__()
        shape = torch.broadcast_shapes(*(each.shape for each in constants if isinstance(each, Tensor)))
        self.dims, self.channels = len(shape), shape.numel()
        self.others = {each.dtype for each in constants if isinstance(each, Tensor)} - {weight.dtype}
        self.register_buffer("like", weight.new_empty(shape), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        like = self.like
        if not input.is_floating_point():  # numbers promote integers, and so do tensors of no dimensions
            for dtype in (like.dtype, *self.others):
                input = input.to(torch.promote_types(input.dtype, dtype))
        elif input.dtype != like.dtype and self.dims > 0:
            input = input.to(torch.promote_types(input.dtype, like.dtype))
        if input.dim() >= max(self.dims, 3) and self.channels in (1, input.shape[-3]):
            return input
        return input.expand(torch.broadcast_shapes(input.shape, like.shape))
