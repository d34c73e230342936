"""What kind of a tensor a tensor is: its class may take calls over."""

import torch
from torch import Tensor

# Of tensors that are nothing but tensors: no subclass that could take a call over.
PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but a tensor."""
    return type(tensor) in PLAIN


def is_same(kept: Tensor | None, tensor: Tensor | None) -> bool:
    """Whether both are the same elements in memory, or none."""
    if kept is None or tensor is None:
        return kept is tensor
    return kept.is_set_to(tensor) and kept.dtype is tensor.dtype


def is_alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are of the same shape, dtype and device, or none."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype is b.dtype and a.device == b.device


def version_of(tensor: Tensor | None) -> int | None:
    """How often the tensor was written to, as PyTorch counts; None of an inference tensor, where it does not."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def is_without_pixels(images: Tensor) -> bool:
    """Whether height or width [.., H, W] is zero: the padding of a transposed convolution may leave none. A symbol is
    not zero."""
    return any(type(size) is int and size == 0 for size in images.shape[-2:])


# PyTorch's own wrappers, which take any operator; by name, since not all are imported.
_DTENSOR = "torch.distributed.tensor.DTensor"
_WRAPPERS = (
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    _DTENSOR,
)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return _name_of(type(tensor)) == _DTENSOR


def is_foreign(tensor: Tensor) -> bool:
    """Whether the tensor's class says itself what PyTorch's operators do with it: it cannot know ours."""
    if is_plain(tensor):
        return False
    cls = type(tensor)
    function = cls.__torch_function__
    default = function is torch._C._disabled_torch_function_impl or (
        getattr(function, "__func__", None) is Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    )
    if default and cls.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:
        return False
    return _name_of(cls) not in _WRAPPERS
