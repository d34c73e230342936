"""One side of the comparison: a network that is trained, step by step, in one class and form."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from benchmarks.harness.runs import LAYOUTS, time_limit
from fastconv import testing
from fastconv.models.compare import pytorch_class

# Class -> PyTorch's switch, and the dtype of autocast (None: none). Parameters are float32.
CLASSES: dict[str, tuple[str, torch.dtype | None]] = {
    "fp32": ("fp32", None),
    "tf32": ("tf32", None),
    "amp_fp16": ("fp16", torch.float16),
    "amp_bf16": ("bf16", torch.bfloat16),
}
LEARNING_RATE, MOMENTUM = 0.01, 0.9
LOSS_SCALE = 1024.0  # of float16's gradients; small enough for the first step to be taken
NOT_FINITE = 1e30  # an error in a result file, which holds no infinity


@dataclass(frozen=True)
class Form:
    """ours: swapped. mode: of torch.compile, None: eager. layout: memory format of parameters and input."""

    ours: bool
    mode: str | None = None
    layout: str = "nhwc"


OURS = {
    "eager": Form(True),
    "compile_default": Form(True, "default"),
    "compile_reduce_overhead": Form(True, "reduce-overhead"),
}
PEERS = {
    "torch_eager": Form(False),
    "torch_eager_nchw": Form(False, layout="nchw"),
    "compile_default": Form(False, "default"),
    "compile_reduce_overhead": Form(False, "reduce-overhead"),
}


@dataclass(frozen=True)
class Batch:
    """images [N, 3, H, W], float32; targets: a class for each image [N], or for each pixel [N, H, W]."""

    images: Tensor
    targets: Tensor

    def to(self, device: torch.device, dtype: torch.dtype, layout: str = "nhwc") -> Batch:
        images = self.images.to(device, dtype).contiguous(memory_format=LAYOUTS[layout])
        return Batch(images, self.targets.to(device))


def random_batch(model: nn.Module, n: int, image: int, seed: int = 0) -> Batch:
    """Random images and targets: nothing is learnt, but every number moves."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 3, image, image, generator=generator)
    with torch.no_grad():
        shape = copy.deepcopy(model).to("meta")(images[:2].to("meta")).shape
    targets = torch.randint(shape[1], (n, *shape[2:]), generator=generator)
    return Batch(images, targets)


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout off, in place: losses are compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@dataclass(frozen=True)
class Losses:
    """Of the first two steps, the second with the weights that the first has changed; and the first one's gradient of
    all parameters, one after the other."""

    losses: list[float]
    gradient: Tensor

    def errors(self, reference: Losses) -> dict[str, float]:
        """loss_error: the larger relative one of both losses; gradient_error: relative L2."""
        pairs = zip(self.losses, reference.losses, strict=True)
        loss = max((abs(found - wanted) / abs(wanted) for found, wanted in pairs), key=_rank)
        gradient = testing.errors(self.gradient, reference.gradient).relative_l2
        return {name: value if math.isfinite(value) else NOT_FINITE
                for name, value in (("loss_error", loss), ("gradient_error", gradient))}  # fmt: skip


def _rank(error: float) -> float:
    return error if math.isfinite(error) else math.inf


class Trainer:
    """A copy of a network, its optimizer, and one batch, which every step trains on."""

    def __init__(
        self, base: nn.Module, batch: Batch, form: Form, switch: str, autocast: torch.dtype | None,
        device: torch.device, dtype: torch.dtype = torch.float32, algorithm: str = "auto",
    ) -> None:  # fmt: skip
        self.device, self.switch, self.autocast = device, switch, autocast
        self.batch = batch.to(device, dtype, form.layout)
        model = copy.deepcopy(base).to(device, dtype).train()
        self.model = model.to(memory_format=LAYOUTS[form.layout])  # type: ignore[call-overload]
        self.report = fastconv.swap_(self.model, algorithm=algorithm) if form.ours else None
        self.forward = self.model if form.mode is None else torch.compile(self.model, dynamic=False, mode=form.mode)
        # One kernel for all parameters, which also sees an overflow of float16 without asking the host.
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, MOMENTUM, fused=True)
        scales = autocast is torch.float16
        self.scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, enabled=scales)

    def _backward(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = F.cross_entropy(self.forward(self.batch.images), self.batch.targets)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self) -> Tensor:
        """Forward, loss, backward, update; the loss."""
        with pytorch_class(self.switch):
            loss = self._backward()
            self._update()
        return loss

    def first_steps(
        self, limit_s: float | None = None, deadline: float | None = None, benchmark: bool = True
    ) -> Losses:
        """The first two steps. limit_s, deadline: raises TimeoutError if the first, in which it is compiled, takes
        longer, as `time_limit` does."""
        with pytorch_class(self.switch, benchmark=benchmark), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with time_limit(limit_s, deadline):
                first = self._backward()
            self.scaler.unscale_(self.optimizer)
            gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
            gradient = torch.cat(gradients).detach().clone()
            self._update()
            second = self._backward()
            self._update()
        return Losses([first.item(), second.item()], gradient)

    def counts(self) -> dict[str, int]:
        """Convolutions: `total`, `swapped` of them fastconv's, `ours` of these whose forward ran on ours."""
        if self.report is None:
            return {}
        taken = [row for row in self.report.rows if row.swapped]
        ours = sum(row.algorithm not in ("torch", "auto") for row in taken)
        return {"swapped": len(taken), "ours": ours, "total": self.report.total}


def reference(base: nn.Module, batch: Batch, device: torch.device) -> Losses:
    """PyTorch's first steps in float64."""
    trainer = Trainer(base, batch, Form(False), "ieee", None, device, torch.float64)
    return trainer.first_steps(benchmark=False)
