"""Norms and noise gains of the Winograd transforms: the numbers that docs/concepts/numerics.md quotes. Run to print.

The matrices follow from the points alone (Toom-Cook): with f(x) = prod_i (x - p_i) over the finite points,
  A^T[j,i] = p_i^j,  G[i,j] = p_i^j / N_i with N_i = prod_{l != i} (p_i - p_l),
  B^T[i,:] = coefficients of f(x) / (x - p_i),
and the point at infinity contributes the last column of A^T, the last row of G and f itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

HALF_SQRT2 = math.sqrt(2.0) / 2.0
# The points of csrc/winograd/matrices.h, and the textbook's for comparison.
POINTS = {
    "F(2,3) 0 +-1": (2, (0.0, 1.0, -1.0)),
    "F(4,3) 0 +-sqrt2/2 +-sqrt2": (4, (0.0, HALF_SQRT2, -HALF_SQRT2, 2 * HALF_SQRT2, -2 * HALF_SQRT2)),
    "F(4,3) 0 +-1 +-2": (4, (0.0, 1.0, -1.0, 2.0, -2.0)),
}


@dataclass(frozen=True)
class Matrices:
    """Y = at [(g w) . (bt d)]: at [m, a], g [a, 3], bt [a, a], a = m + 2."""

    at: np.ndarray
    g: np.ndarray
    bt: np.ndarray


def matrices(m: int, points: tuple[float, ...]) -> Matrices:
    """The transforms of F(m, 3) at the given finite points and infinity, rows scaled as in the code."""
    size = m + 2
    at, g, bt = np.zeros((m, size)), np.zeros((size, 3)), np.zeros((size, size))
    for i, point in enumerate(points):
        others = [other for other in points if other != point]
        norm = math.prod(point - other for other in others)
        at[:, i] = [point**j for j in range(m)]
        g[i] = [point**j / norm for j in range(3)]
        bt[i, : size - 1] = np.poly(others)[::-1]
        # Rescaled, so that U_0 = g_0 exactly; the product of the two rows does not change.
        if point == 0.0:
            g[i] *= norm
            bt[i] /= norm
    at[m - 1, -1], g[-1, 2] = 1.0, 1.0
    bt[-1] = np.poly(points)[::-1]
    return Matrices(at, g, bt)


def check_identity(transforms: Matrices) -> float:
    """Largest deviation of the bilinear form from the correlation y_j = sum_i d_{j+i} g_i."""
    m = transforms.at.shape[0]
    form = np.einsum("ji,ik,il->jkl", transforms.at, transforms.g, transforms.bt)
    exact = np.zeros_like(form)
    for j in range(m):
        for i in range(3):
            exact[j, i, j + i] = 1.0
    return float(np.abs(form - exact).max())


def gain(transforms: Matrices) -> float:
    """Largest absolute row sum of B^T: |V| <= gain^2 max|d|."""
    return float(np.abs(transforms.bt).sum(axis=1).max())


def filter_gain(transforms: Matrices) -> float:
    """Largest absolute row sum of G: |U| <= filter_gain^2 max|g|."""
    return float(np.abs(transforms.g).sum(axis=1).max())


def worst_case(transforms: Matrices) -> float:
    """max_j sum_i |A^T_ji| ||G_i||_1 ||B^T_i||_1: |error of y| <= worst^2 eps max|g| max|d| if products err by eps."""
    rows = np.abs(transforms.g).sum(axis=1) * np.abs(transforms.bt).sum(axis=1)
    return float((np.abs(transforms.at) @ rows).max())


def output_noise(transforms: Matrices) -> np.ndarray:
    """What `noise_gain` averages: the same for each of the m outputs, [m]."""
    var_u, var_v = (transforms.g**2).sum(axis=1), (transforms.bt**2).sum(axis=1)
    return (transforms.at**2) @ (var_u * var_v) / 3.0


def noisiest_output(transforms: Matrices) -> float:
    """The error of the noisiest output of a tile over that of all of them, in two dimensions."""
    noise = output_noise(transforms)
    return float(noise.max() / noise.mean())


def noisiest_pixel(transforms: Matrices) -> float:
    """The same gain for data of which one input, in the place where it costs most, outweighs the tile, over the noise
    gain: in two dimensions. Input l reaches the outputs l - 2 to l, each with a signal of variance 1."""
    m, size = transforms.at.shape
    noise = (transforms.bt**2).T @ ((transforms.at**2).sum(axis=0) * (transforms.g**2).sum(axis=1))
    reached = np.array([min(place, m - 1) - max(0, place - 2) + 1 for place in range(size)])
    return float((noise / reached).max() / noise_gain(transforms))


def noise_gain(transforms: Matrices) -> float:
    """How much larger the relative error of y is than that of the products, in two dimensions, for white data.

    Independent relative errors eps of the products U V: var(y) = eps^2 sum (A^T)^2 var(U) var(V), against a signal of
    variance 3. One-dimensional gains multiply. Mean over the m outputs.
    """
    return float(output_noise(transforms).mean())


def main() -> None:
    header = ["points", "identity", "gain B^T", "gain G", "worst 1-D", "worst 2-D", "noise 1-D", "noise 2-D"]
    header += ["noisiest output", "noisiest pixel"]
    print(" | ".join(header))
    for name, (m, points) in POINTS.items():
        transforms = matrices(m, points)
        worst, noise = worst_case(transforms), noise_gain(transforms)
        print(
            f"{name} | {check_identity(transforms):.0e} | {gain(transforms):.3g} | {filter_gain(transforms):.3g} | "
            f"{worst:.3g} | {worst**2:.4g} | {math.sqrt(noise):.3g} | {noise:.3g} | "
            f"{noisiest_output(transforms):.3g} | {noisiest_pixel(transforms):.3g}"
        )


if __name__ == "__main__":
    main()
