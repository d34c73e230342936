"""Networks that no package has, as far as their convolutions go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def conv(c: int, k: int, r: int = 3, stride: int = 1, **arguments: object) -> nn.Conv2d:
    return nn.Conv2d(c, k, r, stride, **({"padding": r // 2} | arguments))  # type: ignore[arg-type]


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Dense(nn.Module):
    """RRDB's block: each convolution reads all before it."""

    def __init__(self, c: int = 64, growth: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(c + i * growth, growth if i < 4 else c) for i in range(5))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return x + seen[-1]


def upsample(c: int, times: int) -> list[nn.Module]:
    return [layer for _ in range(times) for layer in (nn.Upsample(scale_factor=2), conv(c, c))]


RESIDUAL_SCALE = 0.2  # of ESRGAN's branches, without which 23 blocks leave float16's range


@torch.no_grad()
def scaled(block: Dense, keep: float = 1.0) -> Dense:
    """With keep (x + RESIDUAL_SCALE branch) for x + branch, in place: the last convolution, which reads x as its first
    channels, has the scales, and subtracts what is not kept of x."""
    last = block.layers[-1]
    assert isinstance(last, nn.Conv2d)
    assert last.bias is not None
    last.weight *= keep * RESIDUAL_SCALE
    last.bias *= keep * RESIDUAL_SCALE
    r, s = (size // 2 for size in last.kernel_size)
    last.weight[:, : last.out_channels, r, s].diagonal().sub_(1 - keep)
    return block


def rrdb(blocks: int = 23) -> nn.Module:
    """ESRGAN's generator, the scales of its residual branches folded into weights."""
    body = [
        Residual(nn.Sequential(scaled(Dense()), scaled(Dense()), scaled(Dense(), RESIDUAL_SCALE)))
        for _ in range(blocks)
    ]
    return nn.Sequential(conv(3, 64), *body, conv(64, 64), *upsample(64, 2), conv(64, 64), conv(64, 3))


def edsr(c: int, blocks: int, scale: int = 2) -> nn.Module:
    body = [Residual(nn.Sequential(conv(c, c), nn.ReLU(), conv(c, c))) for _ in range(blocks)]
    tail = [conv(c, c * scale**2), nn.PixelShuffle(scale), conv(c, 3)]
    return nn.Sequential(conv(3, c), *body, conv(c, c), *tail)


def plain(c: int, depth: int, channels: int = 1) -> nn.Module:
    """DnCNN; with 3 channels VDSR's kind."""
    return nn.Sequential(conv(channels, c), *(conv(c, c) for _ in range(depth - 2)), conv(c, channels))


def srcnn() -> nn.Module:
    return nn.Sequential(conv(1, 64, 9), conv(64, 32, 5), conv(32, 1, 5))


def fsrcnn() -> nn.Module:
    layers = [conv(1, 56, 5), conv(56, 12, 1), *(conv(12, 12) for _ in range(4)), conv(12, 56, 1)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(56, 1, 9, 2, 4, 1))


def cyclegan() -> nn.Module:
    body = [Residual(nn.Sequential(conv(256, 256), nn.ReLU(), conv(256, 256))) for _ in range(9)]
    up = [nn.ConvTranspose2d(256, 128, 3, 2, 1, 1), nn.ConvTranspose2d(128, 64, 3, 2, 1, 1)]
    return nn.Sequential(conv(3, 64, 7), conv(64, 128, 3, 2), conv(128, 256, 3, 2), *body, *up, conv(64, 3, 7))


def discriminator() -> nn.Module:
    """pix2pix's, over patches of 70 x 70."""
    widths = [3, 64, 128, 256, 512]
    layers = [conv(widths[i], widths[i + 1], 4, 2 if i < 3 else 1, padding=1) for i in range(4)]
    return nn.Sequential(*layers, conv(512, 1, 4, padding=1))


def board(planes: int, c: int, blocks: int) -> nn.Module:
    """A board game's tower with the heads for policy and value."""
    body = [Residual(nn.Sequential(conv(c, c), nn.ReLU(), conv(c, c))) for _ in range(blocks)]
    return nn.Sequential(conv(planes, c), *body, conv(c, c), conv(c, 73, 1))


class UNet(nn.Module):
    """The first U-Net: without padding, cropped at its joints."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 256, 512, 1024]
        self.down = nn.ModuleList(self._pair(c, k) for c, k in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * k, k, 2, 2) for k in reversed(widths[:-1]))
        self.join = nn.ModuleList(self._pair(2 * k, k) for k in reversed(widths[:-1]))
        self.last = nn.Conv2d(64, 2, 1)

    @staticmethod
    def _pair(c: int, k: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(c, k, 3), nn.ReLU(), nn.Conv2d(k, k, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for up, join, other in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = up(x)
            top, left = (other.shape[2] - x.shape[2]) // 2, (other.shape[3] - x.shape[3]) // 2
            x = join(torch.cat([other[:, :, top : top + x.shape[2], left : left + x.shape[3]], x], 1))
        return self.last(x)


class C2f(nn.Module):
    """YOLOv8's block."""

    def __init__(self, c: int, k: int, blocks: int, add: bool) -> None:
        super().__init__()
        half = k // 2
        self.enter, self.leave = conv(c, k, 1), conv((2 + blocks) * half, k, 1)
        inner = [nn.Sequential(conv(half, half), conv(half, half)) for _ in range(blocks)]
        self.body = nn.ModuleList(Residual(block) if add else block for block in inner)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for block in self.body:
            parts.append(block(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class YOLOv8(nn.Module):
    """Backbone, neck and heads of a C2f detector; `width` and `depth` as its sizes n, s, m scale it."""

    def __init__(self, width: float, depth: float, last: int) -> None:
        super().__init__()
        w = [int(c * width) for c in (64, 128, 256, 512, last)]
        d = [max(1, round(blocks * depth)) for blocks in (3, 6)]
        self.stem = nn.Sequential(conv(3, w[0], 3, 2), conv(w[0], w[1], 3, 2), C2f(w[1], w[1], d[0], True))
        self.p3 = nn.Sequential(conv(w[1], w[2], 3, 2), C2f(w[2], w[2], d[1], True))
        self.p4 = nn.Sequential(conv(w[2], w[3], 3, 2), C2f(w[3], w[3], d[1], True))
        self.p5 = nn.Sequential(conv(w[3], w[4], 3, 2), C2f(w[4], w[4], d[0], True), conv(w[4], w[4] // 2, 1))
        self.pooled = conv(2 * w[4], w[4], 1)
        self.up4, self.up3 = C2f(w[4] + w[3], w[3], d[0], False), C2f(w[3] + w[2], w[2], d[0], False)
        self.to4, self.down4 = conv(w[2], w[2], 3, 2), C2f(w[2] + w[3], w[3], d[0], False)
        self.to5, self.down5 = conv(w[3], w[3], 3, 2), C2f(w[3] + w[4], w[4], d[0], False)
        self.heads = nn.ModuleList(self._head(c, k) for c in w[2:] for k in (64, 80))

    @staticmethod
    def _head(c: int, k: int) -> nn.Module:
        inner = max(k, 64)
        return nn.Sequential(conv(c, inner), conv(inner, inner), conv(inner, k, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        double = nn.Upsample(scale_factor=2)
        p3 = self.p3(self.stem(x))
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        pools = [p5]
        for _ in range(3):
            pools.append(nn.functional.max_pool2d(pools[-1], 5, 1, 2))
        p5 = self.pooled(torch.cat(pools, 1))
        n4 = self.up4(torch.cat([double(p5), p4], 1))
        n3 = self.up3(torch.cat([double(n4), p3], 1))
        n4 = self.down4(torch.cat([self.to4(n3), n4], 1))
        n5 = self.down5(torch.cat([self.to5(n4), p5], 1))
        return [head(level) for level, pair in zip((n3, n4, n5), (0, 2, 4), strict=True)
                for head in self.heads[pair : pair + 2]]  # fmt: skip


def lenet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.AvgPool2d(2))


def cifar_resnet(n: int) -> nn.Module:
    """ResNet-(6n+2) for 32 x 32, its shortcuts left out: they convolve nothing."""
    layers: list[nn.Module] = [conv(3, 16)]
    for stage, c in enumerate((16, 32, 64)):
        for i in range(n):
            before, step = (c // 2, 2) if stage > 0 and i == 0 else (c, 1)
            layers += [conv(before, c, 3, step), conv(c, c)]
    return nn.Sequential(*layers)


OWN: dict[str, Callable[[], nn.Module]] = {
    "rrdb": rrdb,
    "edsr_baseline": lambda: edsr(64, 16),
    "edsr": lambda: edsr(256, 32),
    "dncnn": lambda: plain(64, 17),
    "vdsr": lambda: plain(64, 20, 3),
    "srcnn": srcnn,
    "fsrcnn": fsrcnn,
    "cyclegan": cyclegan,
    "patchgan": discriminator,
    "chess_192x15": lambda: board(112, 192, 15),
    "chess_256x20": lambda: board(112, 256, 20),
    "go_256x19": lambda: board(17, 256, 19),
    "unet_2015": UNet,
    "yolov8n": lambda: YOLOv8(0.25, 1 / 3, 1024),
    "yolov8s": lambda: YOLOv8(0.5, 1 / 3, 1024),
    "yolov8m": lambda: YOLOv8(0.75, 2 / 3, 768),
    "lenet5": lenet,
    "resnet20_cifar": lambda: cifar_resnet(3),
    "resnet56_cifar": lambda: cifar_resnet(9),
}
