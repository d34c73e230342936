"""The Winograd megakernel: its series of layers, and its networks in which only the 3x3 layers are exchanged.

layers    all 22 layers, not only the wide ones: against its own tasks in series, which have the same products and the
          same type of M, against winograd_f4, cuDNN's non-fused Winograd and PyTorch; at batch 1 to 128
mapping   D_IG, D_GO and M, one at a time, on four layers of ResNet; --batch
distribution  the tasks over time on three layers, as mapped and in series; --batch
resnet2   ResNet's 3x3 layer with 64 channels against every algorithm of ours and every rival, Triton's implicit GEMM
          among them
filters   its filters transformed beforehand, by a kernel in front of each call, or by tasks of the kernel; --batch
counters  bytes, hit rates and instructions of three layers, by map and against winograd_f4 (Nsight Compute)
networks  VGG-16, ResNet-50, YOLOv3, DenseNet-161 at 224x224, batch 64 (DenseNet 48), class ieee: the 3x3 layers with
          stride 1 by the megakernel, the rest PyTorch's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.runs import deadline_of, seconds_to
from benchmarks.layers import suite as layer_suite
from benchmarks.papers import Options
from benchmarks.papers import networks as paper_networks
from benchmarks.studies import counters as hardware
from benchmarks.studies import megakernel as study
from fastconv.models.layers import LAYERS, select

CLASSES, HALF_CLASSES = ("ieee", "fp32"), ("fp16",)
NETWORK_CLASSES, RESNET2_CLASSES = ("ieee",), ("ieee", "fp32", "tf32")
RESNET2 = "res1"
COUNTED = "vgg2_2,vgg4_2,res3"
NETWORKS = ("vgg16", "resnet50", "yolov3", "densenet161")
IMAGE, BATCH = 224, 64
BATCHES = (BATCH, 1, 128, 8, 32, 2, 16, 4)  # the source's first; then what is between them closer and closer
STUDY_S = 600.0  # of the study, unless another budget is given
ALGORITHM = study.NAME  # serves 3x3 layers with stride 1, and no others


def layers(options: Options) -> results.Document:
    """The series, for each batch; in FP16 at the first."""
    return _studied("layers", options, BATCHES, HALF_CLASSES)


def filters(options: Options) -> results.Document:
    """Where filters are transformed, for each batch."""
    return _studied("filters", options, (BATCH, 1))


def mapping(options: Options) -> results.Document:
    """Other distances and other M, on layers of its own."""
    return _studied("mapping", options, (BATCH,))


def distribution(options: Options) -> results.Document:
    """How many tasks of each kind run at a time, on layers of its own."""
    return _studied("distribution", options, (BATCH,))


def _studied(
    part: str, options: Options, batches: Sequence[int], at_first: Sequence[str] = ()
) -> results.Document:  # fmt: skip
    """Each batch in CLASSES; at_first: classes of the first batch alone. The options' own come before either."""
    batches = options.batches or batches
    runs = [(batch, options.classes or CLASSES) for batch in batches]
    runs += [(batches[0], at_first)] if at_first and not options.classes else []
    names = options.layers or ",".join(layer.layer for layer in LAYERS)
    document: results.Document = {}
    deadline = deadline_of(STUDY_S if options.budget_s is None else options.budget_s)
    for batch, classes in runs:
        document = study.run(
            (part,), layers=names, classes=classes, batch=batch, rounds=options.rounds,
            budget_s=seconds_to(deadline) or 0.0, resume=options.resume, report=options.report,
            **options.file("papers/megakernel/layers"),
        )  # fmt: skip
    return document


def counters(options: Options) -> results.Document:
    """A row per layer, class, algorithm and map."""
    return hardware.run(
        options.layers or COUNTED, options.batches[0] if options.batches else BATCH, options.classes or CLASSES,
        (study.NAME, study.STAGED), budget_s=options.budget_s, resume=options.resume, report=options.report,
        **options.file("papers/megakernel/counters"),
    )  # fmt: skip


def resnet2(options: Options) -> results.Document:
    """A row per class and layout of ours."""
    return layer_suite.run(
        options.batches or (BATCH,), options.classes or RESNET2_CLASSES, select(RESNET2), rounds=options.rounds,
        budget_s=options.budget_s, device=options.device, layouts=("nchw", "nhwc"), resume=options.resume, triton=True,
        packs=True, **options.file("papers/megakernel/resnet2"),
    )  # fmt: skip


def networks(options: Options) -> results.Document:
    """A row per network and class."""
    return paper_networks.run(
        options, "papers/megakernel/networks", options.networks or NETWORKS, options.classes or NETWORK_CLASSES,
        modes=("eager",), peers=("torch_eager",), layouts=("nchw",), algorithm=ALGORITHM,
        batch=options.batches[0] if options.batches else None, image=options.image or IMAGE,
    )  # fmt: skip


PARTS: dict[str, Any] = {
    "layers": layers,
    "mapping": mapping,
    "distribution": distribution,
    "filters": filters,
    "counters": counters,
    "resnet2": resnet2,
    "networks": networks,
}
GPU_PARTS = ("layers", "mapping", "distribution", "filters", "counters")
