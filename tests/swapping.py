"""What the tests of swap_ share."""

import warnings

from torch import Tensor, nn

import fastconv
from fastconv import SwapReport


class Subclass(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Net(nn.Module):
    """Small, and with a convolution of every kind that a swap meets in a healthy model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.again = self.body
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.reflect = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.head = nn.Conv2d(8, 5, 1)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.body(self.stem(x)))
        return self.head(self.reflect(self.depthwise(x))).mean((2, 3))


NET_CONVOLUTIONS = [("stem.0",), ("body", "again"), ("depthwise",), ("reflect",), ("head",)]


def swap_quietly(model: nn.Module, **arguments: object) -> SwapReport:
    """Swaps a model of which nothing, or not everything, fits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fastconv.swap_(model, **arguments)


def codes(report: SwapReport) -> list[str]:
    return [row.reason_code for row in report.rows]
