"""YOLOv3 (Redmon and Farhadi, 2018): Darknet-53 body, a feature pyramid, three detection heads.

Written from the paper's figures; only the network itself, no boxes, losses or training. It is here because it is the
network in which 3x3 stride-1 convolutions meet 1x1 and strided ones in equal numbers.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

LEAKY_SLOPE = 0.1
ANCHORS_PER_SCALE = 3


class ConvBlock(nn.Sequential):
    """Convolution without bias, batch normalisation, LeakyReLU(0.1); keeps H and W at stride 1, halves them at 2."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)
        norm = nn.BatchNorm2d(out_channels)
        super().__init__(OrderedDict(conv=conv, norm=norm, activation=nn.LeakyReLU(LEAKY_SLOPE, inplace=True)))


class Residual(nn.Module):
    """x + 3x3(1x1(x)), the 1x1 halving the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = ConvBlock(channels, channels // 2, 1)
        self.expand = ConvBlock(channels // 2, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.expand(self.reduce(x))

    def scale_branch(self, scale: float) -> None:
        """Sets what the branch's last norm multiplies by; see YOLOv3.initialise."""
        norm = self.expand.get_submodule("norm")
        assert isinstance(norm, nn.BatchNorm2d)
        nn.init.constant_(norm.weight, scale)


class Stage(nn.Sequential):
    """A strided convolution that doubles the channels, then residual blocks."""

    def __init__(self, in_channels: int, blocks: int) -> None:
        out_channels = 2 * in_channels
        down = ConvBlock(in_channels, out_channels, 3, stride=2)
        residuals = [Residual(out_channels) for _ in range(blocks)]
        super().__init__(OrderedDict(down=down, blocks=nn.Sequential(*residuals)))
        for residual in residuals:
            residual.scale_branch(blocks**-0.5)


class Darknet53(nn.Module):
    """[N, 3, H, W] -> features [N, 256, H/8, W/8], [N, 512, H/16, W/16], [N, 1024, H/32, W/32]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBlock(3, 32, 3)
        self.stage1 = Stage(32, 1)
        self.stage2 = Stage(64, 2)
        self.stage3 = Stage(128, 8)
        self.stage4 = Stage(256, 8)
        self.stage5 = Stage(512, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.stage3(self.stage2(self.stage1(self.stem(x))))
        middle = self.stage4(fine)
        return fine, middle, self.stage5(middle)


class Neck(nn.Sequential):
    """Five convolutions, 1x1 and 3x3 in turn, down to `channels`."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(
            ConvBlock(in_channels, channels, 1),
            ConvBlock(channels, 2 * channels, 3),
            ConvBlock(2 * channels, channels, 1),
            ConvBlock(channels, 2 * channels, 3),
            ConvBlock(2 * channels, channels, 1),
        )


class Head(nn.Sequential):
    """3x3 block and the 1x1 convolution that predicts 3 * (5 + classes) values per cell."""

    def __init__(self, channels: int, classes: int) -> None:
        predict = nn.Conv2d(2 * channels, ANCHORS_PER_SCALE * (5 + classes), 1)
        super().__init__(OrderedDict(expand=ConvBlock(channels, 2 * channels, 3), predict=predict))


class Lateral(nn.Module):
    """Halves the channels, doubles H and W, and puts the finer features behind them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = ConvBlock(channels, channels // 2, 1)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        return torch.cat([self.upsample(self.reduce(coarse)), fine], dim=1)


class YOLOv3(nn.Module):
    """Raw predictions, coarse to fine.

    input: [N, 3, H, W], H and W multiples of 32 (416 in the paper).
    Returns three tensors [N, 3 * (5 + classes), H/s, W/s], s = 32, 16, 8. With 80 classes: 255 channels and 61,949,149
    parameters.
    """

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        self.classes = classes
        self.body = Darknet53()
        self.neck_coarse, self.head_coarse = Neck(1024, 512), Head(512, classes)
        self.to_middle = Lateral(512)
        self.neck_middle, self.head_middle = Neck(256 + 512, 256), Head(256, classes)
        self.to_fine = Lateral(256)
        self.neck_fine, self.head_fine = Neck(128 + 256, 128), Head(128, classes)
        self.initialise()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine, middle, coarse = self.body(x)
        coarse = self.neck_coarse(coarse)
        middle = self.neck_middle(self.to_middle(coarse, middle))
        fine = self.neck_fine(self.to_fine(middle, fine))
        return self.head_coarse(coarse), self.head_middle(middle), self.head_fine(fine)

    def initialise(self) -> None:
        """He's normal initialisation, under which a convolution and its LeakyReLU keep the variance.

        A sum of B independent residual branches of that size would multiply the variance by 2^B; each branch's last
        norm is scaled by B^-1/2 (in Stage), so that a stage multiplies it by (1 + 1/B)^B < e.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, a=LEAKY_SLOPE, nonlinearity="leaky_relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
