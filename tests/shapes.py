"""The one table of shapes: every test that iterates the registry iterates this, odd sizes first.

A shape that a table like this lacks is a bug that a user finds: add the shape of every bug here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A convolution: input [n, c, h, w], weight [k, c/groups, r, s]."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def p(self) -> int:
        """Output height."""
        return (self.h + 2 * self.padding[0] - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1

    @property
    def q(self) -> int:
        """Output width."""
        return (self.w + 2 * self.padding[1] - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1

    @property
    def terms(self) -> int:
        """Products summed per output element."""
        return self.c // self.groups * self.r * self.s

    def with_batch(self, n: int) -> Shape:
        return replace(self, n=n)

    def __str__(self) -> str:
        text = f"{self.n}x{self.c}x{self.h}x{self.w} -> {self.k}, {self.r}x{self.s}"
        for name in ("stride", "padding", "dilation"):
            value = getattr(self, name)
            if value != ((0, 0) if name == "padding" else (1, 1)):
                text += f" {name} {value[0]}x{value[1]}"
        return text + (f" groups {self.groups}" if self.groups != 1 else "")


def _square(n: int, c: int, hw: int, k: int, r: int, **arguments: object) -> Shape:
    pairs = {name: (value, value) for name, value in arguments.items() if name != "groups"}
    return Shape(n, c, hw, hw, k, r, r, **pairs, groups=arguments.get("groups", 1))  # type: ignore[arg-type]


# 3x3, stride 1: what every Winograd kernel serves too.
UNIT_3X3 = [
    _square(1, 1, 3, 1, 3),  # one output element
    _square(1, 1, 1, 1, 3, padding=1),  # the input is smaller than the kernel
    Shape(1, 3, 1, 7, 5, 3, 3, padding=(1, 1)),  # one row
    Shape(3, 5, 7, 2, 1, 3, 3, padding=(1, 1)),  # W below the kernel, K = 1
    Shape(2, 3, 13, 7, 5, 3, 3, padding=(0, 1)),
    _square(1, 5, 7, 5, 3, padding=2),
    Shape(1, 8, 5, 6, 8, 3, 3, padding=(2, 0)),
    _square(3, 1, 33, 5, 3, padding=1),
    Shape(1, 3, 65, 13, 4, 3, 3, padding=(1, 1)),
    _square(2, 17, 14, 19, 3, padding=1),  # neither C nor K a multiple of anything
    # More filters than a block's 64, and vectors of them; several blocks of rows and columns, none of them whole.
    Shape(2, 16, 17, 31, 72, 3, 3, padding=(1, 1)),
    Shape(1, 16, 3, 1, 72, 3, 3, padding=(1, 1)),  # one column: most columns of the only tile do not exist
    Shape(2, 20, 9, 13, 130, 3, 3, padding=(1, 1)),  # more than 128 filters, which two blocks may share
    _square(0, 3, 7, 5, 3, padding=1),  # an empty batch
]

POINTWISE = [
    _square(1, 1, 1, 1, 1),
    Shape(3, 5, 7, 13, 1, 1, 1),
    _square(2, 3, 13, 5, 1),
    _square(1, 33, 7, 65, 1),
    _square(2, 5, 13, 3, 1, stride=2),
    _square(1, 3, 7, 5, 1, padding=1),
    _square(1, 24, 14, 40, 1),
    _square(0, 4, 5, 4, 1),
    _square(1, 70, 7, 100, 1),  # few pixels, many filters: tiles of direct_tiled's kernel for 1x1, none of them whole
    Shape(3, 66, 3, 11, 33, 1, 1, stride=(2, 1)),
]

DEPTHWISE = [
    _square(2, 5, 7, 5, 1, groups=5),  # 1x1 depthwise: a scaling of each channel
    Shape(3, 3, 1, 13, 3, 1, 1, groups=3),
    _square(1, 1, 33, 1, 1),
    _square(1, 8, 13, 8, 1, groups=8, dilation=2),
    _square(2, 5, 13, 5, 3, groups=5, padding=1),
    _square(1, 3, 7, 6, 3, groups=3, padding=1),  # two filters a channel
    _square(1, 8, 14, 8, 5, groups=8, padding=2, stride=2),
    _square(2, 33, 15, 33, 3, groups=33, padding=1, stride=2),  # more channels than a warp has lanes
    Shape(1, 34, 9, 16, 34, 3, 3, groups=34, padding=(0, 1)),
    _square(1, 34, 16, 34, 7, groups=34, padding=3),
    _square(2, 10, 23, 10, 3, groups=10, padding=1, stride=2),  # two channels a thread: strips that end within the map
    Shape(3, 6, 31, 12, 6, 5, 5, groups=6, padding=(2, 1)),
    Shape(2, 66, 29, 9, 66, 7, 7, groups=66, padding=(3, 3), stride=(2, 2)),
]

GENERAL = [
    _square(1, 3, 7, 5, 2),
    _square(2, 1, 13, 3, 2, stride=2),
    _square(1, 5, 13, 1, 3, stride=2, padding=1),
    _square(1, 3, 13, 5, 3, padding=1, dilation=2),
    Shape(1, 3, 13, 33, 5, 3, 3, (2, 1), (1, 2), (1, 2)),
    _square(1, 3, 13, 4, 4),
    _square(1, 3, 7, 5, 4, stride=3, padding=2),
    _square(2, 3, 13, 5, 5, padding=2),
    _square(1, 1, 7, 3, 5, stride=2),
    _square(1, 3, 33, 5, 7, stride=2, padding=3),
    _square(2, 1, 13, 3, 7),
    _square(1, 5, 3, 3, 7, padding=3),  # the input is smaller than the kernel
    Shape(1, 3, 7, 13, 5, 1, 5, padding=(0, 2)),  # rectangular kernels
    Shape(2, 4, 13, 7, 5, 5, 1, (1, 2), (2, 0)),
    Shape(1, 3, 7, 13, 5, 3, 2),
    Shape(1, 3, 9, 9, 4, 2, 7, (1, 1), (0, 3)),
    _square(1, 3, 13, 2, 6, stride=2),  # a kernel size that is a template constant nowhere
    _square(2, 6, 7, 4, 3, groups=2, padding=1),
    _square(1, 12, 7, 9, 1, groups=3),
    Shape(1, 6, 1, 65, 4, 1, 3, groups=2, padding=(0, 1)),
    _square(0, 3, 13, 5, 5, padding=2),
    _square(1, 3, 7, 5, 3, padding=4),  # padding beyond the kernel: rows of zeros alone
]

LARGER = [
    _square(1, 64, 14, 64, 3, padding=1),
    _square(2, 32, 17, 16, 3, padding=1),
    _square(1, 64, 14, 64, 1),
    _square(2, 40, 13, 96, 1),  # tiles of 96 filters
    _square(1, 72, 9, 192, 3, padding=1),
    _square(1, 516, 14, 36, 1),  # its sum is divided among the blocks of a cluster, and the last has less of it
    Shape(2, 1028, 5, 10, 136, 1, 1),
    _square(1, 16, 14, 32, 3, stride=2, padding=1),
    _square(1, 8, 28, 16, 5, padding=2),
    _square(1, 512, 7, 8, 3, padding=1),  # a long reduction
    _square(2, 3, 33, 65, 7, stride=2, padding=3),  # first layers: few channels, many filters
    Shape(5, 1, 1025, 5, 33, 3, 3, padding=(1, 1)),  # more tiles of outputs than a GPU has room for blocks
]

# Few filters of many channels: lanes without a channel, and outputs and filters beyond the last.
FEW_FILTERS = [
    _square(2, 33, 13, 3, 3, padding=1),
    Shape(1, 64, 5, 19, 1, 3, 3, padding=(1, 0)),
    Shape(3, 50, 7, 9, 4, 3, 3, padding=(2, 1)),
    _square(1, 16, 9, 4, 5, padding=2),
    Shape(1, 40, 17, 6, 2, 7, 7, padding=(3, 6)),
    _square(1, 130, 6, 2, 5, padding=4),
    _square(0, 33, 7, 3, 3, padding=1),  # an empty batch
    _square(3, 20, 90, 3, 3, padding=1),  # a map on which the kernel for them is the cheapest in NCHW, too
]

# Narrow maps, more of them than a GPU has multiprocessors.
NARROW = [
    Shape(133, 8, 3, 14, 8, 3, 3, padding=(1, 1)),
    Shape(133, 136, 14, 14, 8, 3, 3, padding=(1, 1)),
    Shape(134, 8, 15, 9, 72, 3, 3, padding=(0, 1)),  # more rows than 14, more filters than 64
    Shape(133, 8, 4, 15, 8, 3, 3, padding=(2, 2)),
    Shape(267, 8, 7, 7, 72, 3, 3, padding=(1, 1)),
    Shape(530, 8, 9, 5, 8, 3, 3, padding=(1, 0)),
    Shape(70, 8, 26, 26, 72, 3, 3, padding=(1, 1)),  # tiles of two images in an item of winograd_fused
    Shape(17, 8, 52, 51, 8, 3, 3, padding=(1, 1)),
    Shape(50, 8, 12, 27, 72, 3, 3, padding=(1, 1)),  # its fp32 items in two strips of 4 rows, of 64 filters in clusters
    Shape(88, 12, 6, 20, 136, 3, 3, padding=(0, 2)),  # likewise: strips of 6 columns of tiles
]
# The same on a GPU alone, for a CPU too large.
CROWDED = [
    Shape(150, 52, 30, 31, 66, 3, 3, padding=(1, 1)),  # V of winograd_fused's fp32 items serves two blocks of filters
    Shape(64, 100, 14, 13, 72, 3, 3, padding=(1, 1)),  # its fp32 work tiles of 128 filters in clusters
    Shape(53, 36, 12, 20, 72, 3, 3, padding=(1, 1)),  # likewise, in two strips of 4 rows
]

# First layers: up to four channels, whose pairs may straddle pixels; filters and outputs that fill no tile.
FIRST_LAYERS = [
    _square(2, 1, 21, 48, 5, padding=2),
    _square(1, 1, 41, 7, 7, stride=2, padding=3),
    Shape(1, 2, 20, 37, 96, 3, 3, padding=(1, 1)),
    Shape(2, 4, 23, 25, 200, 3, 3, (2, 2), (1, 1)),
    Shape(1, 3, 45, 47, 96, 11, 11, (4, 4), (2, 2)),
    _square(1, 3, 14, 7, 3, stride=3),
    Shape(2, 3, 31, 30, 32, 3, 3, (1, 2), (2, 1), (2, 1)),
    Shape(1, 3, 30, 31, 33, 3, 3, (2, 2), (2, 2), (2, 2)),  # an even stride, but taps that are no neighbours
    Shape(1, 3, 3, 5, 64, 7, 7, (2, 2), (3, 3)),  # smaller than the kernel, and than a tile
    Shape(1, 3, 40, 64, 64, 1, 7, (1, 2), (0, 3)),
    _square(0, 3, 16, 64, 7, stride=2, padding=3),  # an empty batch
]

# More weights than outputs: reductions in many splits, on clusters of blocks and through memory.
WEIGHT_BOUND = [
    _square(2, 264, 4, 328, 3, padding=1),
    Shape(1, 520, 7, 5, 136, 3, 3, padding=(1, 1)),
    Shape(1, 328, 3, 5, 131, 3, 3, padding=(1, 0)),  # y is no whole vectors of 16 bytes, nor of 4 values
    _square(3, 1032, 7, 136, 1),
]

SMALL = [*UNIT_3X3, *POINTWISE, *DEPTHWISE, *GENERAL]
SHAPES = [*SMALL, *FEW_FILTERS, *FIRST_LAYERS, *WEIGHT_BOUND, *LARGER]

# A few small ones that touch every tail: what compute-sanitizer can afford.
SANITIZE = [UNIT_3X3[1], UNIT_3X3[4], UNIT_3X3[9], POINTWISE[1], POINTWISE[4], DEPTHWISE[0], DEPTHWISE[4], GENERAL[4],
            GENERAL[9], GENERAL[12], GENERAL[17], FEW_FILTERS[3], FIRST_LAYERS[4]]  # fmt: skip
