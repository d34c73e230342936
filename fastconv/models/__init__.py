"""The networks of the demo and of the benchmarks, with the inputs on which the literature measures them.

Weights are random but seeded: what is shown is that a swapped network computes what the unswapped one does, and how
fast; not that it recognises anything. Batch-norm statistics are taken from real photographs, so that activations have
the sizes and signs of a trained network's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .photographs import photographs
from .unet import UNet
from .yolov3 import ANCHORS_PER_SCALE, YOLOv3

__all__ = [
    "MAIN_NETWORKS",
    "NETWORKS",
    "Network",
    "UNet",
    "YOLOv3",
    "build",
    "calibrate_",
    "class_scores",
    "flatten_output",
    "network",
    "photographs",
    "seeded",
]

CALIBRATION_PICTURES = 4


@dataclass(frozen=True)
class Network:
    """A network that can be built: `image` is the side of its square input, of which it takes multiples of
    `image_step`, `batch` the paper's."""

    name: str
    image: int
    batch: int
    make: Callable[[], nn.Module]
    image_step: int = 1


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        try:
            from torchvision.models import get_model
        except ImportError as error:
            raise ImportError(f"{name} needs torchvision: pip install 'fastconv[bench]'") from error
        # DenseNet's memory-efficient mode, Inception's side outputs and the like stay off: defaults only.
        return get_model(name, weights=None)

    return make


NETWORKS: dict[str, Network] = {
    entry.name: entry
    for entry in (
        Network("vgg16", 224, 64, _torchvision("vgg16")),
        Network("resnet50", 224, 64, _torchvision("resnet50")),
        Network("densenet161", 224, 48, _torchvision("densenet161")),
        Network("yolov3", 416, 64, YOLOv3, image_step=32),
        # What the benchmark of training steps runs beside the first two.
        Network("densenet121", 224, 64, _torchvision("densenet121")),
        Network("unet", 128, 32, UNet, image_step=16),
        # What the fourth source times at batch 1 beside ResNet-50 and ResNet-18.
        Network("resnet34", 224, 64, _torchvision("resnet34")),
        Network("resnet101", 224, 64, _torchvision("resnet101")),
        Network("resnet152", 224, 64, _torchvision("resnet152")),
        # Small ones, for tests and for a first look.
        Network("resnet18", 224, 64, _torchvision("resnet18")),
        Network("squeezenet1_1", 224, 64, _torchvision("squeezenet1_1")),
    )
}
MAIN_NETWORKS = ("vgg16", "resnet50", "densenet161", "yolov3")


def network(name: str, image: int | None = None) -> Network:
    """The registry's entry. Raises ValueError naming the known networks, or what `image` has to be a multiple of."""
    if name not in NETWORKS:
        raise ValueError(f"network is {name!r}; expected one of {', '.join(NETWORKS)}")
    entry = NETWORKS[name]
    if image is not None and image % entry.image_step != 0:
        raise ValueError(f"image is {image}; {name} expected a multiple of {entry.image_step}")
    return entry


def build(name: str, *, seed: int = 0, calibrate: bool = True, image: int | None = None) -> nn.Module:
    """The network in eval mode, float32, on the CPU; equal for equal arguments. The global random state is left alone.

    calibrate: take batch-norm statistics from photographs of `image` x `image` (default: the network's own size).
    """
    entry = network(name, image)
    model = seeded(entry, seed)
    if calibrate:
        calibrate_(model, photographs(CALIBRATION_PICTURES, image or entry.image, seed=seed + 1))
    return model.eval()


def seeded(entry: Network, seed: int = 0) -> nn.Module:
    """The entry's network, its weights by `seed` alone; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return entry.make()


@torch.no_grad()
def calibrate_(model: nn.Module, pictures: Tensor) -> None:
    """Sets every batch norm's running statistics to those of one forward pass over `pictures`; leaves eval mode on."""
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average: of one pass, its own statistics
        norm.train()
    model(pictures)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def flatten_output(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Everything a network returned, one row per picture: [N, values]."""
    outputs = (output,) if isinstance(output, Tensor) else output
    return torch.cat([tensor.flatten(1) for tensor in outputs], dim=1)


def class_scores(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Class scores, one row per decision: [N, decisions, classes].

    A classifier decides once per picture; YOLOv3 once per anchor and cell, on the last `classes` of its 5 + classes.
    """
    if isinstance(output, Tensor):
        return output.flatten(1)[:, None]
    scales = [tensor.unflatten(1, (ANCHORS_PER_SCALE, -1))[:, :, 5:].flatten(3) for tensor in output]  # [N, 3, K, HW]
    return torch.cat([scores.transpose(2, 3).flatten(1, 2) for scores in scales], dim=1)
