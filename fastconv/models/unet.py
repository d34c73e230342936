"""A U-Net (Ronneberger, Fischer and Brox, 2015): the network in which high resolutions meet few channels, and whose way
up joins what the way down has kept.

Written from the paper's figure, with two changes that are common: convolutions keep the size, and are followed by batch
norms. Its width is a parameter.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

LEVELS = 4


class TwoConvolutions(nn.Sequential):
    """Twice: 3x3 convolution without bias, batch normalisation, ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index, channels in enumerate((in_channels, out_channels), 1):
            layers[f"conv{index}"] = nn.Conv2d(channels, out_channels, 3, padding=1, bias=False)
            layers[f"norm{index}"] = nn.BatchNorm2d(out_channels)
            layers[f"activation{index}"] = nn.ReLU(inplace=True)
        super().__init__(layers)


class UNet(nn.Module):
    """[N, 3, H, W] -> scores of every pixel [N, classes, H, W]; H and W multiples of 16. `width` (32) channels at full
    resolution, twice as many at each of four levels below."""

    def __init__(self, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(LEVELS + 1)]
        self.down = nn.ModuleList(TwoConvolutions(c, k) for c, k in zip([3, *widths[:-1]], widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(2 * k, k, 2, stride=2) for k in reversed(widths[:-1]))
        self.up = nn.ModuleList(TwoConvolutions(2 * k, k) for k in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            kept.append(x)
        kept.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat([kept.pop(), enlarge(x)], dim=1))
        scores: Tensor = self.head(x)
        return scores
