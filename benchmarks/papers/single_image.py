"""Single-image ResNet: six layers on 14 x 14 maps at batch 1 with batch norm and ReLU, and whole ResNets.

layers    convolution with the folded norm and ReLU as epilogue, against cuDNN's fusion and PyTorch's passes
kernels   what each algorithm launches: threads, registers, shared memory, occupancy; and the source's statistic of
          correctness, the largest error of an element and the share of elements that are off by more than 1e-5
blocks    the same six as modules, convolution, norm, ReLU: eager, compiled, graph; theirs and ours
networks  ResNet-18, 34, 50, 101, 152 in the same forms
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import fastconv
from benchmarks.harness import launches, ours, results, turns
from benchmarks.harness.runs import deadline_of, free, is_past
from benchmarks.layers import group as layer_group
from benchmarks.layers import suite as layer_suite
from benchmarks.networks import suite as network_suite
from benchmarks.networks.forms import Case
from benchmarks.papers import Options
from benchmarks.papers import networks as paper_networks
from benchmarks.papers.common import DIRECTION, KERNEL_KEY, empty_row
from fastconv import timing
from fastconv.models.compare import pytorch_class
from fastconv.models.layers import Layer

# The source's own microseconds, cuDNN's and its kernel's, on a TITAN X.
SOURCE = {
    "3x3 128->128": (95, 59),
    "3x3 256->256": (155, 117),
    "1x1 512->128": (117, 58),
    "1x1 128->512": (115, 55),
    "1x1 1024->256": (219, 186),
    "1x1 256->1024": (214, 181),
}
LAYERS = [
    Layer("3x3 128->128", 128, 14, 14, 128),
    Layer("3x3 256->256", 256, 14, 14, 256),
    Layer("1x1 512->128", 512, 14, 14, 128, 1, 1, 1, 0),
    Layer("1x1 128->512", 128, 14, 14, 512, 1, 1, 1, 0),
    Layer("1x1 1024->256", 1024, 14, 14, 256, 1, 1, 1, 0),
    Layer("1x1 256->1024", 256, 14, 14, 1024, 1, 1, 1, 0),
]
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
CLASSES = ("ieee", "fp32")
MODES = ("eager", "fused", "fused_graph", "compile")
PEERS = ("torch_eager", "folded_graph", "compile_reduce_overhead", "frozen_reduce_overhead")
CPU_MODES, CPU_PEERS = ("eager", "fused"), ("torch_eager", "folded_eager")
BEYOND = 1e-5  # the source's: an element may be off by so much


def _layers_of(options: Options) -> list[Layer]:
    names = options.layers.split(",") if options.layers else [""]
    return [layer for layer in LAYERS if any(layer.layer.startswith(name) for name in names)]


def _forms(options: Options) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ours and PyTorch's on the device."""
    return (MODES, PEERS) if options.device.startswith("cuda") else (CPU_MODES, CPU_PEERS)


def layers(options: Options) -> results.Document:
    """The six layers, ours by every algorithm, against every rival of a fused pass."""
    return layer_suite.run(
        options.batches or (1,), options.classes or CLASSES, _layers_of(options), rounds=options.rounds,
        budget_s=options.budget_s, device=options.device, layouts=("nchw", "nhwc"), direction=DIRECTION,
        resume=options.resume, workers=options.workers, **options.file("papers/single_image/layers"),
    )  # fmt: skip


def kernels(options: Options) -> results.Document:
    """A row per layer, class and algorithm, in NCHW as the source: what is launched, and how large the errors are."""
    device, (out, document) = torch.device(options.device), options.held("papers/single_image/kernels", KERNEL_KEY)
    rows = results.own_rows(document) if options.resume else []
    held = {tuple(row[name] for name in ("layer", "n", "class")) for row in rows}
    deadline = deadline_of(options.budget_s)
    limits = launches.Multiprocessor.of(device) if device.type == "cuda" else launches.Multiprocessor()
    n = (options.batches or (1,))[0]
    with torch.inference_mode():
        for layer in _layers_of(options):
            for accuracy in options.classes or CLASSES:
                if (layer.layer, n, accuracy) in held or is_past(deadline):
                    continue
                with turns.timing():
                    rows = _kernel_rows(layer, n, accuracy, device, limits)
                for row in rows:
                    results.put(document, row, KERNEL_KEY)
                results.write(out, document)
                options.report(f"{layer.layer} {accuracy}: kernels and errors")
    return document


def _kernel_rows(
    layer: Layer, n: int, accuracy: str, device: torch.device, limits: launches.Multiprocessor
) -> list[results.Row]:
    group = layer_group.Group(layer, n, ours.dtype_of(accuracy), False, [accuracy], ("nchw",), device)
    group.direction = DIRECTION
    layer_group.prepare_data(group, seed=0)
    x, weight, addends = group.inputs["nchw"], group.weights["nchw"], group.addends["nchw"]
    geometry = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2, layer.groups
    exact = nn.functional.conv2d(x.cpu().double(), weight.cpu().double(), addends[0].cpu().double(), *geometry).relu_()
    rows = []
    for candidate in ours.candidates(layer, n, accuracy, "nchw", device, DIRECTION):
        algorithm = candidate["algorithm"]
        if not candidate["ok"] or algorithm == "torch":
            continue
        row = empty_row(layer, n, accuracy, "nchw", DIRECTION) | {"algorithm": algorithm, "config": candidate["config"]}
        row |= {"workspace_bytes": candidate["workspace_bytes"], "kernels": [], "largest": None, "beyond": None}
        row["packed_bytes"] = ours.packed_bytes(algorithm, weight, layer, accuracy)
        try:
            call = ours.contender(algorithm, x, weight, layer, accuracy, *addends)
            difference = (call().cpu().double() - exact).abs_()
            row |= {"largest": difference.max().item(), "beyond": (difference > BEYOND).double().mean().item()}
            if device.type == "cuda":
                row["kernels"] = [launch.fields(limits) for launch in launches.of_call(call)]
        except RuntimeError as error:
            row["notes"][algorithm] = timing.message_of(error)
            timing.recover()
        rows.append(row)
    return rows


class Block(nn.Sequential):
    """Convolution, batch norm with statistics of its own output, ReLU, as a part of ResNet in eval mode."""

    def __init__(self, layer: Layer) -> None:
        convolution = nn.Conv2d(layer.c, layer.k, layer.r, layer.stride, layer.padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(layer.k), nn.ReLU())
        nn.init.kaiming_normal_(convolution.weight)


def block(layer: Layer) -> tuple[nn.Module, torch.Tensor]:
    """A block in eval mode, and its input [1, C, H, W], float32 on the CPU; equal for equal layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, x = Block(layer), torch.randn(1, layer.c, layer.h, layer.w).relu_()
        fastconv.models.calibrate_(module, torch.randn(8, layer.c, layer.h, layer.w).relu_())
    return module.eval(), x


def blocks(options: Options) -> results.Document:
    """A network row per layer, class and form."""
    target = torch.device(options.device)
    out, document = options.held("papers/single_image/blocks", network_suite.KEY)
    held = network_suite.held_of(document) if options.resume else set()
    (modes, peers), deadline = _forms(options), deadline_of(options.budget_s)
    for layer in _layers_of(options):
        module, x = block(layer)
        with torch.inference_mode(), pytorch_class("ieee", benchmark=False):
            reference = copy.deepcopy(module).double()(x.double()).to(target)
        for accuracy in options.classes or CLASSES:
            if is_past(deadline) or all((layer.layer, 1, accuracy, mode, "auto") in held for mode in modes):
                continue
            case = Case(module, accuracy, "auto", x, target, options.compile_limit_s, deadline)
            compiled = network_suite.compiled_layouts_of(accuracy)
            contenders = network_suite.contenders_of(modes, peers, ("nchw", "nhwc"), compiled)
            found = network_suite.Measured(layer.layer, case, contenders, reference, options.rounds, options.report)
            for mode in modes:
                results.put(document, found.row(mode, peers, None, "not asked for"), network_suite.KEY)
            found.release()
            free(target)
            results.write(out, document)
    return document


def networks(options: Options) -> results.Document:
    """The ResNets at batch 1."""
    modes, peers = _forms(options)
    return paper_networks.run(
        options, "papers/single_image/networks", options.networks or RESNETS, options.classes or CLASSES,
        modes=modes, peers=peers, batch=(options.batches or (1,))[0], image=options.image,
        compile_limit_s=options.compile_limit_s,
    )  # fmt: skip


PARTS = {"layers": layers, "kernels": kernels, "blocks": blocks, "networks": networks}
