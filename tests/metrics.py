"""How wrong an output is, and how wrong it may be. Derivations: docs/numerics.md, "What the tests check"."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Spacing of the subnormals: what is lost there does not shrink with the value.
SUBNORMAL_QUANTUM = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
MEAN_PRODUCT = 2.0 / math.pi  # E|x w| of two standard normal values
# Chance that one correct comparison is rejected, given Gaussian errors: a run makes about 10^5 of them.
FALSE_ALARM = 1e-7


@dataclass(frozen=True)
class Errors:
    """Errors of an output against float64, all relative to the reference; infinite if anything is not finite."""

    l2: float  # ||y - ref|| / ||ref||
    maximum: float  # max |y - ref| / rms(ref)
    bias: float  # mean((y - ref) sign(ref)) / mean |ref|: below 0, the output is shrunk

    def __str__(self) -> str:
        return f"L2 {self.l2:.3g}, maximum {self.maximum:.3g}, bias {self.bias:+.3g}"


def measure(output: torch.Tensor, reference: torch.Tensor) -> Errors:
    """Compares an output of any dtype with a float64 reference of the same shape."""
    assert output.shape == reference.shape, f"shape {tuple(output.shape)}; expected {tuple(reference.shape)}"
    if reference.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    if not bool(torch.isfinite(output).all()):
        return Errors(math.inf, math.inf, math.inf)
    difference = output.double() - reference
    if not bool(difference.any()):
        return Errors(0.0, 0.0, 0.0)
    # Scaled, so that squares of 1e-40 or 1e35 neither vanish nor overflow.
    scale = float(reference.abs().max())
    if scale == 0.0:
        return Errors(math.inf, math.inf, math.inf)
    difference, reference = difference / scale, reference / scale
    rms = float(reference.square().mean().sqrt())
    return Errors(
        float(difference.norm() / reference.norm()),
        float(difference.abs().max()) / rms,
        float((difference * reference.sign()).mean() / reference.abs().mean()),
    )


@dataclass(frozen=True)
class Bound:
    """What an output may deviate by; the fields are those of Errors."""

    l2: float
    maximum: float
    bias: float

    def violations(self, errors: Errors) -> list[str]:
        pairs = [
            ("relative L2 error", errors.l2, self.l2),
            ("maximum error", errors.maximum, self.maximum),
            ("signed bias", abs(errors.bias), self.bias),
        ]
        return [f"{name} {value:.3g} > {limit:.3g}" for name, value, limit in pairs if not value <= limit]


@dataclass(frozen=True)
class Rounding:
    """Expected rounding errors, in FP32 roundoffs on a typical output: the floor of a bound.

    result: what every output costs, however few its terms: the final roundings, the transforms.
    growth: what the summation adds. It counts where outputs are few, and PyTorch's own error is a matter of luck.
    """

    result: float
    growth: float


def bound(
    reference: torch.Tensor,
    magnitude: torch.Tensor,
    *,
    peer: Errors,
    multiple: float,
    rounding: Rounding,
    dtype: torch.dtype,
    terms: int,
    correlated: float = 1.0,
) -> Bound:
    """The bound for one output.

    magnitude: sum of |x||w| plus |bias| plus |residual| per element, float64: the scale on which rounding happens.
    peer: PyTorch's own errors. multiple: the algorithm's declared multiple of them.
    rounding: what the algorithm's arithmetic must be expected to cost.
    terms: products per output.
    correlated: outputs that share their rounding errors (a Winograd tile, the uses of a filter).
    """
    if reference.numel() == 0:
        return Bound(0.0, 0.0, 0.0)
    scale = float(magnitude.max())
    if scale == 0.0:
        return Bound(0.0, 0.0, 0.0)
    ref, mag = reference / scale, magnitude / scale
    ref_rms, mag_rms = float(ref.square().mean().sqrt()), float(mag.square().mean().sqrt())
    if ref_rms == 0.0:  # an activation has cleared everything: only exact zeros are right
        return Bound(0.0, 0.0, 0.0)
    # A sum of `terms` products of random signs is about this large; one that cancels keeps the errors of its terms.
    typical = max(ref_rms, mag_rms / (MEAN_PRODUCT * math.sqrt(terms)))
    subnormal = SUBNORMAL_QUANTUM[dtype] + rounding.result * math.sqrt(terms) * SUBNORMAL_QUANTUM[torch.float32]
    # Gaussian errors: none of `count` exceeds `peak` deviations, and the norm over few of them scatters by `luck`.
    count = reference.numel()
    peak = math.sqrt(2.0 * math.log(count / FALSE_ALARM))
    independent = max(1.0, count / correlated)
    luck = peak / math.sqrt(2.0 * independent)
    output_rounding = 0.0 if dtype == torch.float32 else UNIT_ROUNDOFF[dtype]
    roundoffs = rounding.result + (rounding.result + rounding.growth) * luck
    # What PyTorch achieves by luck on a handful of values is no yardstick: the floor is what rounding must cost.
    floor = roundoffs * UNIT_ROUNDOFF[torch.float32] * typical + (1.0 + luck) * subnormal / scale
    # Where PyTorch's own answer is not finite (1e30 through a transform), the floor alone is the bound.
    peer_l2, peer_maximum = (value if math.isfinite(value) else 0.0 for value in (peer.l2, peer.maximum))
    l2 = max(multiple * peer_l2, floor / ref_rms + output_rounding)
    spread = 1.0 / mag_rms  # max(magnitude) / rms(magnitude)
    # The systematic part may be as large as PyTorch's whole error, a `multiple`-th of l2; the rest is chance.
    bias = l2 * (1.0 / multiple + peak / math.sqrt(independent)) * ref_rms / float(ref.abs().mean())
    return Bound(l2, max(multiple * peer_maximum, peak * spread * l2), bias)
