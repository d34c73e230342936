"""Plain float64 references for the tests: the convolution itself, and Winograd's algorithm stage by stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastconv import settings


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual_after: bool = False,
    max_pool: bool = False,
) -> Tensor:
    """`fastconv.conv2d` in float64 by PyTorch, on the input's device. Differentiable."""
    arguments: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = F.conv2d(input.double(), weight.double(), None if bias is None else bias.double(), **arguments)
    if residual is not None and not residual_after:
        y = y + residual.double()
    y = activate(y, activation, negative_slope)
    if residual is not None and residual_after:
        y = y + residual.double()
    return F.max_pool2d(y, 2) if max_pool else y


def activate(y: Tensor, activation: str | None, negative_slope: float = 0.01) -> Tensor:
    """The activation of `fastconv.conv2d`, by PyTorch, in the tensor's dtype."""
    match settings.resolve_activation(activation):
        case "relu":
            return F.relu(y)
        case "relu6":
            return F.relu6(y)
        case "silu":
            return F.silu(y)
        case "leaky_relu":
            return F.leaky_relu(y, negative_slope)
        case "gelu":
            return F.gelu(y)
        case "gelu_tanh":
            return F.gelu(y, approximate="tanh")
        case "hardswish":
            return F.hardswish(y)
        case "sigmoid":
            return torch.sigmoid(y)
    return y


@dataclass(frozen=True)
class WinogradMatrices:
    """Y = A^T [(G g G^T) * (B^T d B)] A for tiles of m x m outputs and 3 x 3 filters; alpha = m + 2. float64."""

    at: Tensor  # A^T [m, alpha]
    g: Tensor  # G [alpha, 3]
    bt: Tensor  # B^T [alpha, alpha]


WINOGRAD_POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 0.5**0.5, -(0.5**0.5), 2.0**0.5, -(2.0**0.5))}


def winograd_matrices(m: int) -> WinogradMatrices:
    """Cook-Toom matrices of F(m, 3), m = 2 or 4, over `WINOGRAD_POINTS` and infinity.

    Row i of B^T holds the coefficients of prod_{j != i} (x - a_j), row i of G the powers of a_i over
    f_i = prod_{j != i} (a_i - a_j), column i of A^T the powers of a_i. For the point 0, f moves into B^T, so that the
    first and last rows of G copy a filter tap."""
    if m not in WINOGRAD_POINTS:
        raise ValueError(f"m is {m}; expected one of {', '.join(map(str, WINOGRAD_POINTS))}")
    points, alpha = WINOGRAD_POINTS[m], m + 2
    at = torch.zeros(m, alpha, dtype=torch.float64)
    g = torch.zeros(alpha, 3, dtype=torch.float64)
    bt = torch.zeros(alpha, alpha, dtype=torch.float64)
    for i, point in enumerate(points):
        others = [other for other in points if other != point]
        factor = 1.0
        for other in others:
            factor *= point - other
        at[:, i] = torch.tensor([point**power for power in range(m)], dtype=torch.float64)
        g[i] = torch.tensor([point**power for power in range(3)], dtype=torch.float64) / (factor if point else 1.0)
        bt[i, :-1] = _polynomial(others) / (1.0 if point else factor)
    at[-1, -1] = 1.0
    g[-1, -1] = 1.0
    bt[-1] = _polynomial(points)
    return WinogradMatrices(at, g, bt)


def _polynomial(roots: Sequence[float]) -> Tensor:
    """Coefficients of prod (x - root), lowest power first."""
    coefficients = torch.ones(1, dtype=torch.float64)
    for root in roots:
        coefficients = F.pad(coefficients, (1, 0)) - root * F.pad(coefficients, (0, 1))
    return coefficients


@dataclass(frozen=True)
class WinogradStages:
    """Every stage of a Winograd convolution, float64. Tiles are counted row by row: T = N * ceil(P/m) * ceil(Q/m)."""

    u: Tensor  # transformed filter [alpha, alpha, K, C]
    v: Tensor  # transformed input [alpha, alpha, T, C]
    m: Tensor  # product [alpha, alpha, T, K]
    y: Tensor  # output [N, K, P, Q]


def winograd_conv2d(x: Tensor, w: Tensor, m: int, padding: int | Sequence[int] = 0) -> WinogradStages:
    """The stages of F(m x m, 3 x 3) for x [N, C, H, W] and w [K, C, 3, 3], stride 1, zero padding."""
    if tuple(w.shape[2:]) != (3, 3):
        raise ValueError(f"w has shape {list(w.shape)}; expected [K, C, 3, 3]")
    pad_h, pad_w = (padding, padding) if isinstance(padding, int) else padding
    matrices = winograd_matrices(m)
    at, g, bt = (matrix.to(x.device) for matrix in (matrices.at, matrices.g, matrices.bt))
    n, _, h, width = x.shape
    p, q = h + 2 * pad_h - 2, width + 2 * pad_w - 2
    tiles_h, tiles_w = -(-p // m), -(-q // m)
    padded = F.pad(
        x.double(), (pad_w, tiles_w * m + 2 - width - pad_w, pad_h, tiles_h * m + 2 - h - pad_h)
    )  # up to whole tiles
    tiles = padded.unfold(2, m + 2, m).unfold(3, m + 2, m)  # [N, C, tiles_h, tiles_w, alpha, alpha]
    v = torch.einsum("ai,nchwij,bj->abnhwc", bt, tiles, bt).flatten(2, 4)
    u = torch.einsum("ai,kcij,bj->abkc", g, w.double(), g)
    product = v @ u.transpose(-1, -2)
    y = torch.einsum("ia,abtk,jb->tkij", at, product, at).reshape(n, tiles_h, tiles_w, -1, m, m)
    y = y.permute(0, 3, 1, 4, 2, 5).reshape(n, -1, tiles_h * m, tiles_w * m)[:, :, :p, :q]
    return WinogradStages(u, v, product, y.contiguous())
