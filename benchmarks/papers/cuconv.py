"""cuConv's survey: every stride-1 convolution of five networks, at seven batch sizes, against every cuDNN algorithm.

The networks are those of their papers at 224 x 224 (AlexNet at 227), as the source counts them: each configuration
once, GoogLeNet without the projections behind its pools. The source reports 602 configurations; these are 88 layers at
seven batch sizes, 616: which of them it left out is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.papers import Options
from fastconv.models.layers import Layer

BATCHES = (1, 8, 16, 32, 64, 128, 256)
CLASSES = ("ieee", "fp32")
LAYOUTS = ("nchw", "nhwc")
COUNTED = ("832->384 @7x7 1x1", "480->192 @14x14 1x1", "512->512 @7x7 3x3", "128->128 @28x28 3x3")  # of `counters`


def _layer(c: int, size: int, k: int, kernel: int) -> Layer:
    name = f"{c}->{k} @{size}x{size} {kernel}x{kernel}"
    return Layer(name, c, size, size, k, kernel, kernel, 1, kernel // 2)


def _googlenet() -> list[Layer]:
    found = [_layer(64, 56, 64, 1), _layer(64, 56, 192, 3)]
    # Size, input, filters: 1x1, before the 3x3, 3x3, before the 5x5, 5x5.
    modules = [
        (28, 192, 64, 96, 128, 16, 32),
        (28, 256, 128, 128, 192, 32, 96),
        (14, 480, 192, 96, 208, 16, 48),
        (14, 512, 160, 112, 224, 24, 64),
        (14, 512, 128, 128, 256, 24, 64),
        (14, 512, 112, 144, 288, 32, 64),
        (14, 528, 256, 160, 320, 32, 128),
        (7, 832, 256, 160, 320, 32, 128),
        (7, 832, 384, 192, 384, 48, 128),
    ]
    for size, c, one, before_three, three, before_five, five in modules:
        found += [_layer(c, size, k, 1) for k in (one, before_three, before_five)]
        found += [_layer(before_three, size, three, 3), _layer(before_five, size, five, 5)]
    return found


def _squeezenet() -> list[Layer]:
    # Fire modules: size, input, filters of the squeezing layer, of each expanding one.
    fires = [(55, 96, 16, 64), (55, 128, 16, 64), (55, 128, 32, 128), (27, 256, 32, 128)]
    fires += [(27, 256, 48, 192), (27, 384, 48, 192), (27, 384, 64, 256), (13, 512, 64, 256)]
    found = []
    for size, c, squeeze, expand in fires:
        found += [_layer(c, size, squeeze, 1), _layer(squeeze, size, expand, 1), _layer(squeeze, size, expand, 3)]
    return [*found, _layer(512, 13, 1000, 1)]


def _resnet50() -> list[Layer]:
    found = [_layer(64, 56, 64, 1)]
    for size, width in ((56, 64), (28, 128), (14, 256), (7, 512)):
        found += [_layer(width, size, width, 3), _layer(width, size, 4 * width, 1), _layer(4 * width, size, width, 1)]
    return found


def _once(layers: list[Layer]) -> list[Layer]:
    return list(dict.fromkeys(layers))


NETWORKS = {
    "googlenet": _once(_googlenet()),
    "squeezenet": _once(_squeezenet()),
    "alexnet": [_layer(96, 27, 256, 5), _layer(256, 13, 384, 3), _layer(384, 13, 384, 3), _layer(384, 13, 256, 3)],
    "vgg19": [
        _layer(c, size, k, 3)
        for c, size, k in (
            (3, 224, 64), (64, 224, 64), (64, 112, 128), (128, 112, 128), (128, 56, 256), (256, 56, 256),
            (256, 28, 512), (512, 28, 512), (512, 14, 512),
        )
    ],
    "resnet50": _resnet50(),
}  # fmt: skip
LAYERS = _once([layer for its in NETWORKS.values() for layer in its])


def _chosen(options: Options, otherwise: Sequence[str]) -> list[Layer]:
    """The layers that begin as the options say, or else as `otherwise` does."""
    names = options.layers.split(",") if options.layers else otherwise
    return [layer for layer in LAYERS if any(layer.layer.startswith(name) for name in names)]


def survey(options: Options) -> dict[str, Any]:
    """All layers and batches, or some of them; small batches first."""
    from benchmarks.layers import suite

    document = suite.run(
        options.batches or BATCHES,
        options.classes or CLASSES,
        _chosen(options, ("",)),
        rounds=options.rounds,
        budget_s=options.budget_s,
        device=options.device,
        layouts=LAYOUTS,
        resume=options.resume,
        workers=options.workers,
        survey=True,
        **options.file("papers/cuconv/survey"),
    )
    return document


def counters(options: Options) -> dict[str, Any]:
    """Hardware counters of the two kernels of two_stage, and of cuDNN's rival by PyTorch, in NCHW; of a GPU alone."""
    from benchmarks.studies import counters as hardware

    return hardware.run(
        _chosen(options, COUNTED),
        options.batches[0] if options.batches else 1, options.classes or CLASSES[:1], ("two_stage", "torch"),
        layout="nchw", budget_s=options.budget_s, resume=options.resume, report=options.report,
        **options.file("papers/cuconv/counters"),
    )  # fmt: skip


PARTS = {"survey": survey, "counters": counters}
GPU_PARTS = ("counters",)
