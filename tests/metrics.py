"""How wrong an output may be, by the metrics of fastconv.testing. Derivations: docs/concepts/numerics.md, "What the
tests check"."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fastconv.testing import Errors

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Spacing of the subnormals: what is lost there does not shrink with the value.
SUBNORMAL_QUANTUM = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
MEAN_PRODUCT = 2.0 / math.pi  # E|x w| of two standard normal values
# Chance that one correct comparison is rejected, given Gaussian errors: a run makes about 10^5 of them.
FALSE_ALARM = 1e-7


@dataclass(frozen=True)
class Bound:
    """What an output may deviate by: limits of `Errors`."""

    l2: float
    maximum: float
    bias: float

    def __add__(self, other: Bound) -> Bound:
        return Bound(self.l2 + other.l2, self.maximum + other.maximum, self.bias + other.bias)

    def violations(self, errors: Errors) -> list[str]:
        pairs = [
            ("relative L2 error", errors.relative_l2, self.l2),
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
    expected: float = 1.0,
    uneven: float = 1.0,
) -> Bound:
    """The bound for one output.

    magnitude: sum of |x||w| plus |bias| plus |residual| per element, float64: the scale on which rounding happens.
    peer: PyTorch's own errors. multiple: the algorithm's declared multiple of them.
    rounding: what the algorithm's arithmetic must be expected to cost.
    terms: products per output.
    correlated: outputs that share their rounding errors (a Winograd tile, the uses of a filter).
    expected: the multiple of PyTorch's error that is to be expected, of which `multiple` makes an allowance.
    uneven: how many times the root of the mean square the outputs that err most err (in a place of a Winograd tile).
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
    peer_l2, peer_maximum = (value if math.isfinite(value) else 0.0 for value in (peer.relative_l2, peer.maximum))
    floor_l2 = floor / ref_rms
    l2 = max(multiple * peer_l2, floor_l2 + output_rounding)
    # Where errors are uneven, the largest is one of the noisiest outputs: of what is expected, not of the allowance.
    noisiest = max(l2, uneven * expected * peer_l2, uneven * floor_l2 + output_rounding)
    spread = 1.0 / mag_rms  # max(magnitude) / rms(magnitude)
    # The systematic part may be as large as PyTorch's whole error, a `multiple`-th of l2; the rest is chance.
    bias = l2 * (1.0 / multiple + peak / math.sqrt(independent)) * ref_rms / float(ref.abs().mean())
    return Bound(l2, max(multiple * peer_maximum, peak * spread * noisiest), bias)
