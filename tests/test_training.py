"""Training with swapped layers: what is saved and allocated for the backward, checkpoints, threads, compiled steps.
Several processes: tests/test_distributed.py."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import fastconv
from fastconv.models.compare import bound
from fastconv.testing import errors

CHANNELS_LAST = torch.channels_last
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": CHANNELS_LAST}


class Block(nn.Module):
    """relu(norm(conv(relu(conv(x)))) + x), on the third of its convolutions, which is strided, at last."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.down = nn.Conv2d(channels, 2 * channels, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.second(torch.relu(self.first(x)))) + x))


def images(device: str = "cpu", n: int = 4, channels: int = 8, side: int = 13) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, channels, side, side - 2, generator=generator)
    return x.to(device).contiguous(memory_format=CHANNELS_LAST)


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Output, and the gradients of input and parameters, of the mean of squares of run(x); of model(x) by default."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = (run or model)(x)
    y.square().mean().backward()  # a reentrant checkpoint knows no other way
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def gradients_apart(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The same without touching the parameters' `grad`, which threads share."""
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *model.parameters()])]


def assert_as_good_as_torch(found: list[Tensor], peer: list[Tensor], expected: list[Tensor]) -> None:
    """Each as close to float64 as the bound on a network's outputs allows; peer: PyTorch's, in the same dtype."""
    convolutions = sum(isinstance(module, nn.Conv2d) for module in Block().modules())
    for one, its, wanted in zip(found, peer, expected, strict=True):
        limit = bound(errors(its, wanted).relative_l2, "fp32", convolutions)
        assert errors(one, wanted).relative_l2 <= limit


# ------------------------------------------------------------------------------------------ what the backward keeps


def saved_bytes(run: Callable[[], Tensor]) -> tuple[list[int], Tensor]:
    """The sizes of all storages that autograd keeps for the backward of a call, ascending; and its output."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run()
    return sorted(storages.values()), y


GEOMETRIES = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "1x1": {"kernel_size": 1, "bias": False},
    "strided": {"kernel_size": 3, "padding": 1, "stride": 2},
    "dilated": {"kernel_size": (3, 1), "padding": (2, 0), "dilation": 2},
    "grouped": {"kernel_size": 3, "padding": "same", "groups": 4},
    "reflected": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("input_gradient", [False, True], ids=["first", "inner"])
def test_what_is_saved_is_what_torch_saves(geometry, format, autocast, input_gradient, device):
    """The plain input and the plain weight, each once: no packed weight, no second copy."""
    theirs = nn.Conv2d(8, 16, **GEOMETRIES[geometry]).to(device=device, memory_format=FORMATS[format])
    ours = copy.deepcopy(theirs)
    fastconv.swap_(ours)
    x = images(device).contiguous(memory_format=FORMATS[format]).requires_grad_(input_gradient)
    found = []
    for layer in (theirs, ours):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            found.append(saved_bytes(lambda layer=layer: layer(x)))
    (expected, y_torch), (saved, y) = found
    assert expected
    assert saved == expected
    assert y.stride() == y_torch.stride()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU: allocations are counted there")
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
def test_a_step_allocates_what_torch_does_and_the_packed_weights(autocast):
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(4)]
    base = nn.Sequential(*layers).to("cuda", memory_format=CHANNELS_LAST)
    x = images("cuda", 16, 64, 56)
    weights = sum(p.nbytes for p in base.parameters())

    def peak(model: nn.Module) -> int:
        def step() -> None:
            model.zero_grad()
            with torch.autocast("cuda", autocast, enabled=autocast is not None):
                loss = model(x).float().square().mean()
            loss.backward()

        for _ in range(2):
            step()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - held

    theirs = peak(base)
    fastconv.swap_(base)
    # A packed weight holds at most the 16 products of F(4x4)'s transform, in three halves, of each 3x3 filter.
    assert peak(base) <= theirs + 36 / 9 * 3 * 2 / 4 * 2 * weights


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpoints_compute_again_what_was_not_kept(reentrant, device, full_precision):
    theirs = Block().to(device, memory_format=CHANNELS_LAST)
    ours = copy.deepcopy(theirs)
    fastconv.swap_(ours)
    x = images(device)
    exact, x64 = copy.deepcopy(theirs).double(), x.double()
    expected = gradients(exact, x64)
    again = copy.deepcopy(ours)
    found = gradients(again, x, lambda x: checkpoint(again, x, use_reentrant=reentrant))
    assert_as_good_as_torch(found, gradients(theirs, x), expected)
    assert found[0].is_contiguous(memory_format=CHANNELS_LAST)
    assert found[1].is_contiguous(memory_format=CHANNELS_LAST)
    if not reentrant:  # whose forward pass does not know that it trains, and need not count the packing
        for one, kept in zip(found, gradients(ours, x), strict=True):
            assert torch.equal(one, kept)  # the same layers, the same choices


def test_a_checkpoint_keeps_its_input_alone():
    model = Block()
    fastconv.swap_(model)
    x = images().requires_grad_()
    kept, _ = saved_bytes(lambda: model(x))
    checkpointed, _ = saved_bytes(lambda: checkpoint(model, x, use_reentrant=True))
    assert checkpointed == [x.nbytes]
    assert len(kept) > 5


# ----------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("algorithm", ["auto", "winograd_f4", "implicit_gemm"])
def test_eight_threads_train_and_infer_with_one_model(algorithm, device, full_precision):
    """Each with inputs of its own, and on a GPU a stream: with gradients and without, in turns."""
    if device == "cpu" and algorithm == "implicit_gemm":
        pytest.skip("implicit_gemm has no cpu kernel")
    theirs = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1)).to(device)
    ours = copy.deepcopy(theirs)
    fastconv.swap_(ours, algorithm=algorithm, precision="fp32")
    inputs = [images(device, side=13 + index % 3) + index for index in range(8)]
    exact = copy.deepcopy(theirs).double()
    expected = [gradients_apart(exact, x.double()) for x in inputs]
    found: list[float] = [1.0] * 8

    def work(index: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
        with stream:
            worst = 0.0
            for _ in range(5):
                results = gradients_apart(ours, inputs[index])
                with torch.no_grad():
                    results[0] = ours(inputs[index])
                pairs = zip(results, expected[index], strict=True)
                worst = max(worst, *(errors(one, wanted).relative_l2 for one, wanted in pairs))
            found[index] = worst

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(found) < 1e-5, found


# ---------------------------------------------------------------------------------------------------------- compiled


def trained(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, steps: int = 3) -> list[Tensor]:
    """The loss of each step of SGD, and the parameters after the last."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_is_eager_training(backend, device, full_precision):
    torch._dynamo.reset()
    base = Block().to(device, memory_format=CHANNELS_LAST)
    x = images(device)
    exact, theirs, ours = copy.deepcopy(base).double(), copy.deepcopy(base), copy.deepcopy(base)
    fastconv.swap_(ours)
    eager = copy.deepcopy(ours)
    expected, peer = trained(exact, exact, x.double()), trained(theirs, theirs, x)
    compiled = torch.compile(ours, backend=backend, fullgraph=True, dynamic=False)
    for found in (trained(eager, eager, x), trained(ours, compiled, x)):
        assert_as_good_as_torch(found, peer, expected)
    assert compiled(x).is_contiguous(memory_format=CHANNELS_LAST)


def test_no_compiled_backward_pass_calls_python_of_ours(device, full_precision):
    """Gradients of a layer are one call; of a first layer, and of a transposed one, each is."""
    torch._dynamo.reset()
    layers = nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(8, 4, 3, padding=1)
    base = nn.Sequential(*layers).to(device, memory_format=CHANNELS_LAST)
    x = images(device)
    exact, theirs, ours = copy.deepcopy(base).double(), copy.deepcopy(base), copy.deepcopy(base)
    fastconv.swap_(ours, algorithm="implicit_gemm")
    compiled = torch.compile(ours, fullgraph=True, dynamic=False)
    with torch.compiler.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(lambda: trained(ours, compiled, x))
    assert_as_good_as_torch(found, trained(theirs, theirs, x), trained(exact, exact, x.double()))
    called = re.findall(r"torch\.ops\.fastconv\.(\w+)\.default\(", "".join(codes))
    # Of a transposed layer the input's gradient is a convolution.
    gradients = ["conv2d_compiled", "conv2d_gradients", *["conv2d_weight_gradient_compiled"] * 2]
    assert sorted(called) == sorted([*gradients, "conv2d_compiled", "conv2d_compiled", "conv_transpose2d_compiled"])
