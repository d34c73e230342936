"""The LeNet-5 ladder: its two layers, 7x7 filters on 86x86 and 40x40, rung by rung; and the network, trained and
classified by each rung.

layers   both layers at batch 100 to 10 000 by every algorithm of ours, on the GPU by the source's rungs, too
         (benchmarks/studies/ladder.py); on the CPU the source's first rung
network  LeNet-5 trained by PyTorch on scikit-learn's digits, enlarged to 86x86; then each rung computes its
         convolutions: how many of the test images are classified rightly, beside PyTorch's. The network of the
         source is of Fashion-MNIST, which no well-kept package ships
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import fastconv
from benchmarks.harness import ours, results, turns
from benchmarks.harness.runs import deadline_of, is_past
from benchmarks.layers import suite as layer_suite
from benchmarks.papers import Options
from benchmarks.studies import ladder
from fastconv import timing
from fastconv.models.compare import agreement, precision_of, pytorch_class
from fastconv.models.layers import select

BATCHES = (100, 1000, 5000, 10000)
CLASSES, CPU_CLASSES = ("ieee", "fp32", "fp16"), ("ieee",)
RUNGS = ("direct", "direct_tiled", "im2col_gemm", "fused_unroll", "two_stage", "implicit_gemm")
SIZE = 86
TEST_IMAGES = 450  # of the 1797
CONVOLUTIONS = 2
EPOCHS, BATCH, RATE = 3, 32, 1e-3
KEY = ("network", "batch", "class", "mode")


def layers(options: Options) -> results.Document:
    """Both layers, NCHW as in the source."""
    on_gpu = options.device.startswith("cuda")
    return layer_suite.run(
        options.batches or BATCHES, options.classes or (CLASSES if on_gpu else CPU_CLASSES),
        select(options.layers, "lenet5"), [*RUNGS, *ladder.RUNGS], rounds=options.rounds, budget_s=options.budget_s,
        device=options.device, layouts=("nchw",), resume=options.resume, workers=options.workers, survey=True,
        **options.file("papers/lenet5/layers"),
    )  # fmt: skip


class LeNet5(nn.Sequential):
    """[N, 1, size, size] -> scores [N, 10]: convolutions 1 -> 4 -> 16 with 7x7 filters, ReLU, each map halved."""

    def __init__(self, size: int = SIZE) -> None:
        second = (size - 6) // 2
        features = 16 * ((second - 6) // 2) ** 2
        super().__init__(
            nn.Conv2d(1, 4, 7), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 16, 7), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip


def digits(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Scikit-learn's 1797 digits, enlarged: [N, 1, size, size] from 0 to 1, and which they are [N]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'fastconv[bench]'") from error
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    images = nn.functional.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images, torch.from_numpy(found.target).long()


@functools.cache
def trained(size: int = SIZE, epochs: int = EPOCHS) -> nn.Sequential:
    """LeNet-5 in eval mode, trained by PyTorch on the CPU on all but the last TEST_IMAGES digits."""
    images, labels = (each[:-TEST_IMAGES] for each in digits(size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LeNet5(size)
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        for _ in range(epochs):
            for index in torch.randperm(len(images)).split(BATCH):
                loss = nn.functional.cross_entropy(model(images[index]), labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


def network(options: Options, epochs: int = EPOCHS) -> results.Document:
    """A network row per class and rung, written after each class."""
    device, (out, document) = torch.device(options.device), options.held("papers/lenet5/network", KEY)
    held = {row["class"] for row in results.own_rows(document) if options.resume}
    classes = [
        accuracy
        for accuracy in options.classes or (CLASSES if device.type == "cuda" else CPU_CLASSES)
        if accuracy not in held
    ]
    if not classes:
        return document
    size, deadline = options.image or SIZE, deadline_of(options.budget_s)
    images, labels = (each[-TEST_IMAGES:] for each in digits(size))
    begin = time.perf_counter()
    model = trained(size, epochs)
    options.report(f"trained in {time.perf_counter() - begin:.0f} s")
    with torch.inference_mode():
        for accuracy in classes:
            if is_past(deadline):
                break
            with turns.timing():
                rows = list(_rows(model, images, labels, accuracy, device, options.rounds))
            for row in rows:
                results.put(document, row, KEY)
                right, torchs = row["accuracy"], row["torch_accuracy"]
                options.report(f"{accuracy} {row['mode']}: {right:.4f} right, PyTorch {torchs:.4f}")
            results.write(out, document)
    return document


def _rows(
    model: nn.Sequential, images: torch.Tensor, labels: torch.Tensor, accuracy: str, device: torch.device, rounds: int
) -> Iterator[results.Row]:
    dtype = ours.dtype_of(accuracy)
    x, expected = images.to(device, dtype), labels.to(device)
    exact = _copy(model, device, torch.float64)(images.to(device, torch.float64))
    with pytorch_class(accuracy):
        theirs = _copy(model, device, dtype)
        rungs = dict(_swapped(model, accuracy, device))
        calls = {"torch_eager": functools.partial(theirs, x)}
        calls |= {rung: functools.partial(swapped, x) for rung, swapped in rungs.items()}
        times = timing.measure(calls, device=device, rounds=rounds, flush=False, graph=False).timings
        peer = theirs(x)
        found = agreement(peer, exact)
        for rung, swapped in rungs.items():
            y = swapped(x)
            agrees, timed = agreement(y, exact), times.get(rung)
            peer_us = times["torch_eager"].us if "torch_eager" in times else None
            yield {
                "network": "lenet5_digits",
                "batch": len(x),
                "class": accuracy,
                "mode": rung,
                "us": timed and timed.us,
                "peers": {"torch_eager": peer_us},
                "best_peer": "torch_eager",
                "best_peer_us": peer_us,
                "logits_error": agrees.relative_l2,
                "peer_error": found.relative_l2,
                "top1_agreement": agrees.top1,
                "accuracy": _right(y, expected),
                "torch_accuracy": _right(peer, expected),
                "float64_accuracy": _right(exact, expected),
                "swapped": CONVOLUTIONS,
                "total": CONVOLUTIONS,
            }


def _swapped(model: nn.Sequential, accuracy: str, device: torch.device) -> Iterator[tuple[str, nn.Module]]:
    """Each rung that serves all convolutions in the class, and the network that computes them by it."""
    dtype = ours.dtype_of(accuracy)
    for rung in RUNGS:
        swapped = _copy(model, device, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rung that does not offer the class
            report = fastconv.swap_(swapped, algorithm=rung, precision=precision_of(accuracy), frozen=True)
        if report.swapped == report.total:
            yield rung, swapped
    for rung in ladder.of_class(accuracy) if device.type == "cuda" else ():
        network = _copy(model, device, dtype)
        ladder.swap_(network, rung)
        yield rung, network


def _copy(model: nn.Sequential, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    return copy.deepcopy(model).to(device, dtype)


def _right(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return (scores.argmax(1) == labels).double().mean().item()


PARTS: dict[str, Any] = {"layers": layers, "network": network}
