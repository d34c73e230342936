"""What the tests of concatenations and of norms before convolutions share, in `compile` and `fuse`."""

from typing import Any

import torch
import torch.nn.functional as F
from fusing import norm
from torch import Tensor, nn


class Model(nn.Module):
    """Layers of 8 channels, called by a function; in channels_last."""

    def __init__(self, forward: Any, k: int = 8, **arguments: Any) -> None:
        super().__init__()
        arguments = {"kernel_size": 3, "padding": 1} | arguments
        self.call = forward
        self.a, self.b, self.c = (nn.Conv2d(8, k, **arguments) for _ in range(3))
        self.wide, self.wider = nn.Conv2d(8 + k, 8, **arguments), nn.Conv2d(8 + 2 * k, 8, **arguments)
        self.norm, self.wide_norm = norm(8), norm(8 + k)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def model(forward: Any, *args: Any, **arguments: Any) -> nn.Module:
    return Model(forward, *args, **arguments).to(memory_format=torch.channels_last)


def picture(n: int = 2, h: int = 7, w: int = 5) -> Tensor:
    return torch.randn(n, 8, h, w).contiguous(memory_format=torch.channels_last)


def cat(*values: Tensor) -> Tensor:
    return torch.cat(values, 1)


def resized(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, like.shape[2:], mode="bilinear")


def dense(m: Any, x: Tensor) -> Tensor:
    """As torchvision's blocks: every layer concatenates all values before it again."""
    values = [m.b(x)]
    for layer in (m.a, m.wide, m.wider):
        values.append(layer(torch.cat(values, 1)))
    return torch.cat(values, 1)


def nested(m: Any, x: Tensor) -> Tensor:
    """The same, each of the concatenation before it."""
    y = m.b(x)
    for layer in (m.a, m.wide, m.wider):
        y = cat(y, layer(y))
    return y


def growing_backwards(m: Any, x: Tensor) -> Tensor:
    y = m.b(x)
    for layer in (m.a, m.wide, m.wider):
        y = cat(layer(y), y)
    return y


def skip(m: Any, x: Tensor) -> Tensor:
    """A U-Net: a value that is pooled, and concatenated much later with what was upsampled."""
    y = F.silu(m.a(x))
    return m.wide(cat(F.interpolate(m.b(F.avg_pool2d(y, 2)), y.shape[2:]), y))


def chain(m: Any, y: Tensor, blocks: int) -> Tensor:
    """RRDB's inner blocks: the sum behind each is the first part of the next one's list."""
    for _ in range(blocks):
        y = y + m.wide(cat(y, m.a(y)))
    return y


def chain_of_chains(m: Any, x: Tensor) -> Tensor:
    y = m.b(x)
    for _ in range(2):
        y = y + chain(m, y, 2)
    return m.c(y)


def wider_next(m: Any, x: Tensor) -> Tensor:
    y = m.b(x)
    y = m.wide(cat(y, m.a(y))) + y
    return m.wider(cat(y, m.a(y), m.c(y)))


def added_twice(m: Any, x: Tensor) -> Tensor:
    y = m.b(x)
    return m.up(m.wide(cat(y, m.a(y)))) + m.up(m.a(x) + y) + m.up(m.c(x) + y)


# The model, the codes of its concatenations, how many of its convolutions write a range, how many ranges are copied.
CASES = {
    "dense block": (dense, ["", "", ""], 4, 0),
    "nested": (nested, ["", "", ""], 4, 0),
    "growing backwards": (growing_backwards, ["", "", ""], 4, 0),
    "skip connection": (skip, [""], 1, 1),
    "two": (lambda m, x: cat(m.a(x), m.b(x)), [""], 2, 0),
    "of the input": (lambda m, x: m.wide(cat(x, m.a(x))), [""], 1, 1),
    "another reader": (lambda m, x: cat(y := m.a(x), m.b(y)) * cat(y.sin(), y), ["", "producers"], 2, 0),
    "in two": (lambda m, x: cat(y := m.a(x), m.b(x)) + cat(m.c(x), y), ["", ""], 3, 1),
    "in two, at the same place": (lambda m, x: cat(y := m.a(x), m.b(x)) + cat(y, m.c(x)), ["", ""], 3, 1),
    "with a residual": (lambda m, x: cat(m.a(x) + x, m.b(x)), [""], 1, 1),
    "upsampled": (lambda m, x: cat(m.up(x), m.a(m.up(x))), [""], 1, 1),
    "returned, too": (lambda m, x: (y := m.a(x), cat(y, m.b(x)))[1] + 0 * y.sum(), [""], 2, 0),
    "a part of itself is returned": (lambda m, x: cat(y := cat(m.a(x), m.b(x)), m.c(x)) * y.sum(), ["", ""], 3, 0),
    "the same twice": (lambda m, x: m.wider(cat(y := m.a(x), m.b(x), y)), ["twice"], 0, 0),
    "of another dtype": (lambda m, x: cat(m.a(x), m.b(x).double()), ["dtype"], 0, 0),
    "nothing of ours": (lambda m, x: cat(x.sin(), x), ["producers"], 0, 0),
    "along another dimension": (lambda m, x: torch.cat([m.a(x), m.b(x)], 2), [], 0, 0),
    "a chain of sums": (lambda m, x: m.c(chain(m, m.b(x), 3)), [""] * 3, 7, 0),
    "a chain that is returned": (lambda m, x: chain(m, m.b(x), 3), [""] * 3, 6, 0),
    "a chain from the input": (lambda m, x: m.c(chain(m, x, 2)), [""] * 2, 4, 1),
    "a chain of chains": (chain_of_chains, [""] * 4, 9, 1),
    "a residual in a narrower tensor": (wider_next, ["", ""], 4, 1),
    "two residuals of ours": (added_twice, [""], 1, 1),
    "residual and input": (lambda m, x: m.wide(cat(m.a(y := m.b(x)) + y, y)), [""], 2, 0),
    "a sum": (lambda m, x: m.wide(cat(m.up(x) + m.up(-x), m.a(m.up(x)))), [""], 1, 1),
    "a sum that nobody else computes": (lambda m, x: m.wide(cat(m.up(x) + m.up(-x), m.up(x))), [""], 0, 2),
    "resized": (lambda m, x: m.wide(cat(resized(m.up(x), x), x.cos())), [""], 0, 2),
    "resized, for nobody": (lambda m, x: cat(resized(m.up(x), x), x.cos()).exp(), ["producers"], 0, 0),
    "of three": (lambda m, x: cat(m.a(x), x.cos(), m.b(x)), [""], 2, 1),
}


# Norms before convolutions: the model, what becomes of its convolutions, how many norms are left.
NORMS = {
    "dense layer": (lambda m, x: m.a(F.relu(m.norm(x))), ["bn+relu+conv"], 0),
    "norm alone": (lambda m, x: m.a(m.norm(x)), ["bn+conv"], 0),
    "relu6": (lambda m, x: F.relu(m.a(F.relu6(m.norm(x)))), ["bn+relu6+conv+relu"], 0),
    "silu": (lambda m, x: m.norm(m.a(F.silu(m.norm(x)))), ["bn+silu+conv+bn"], 0),
    "leaky relu": (lambda m, x: m.a(F.leaky_relu(m.norm(x))), ["conv"], 1),
    "two readers": (lambda m, x: m.a(y := F.relu(m.norm(x))) * m.b(y), ["bn+relu+conv"] * 2, 0),
    "another reader": (lambda m, x: m.a(y := F.relu(m.norm(x))) * y.sin(), ["conv"], 1),
    "read before the activation": (lambda m, x: m.a(F.relu(y := m.norm(x))) * y, ["conv"], 1),
    "residual": (lambda m, x: m.a(F.relu(m.norm(x))) + x, ["conv+residual"], 1),
    "in a dense block": (
        lambda m, x: m.wide(F.relu(m.wide_norm(cat(x, m.a(F.relu(m.norm(x))))))),
        ["bn+relu+conv", "bn+relu+conv+cat"], 0,
    ),
}  # fmt: skip


def calibrated(network: nn.Module) -> None:
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.load_state_dict(norm(layer.num_features).state_dict())
