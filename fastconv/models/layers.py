"""The layer sets: the convolutions of well-known networks, by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Layer:
    """A convolution [N, c, h, w] x [k, c/groups, r, s]; the batch N comes with the suite."""

    layer: str
    c: int
    h: int
    w: int
    k: int
    r: int = 3
    s: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def p(self) -> int:
        return (self.h + 2 * self.padding - self.dilation * (self.r - 1) - 1) // self.stride + 1

    @property
    def q(self) -> int:
        return (self.w + 2 * self.padding - self.dilation * (self.s - 1) - 1) // self.stride + 1

    def direct_flops(self, n: int) -> float:
        """Twice the multiply-adds of the direct algorithm."""
        return 2.0 * n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    def fields(self) -> dict[str, Any]:
        """This layer's part of a result row."""
        return asdict(self)


LAYERS = [
    Layer("vgg1_1", 3, 224, 224, 64),
    Layer("vgg1_2", 64, 224, 224, 64),
    Layer("vgg2_1", 64, 112, 112, 128),
    Layer("vgg2_2", 128, 112, 112, 128),
    Layer("vgg3_1", 128, 56, 56, 256),
    Layer("vgg3_2", 256, 56, 56, 256),
    Layer("vgg4_1", 256, 28, 28, 512),
    Layer("vgg4_2", 512, 28, 28, 512),
    Layer("vgg5", 512, 14, 14, 512),
    Layer("res1", 64, 56, 56, 64),
    Layer("res2", 128, 28, 28, 128),
    Layer("res3", 256, 14, 14, 256),
    Layer("res4", 512, 7, 7, 512),
    Layer("yolo1", 32, 208, 208, 64),
    Layer("yolo2", 64, 104, 104, 128),
    Layer("yolo3", 128, 52, 52, 256),
    Layer("yolo4", 256, 26, 26, 512),
    Layer("yolo5", 512, 13, 13, 1024),
    Layer("dense1", 192, 56, 56, 48),
    Layer("dense2", 192, 28, 28, 48),
    Layer("dense3", 192, 14, 14, 48),
    Layer("dense4", 192, 7, 7, 48),
]


def _square(layer: str, c: int, size: int, k: int, kernel: int, stride: int = 1, groups: int = 1) -> Layer:
    """A square map and kernel, padded by half of it."""
    return Layer(layer, c, size, size, k, kernel, kernel, stride, kernel // 2, 1, groups)


SETS: dict[str, list[Layer]] = {
    "layers": LAYERS,  # 3x3 with stride 1: what every published comparison times
    "pointwise": [  # 1x1: ResNet-50's bottlenecks in and out, DenseNet-161's layers and transitions
        _square("res1_in", 256, 56, 64, 1),
        _square("res1_out", 64, 56, 256, 1),
        _square("res2_in", 512, 28, 128, 1),
        _square("res2_out", 128, 28, 512, 1),
        _square("res3_in", 1024, 14, 256, 1),
        _square("res3_out", 256, 14, 1024, 1),
        _square("res4_in", 2048, 7, 512, 1),
        _square("res4_out", 512, 7, 2048, 1),
        _square("dense1_in", 240, 56, 192, 1),
        _square("dense2_in", 576, 28, 192, 1),
        _square("dense3_in", 1248, 14, 192, 1),
        _square("dense4_in", 1632, 7, 192, 1),
        _square("dense1_next", 384, 56, 192, 1),
        _square("dense3_next", 2112, 14, 1056, 1),
    ],
    "strided": [  # ResNet-50's 3x3 and its shortcuts, YOLOv3's downsampling
        _square("res2_down", 128, 56, 128, 3, 2),
        _square("res3_down", 256, 28, 256, 3, 2),
        _square("res4_down", 512, 14, 512, 3, 2),
        _square("res2_short", 256, 56, 512, 1, 2),
        _square("res3_short", 512, 28, 1024, 1, 2),
        _square("res4_short", 1024, 14, 2048, 1, 2),
        _square("yolo1_down", 32, 416, 64, 3, 2),
        _square("yolo3_down", 128, 104, 256, 3, 2),
        _square("yolo5_down", 512, 26, 1024, 3, 2),
    ],
    "stems": [  # the first layers of ResNet, DenseNet-161, AlexNet and GoogLeNet; 5x5 and 7x7 further in
        _square("resnet", 3, 224, 64, 7, 2),
        _square("densenet", 3, 224, 96, 7, 2),
        Layer("alexnet1", 3, 224, 224, 64, 11, 11, 4, 2),
        _square("alexnet2", 64, 27, 192, 5),
        _square("inception3", 32, 28, 96, 5),
        _square("inception5", 48, 7, 128, 5),
    ],
    "groups": [  # depthwise: MobileNetV2, EfficientNet-B0, ConvNeXt-T; grouped: ResNeXt-50
        _square("mobile2", 96, 112, 96, 3, 2, 96),
        _square("mobile3", 144, 56, 144, 3, 1, 144),
        _square("mobile5", 576, 14, 576, 3, 1, 576),
        _square("efficient5", 672, 14, 672, 5, 1, 672),
        _square("convnext1", 96, 56, 96, 7, 1, 96),
        _square("convnext3", 384, 14, 384, 7, 1, 384),
        _square("resnext1", 128, 56, 128, 3, 1, 32),
        _square("resnext3", 512, 14, 512, 3, 1, 32),
    ],
    "lenet5": [  # the two layers of the modified LeNet-5 that the fifth source times (docs/concepts/algorithms.md)
        Layer("lenet1", 1, 86, 86, 4, 7, 7, 1, 0),
        Layer("lenet2", 4, 40, 40, 16, 7, 7, 1, 0),
    ],
    "narrow": [  # few channels on one side: pictures, latents and maps of them going in and out; HRNet's own
        Layer("grey_in", 1, 512, 512, 64),
        Layer("complex_in", 2, 320, 320, 32),
        Layer("yolo_in", 3, 416, 416, 32),
        Layer("latent_in", 4, 64, 64, 320),
        Layer("picture_out", 64, 512, 512, 3),
        Layer("latent_out", 320, 64, 64, 4),
        _square("mask_out", 64, 512, 2, 1),
        Layer("hrnet18", 18, 56, 56, 18),
        Layer("hrnet36", 36, 28, 28, 36),
    ],
    "ragged": [  # maps that no tile divides: of crops of 513, of odd pictures, of convolutions without padding
        Layer("map57", 64, 57, 57, 64),
        Layer("map129", 64, 129, 129, 64),
        Layer("map113", 64, 113, 113, 64),
        Layer("map65", 128, 65, 65, 128),
        Layer("map73", 128, 73, 73, 128),
        Layer("map33", 256, 33, 33, 256),
        Layer("map37", 192, 37, 37, 192),
        Layer("map85", 96, 85, 85, 96),
        Layer("map92", 64, 92, 92, 128, padding=0),
        Layer("map50", 128, 50, 50, 128, padding=0),
    ],
    "deep": [  # more filter than map: the innermost layers of Stable Diffusion's U-Net and of others
        Layer("sd_8", 1280, 8, 8, 1280),
        Layer("sd_8_up", 2560, 8, 8, 1280),
        Layer("sd_16", 1280, 16, 16, 1280),
        _square("sd_8_short", 2560, 8, 1280, 1),
        Layer("c512_4", 512, 4, 4, 512),
        Layer("c1024_4", 1024, 4, 4, 1024),
        Layer("c2048_4", 2048, 4, 4, 2048),
        Layer("c512_8", 512, 8, 8, 512),
        Layer("c1024_8", 1024, 8, 8, 1024),
        Layer("c512_16", 512, 16, 16, 512),
    ],
    "sequences": [  # nn.Conv1d: wav2vec 2.0 on a second of sound, and causal layers, whose input is padded before
        Layer("wav2vec0", 1, 1, 16000, 512, 1, 10, 5, 0),
        Layer("wav2vec1", 512, 1, 3199, 512, 1, 3, 2, 0),
        Layer("wav2vec5", 512, 1, 199, 512, 1, 2, 2, 0),
        Layer("causal3", 256, 1, 4098, 256, 1, 3, 1, 0),
        Layer("causal3_d8", 256, 1, 4112, 256, 1, 3, 1, 0, 8),
        Layer("causal7", 64, 1, 16006, 64, 1, 7, 1, 0),
    ],
    # nn.ConvTranspose2d: U-Net's, 2x2, and DCGAN's, 4x4, each as the convolution whose input gradient it is: c, h and w
    # are of its output. A layer flips and packs its filter in every call, as that pass does, frozen or not.
    "transposed": [
        Layer("unet_up1", 512, 64, 64, 1024, 2, 2, 2, 0),
        Layer("unet_up2", 256, 128, 128, 512, 2, 2, 2, 0),
        Layer("unet_up4", 64, 512, 512, 128, 2, 2, 2, 0),
        Layer("dcgan2", 512, 8, 8, 1024, 4, 4, 2, 1),
        Layer("dcgan4", 128, 32, 32, 256, 4, 4, 2, 1),
        Layer("dcgan5", 3, 64, 64, 128, 4, 4, 2, 1),
    ],
}


def select(names: str | list[str] | None = None, layer_set: str = "layers") -> list[Layer]:
    """The layers of a set whose names start with one of `names` ("vgg", "res1", or a comma-separated list); None: all.

    Raises ValueError if a name matches nothing, or there is no such set.
    """
    if layer_set not in SETS:
        raise ValueError(f"layer_set is {layer_set!r}; expected one of {', '.join(SETS)}")
    layers = SETS[layer_set]
    if names is None:
        return list(layers)
    wanted = names.split(",") if isinstance(names, str) else list(names)
    for name in wanted:
        if not any(layer.layer.startswith(name) for layer in layers):
            known = ", ".join(layer.layer for layer in layers)
            raise ValueError(f"layers: {name!r} matches none of {known}")
    return [layer for layer in layers if any(layer.layer.startswith(name) for name in wanted)]
