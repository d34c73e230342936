"""What the planner expects an algorithm to err, against what it does: over the registry, for data of various kinds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from harness import (
    ALGORITHMS,
    CLASSES,
    DEVICES,
    OWN,
    conv2d,
    data_spread,
    make_case,
    planner_device,
    problem,
    refusal,
    yardstick,
)
from shapes import Shape

from fastconv import _C, ops, testing

devices = pytest.mark.parametrize("device", DEVICES)

# Enough outputs that no error is small by luck.
CHANNELS = [1, 3, 5, 16, 64, 256]
WINDOW = [Shape(2, c, 18, 18, 16, 3, 3, padding=(1, 1)) for c in CHANNELS]
POINT = [Shape(2, c, 18, 18, 16, 1, 1) for c in (3, 64, 512)]


def classes_of(device):
    """Those that differ there: on the CPU all of float32 are computed alike."""
    return ["fp32", "fp16", "bf16"] if device == "cpu" else list(CLASSES)


@cache
def make(shape, cls, kind, device):
    """The case, and what it is held against."""
    case = make_case(shape, cls, "nchw", device)
    generator = torch.Generator().manual_seed(shape.terms)
    white = torch.randn(shape.n, shape.c, shape.h, shape.w, generator=generator)
    values = {
        "white": white,
        "rectified": white.relu(),
        "smooth": 1.0 + 0.1 * white,
    }[kind]
    case.input.copy_(values.to(case.input))
    return case, yardstick(case, cls)


def measured_ratio(algorithm, made, cls):
    """The error over PyTorch's own."""
    case, whole = made
    own = whole.peer_errors.relative_l2
    if case.input.is_cuda and cls in ("ieee", "fp32"):  # an FFT, a Winograd algorithm or a split sum is no yardstick
        own = max(own, serial_sum(case.shape.terms) * 2.0**-24)
    return testing.errors(conv2d(case, algorithm, cls), whole.expected).relative_l2 / own


def serial_sum(terms):
    """What is expected of PyTorch's direct sum, in roundoffs: docs/concepts/numerics.md."""
    return math.sqrt(0.15 + 0.044 * terms)


def rows_of(shape, cls, device):
    return {row["algorithm"]: row for row in _C.candidates(problem(shape, cls), planner_device(device))}


@devices
@pytest.mark.parametrize("kind", ["white", "rectified", "smooth"])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("algorithm", OWN)
def test_no_algorithm_errs_by_more_than_is_expected(algorithm, cls, kind, device):
    """By half as much again at most: what depends on data, and on how PyTorch's own kernel sums."""
    if cls not in ALGORITHMS[algorithm]["accuracy"] or cls not in classes_of(device):
        pytest.skip(f"{algorithm} has nothing of its own in class {cls}")
    taken = [shape for shape in WINDOW + POINT if not refusal(algorithm, shape, cls, "nchw", device)]
    if not taken:
        pytest.skip(f"{algorithm} takes none of these shapes")
    wrong = []
    for shape in taken:
        expected = rows_of(shape, cls, device)[algorithm]["expected_error"]
        ratio = measured_ratio(algorithm, make(shape, cls, kind, device), cls)
        # Below a hundredth it is FP32 arithmetic in a class of fewer bits, and is held to its expectation in `fp32`.
        if ratio > max(1.5 * expected, 0.01):
            wrong.append(f"{shape}: {ratio:.2f} times PyTorch's error, where {expected:.2f} is expected")
    assert not wrong, "\n".join(wrong)


@devices
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("c", CHANNELS, ids=str)
def test_auto_stays_within_its_limit(c, cls, device):
    """Of what the planner admits nothing errs by more; a large tile with few channels, which does, is not admitted."""
    shape = WINDOW[CHANNELS.index(c)]
    limit = _C.error_limit(problem(shape, cls), planner_device(device))
    made = make(shape, cls, "rectified", device)
    for name, row in rows_of(shape, cls, device).items():
        if name == "torch" or not row["ok"]:
            continue
        ratio = measured_ratio(name, made, cls)
        if row["auto_eligible"]:
            assert ratio <= 1.1 * limit, (name, ratio)
        # With few channels PyTorch errs by one roundoff or so, a tile of transforms by its noise gain.
        if c <= 3 and ALGORITHMS[name]["noise_gain"] > 5.0 and cls in ("ieee", "fp32"):
            assert not row["auto_eligible"]
            assert ratio > limit


@pytest.mark.parametrize("algorithm", [name for name in OWN if ALGORITHMS[name]["tile"] != (1, 1)])
@devices
def test_one_large_pixel_costs_the_noise_gain_of_its_place(algorithm, device):
    """The data that no average covers: an output beside a pixel that outweighs its tile has the tile's error, up to
    `data_spread` times the noise gain, where PyTorch rounds a single product."""
    if refusal(algorithm, WINDOW[0], "fp32", "nchw", device):
        pytest.skip("no kernel for this device")
    gain = data_spread(algorithm) * ALGORITHMS[algorithm]["noise_gain"]
    product = 2.5 if device == "cuda" else 1.5
    for c in (1, 4, 64):
        shape = Shape(1, c, 16, 16, 16, 3, 3, padding=(1, 1))
        for row, column in ((4, 4), (5, 6), (6, 5), (7, 7)):
            case = make_case(shape, "fp32", "nchw", device)
            case.input[:, :, row, column] *= 1e8
            whole = yardstick(case, "fp32")
            error = testing.errors(conv2d(case, algorithm, "fp32"), whole.expected).relative_l2 * 2.0**24
            assert error <= gain * math.hypot(product, 0.41 * math.sqrt(c)), (c, row, column, error)


def test_weight_gradients_err_as_expected():
    """Each own weight gradient, where `choose_weight_gradient` takes it by name."""
    held = set()
    dense = Shape(4, 16, 20, 20, 16, 3, 3, padding=(1, 1))
    for shape in (dense, replace(dense, groups=16), replace(dense, r=1, s=1, padding=(0, 0))):
        case = make_case(shape, "fp32", "nchw")
        x, generator = case.input, torch.Generator().manual_seed(3)
        grad = torch.randn(shape.n, shape.k, shape.p, shape.q, generator=generator)
        padding = list(shape.padding)
        exact = torch.nn.grad.conv2d_weight(x.double(), case.weight.shape, grad.double(), 1, padding, 1, shape.groups)
        geometry = (list(case.weight.shape), [1, 1], padding, [1, 1], shape.groups, False)
        serial = serial_sum(shape.n * shape.p * shape.q)
        for name in OWN:
            row = _C.choose_weight_gradient(name, problem(shape, "fp32"), planner_device("cpu"))
            if row["algorithm"] == name:
                held.add(name)
                dw = ops.weight_gradient_kernel_op(x, grad, *geometry, name, "fp32")
                error = testing.errors(dw, exact).relative_l2 * 2.0**24
                assert error <= 1.5 * row["expected_error"] * serial, (name, error)
    registered = {row["algorithm"] for row in _C.weight_gradients(problem(dense, "fp32"), planner_device("cpu"))}
    assert held == registered - {"torch"}
